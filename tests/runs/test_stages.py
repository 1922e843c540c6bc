"""The table of stages: what each row names is there."""

import ast
from pathlib import Path

import pytest

import gemsmith
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.eval_records import LmEvalRecord
from gemsmith.runs.records import Record
from gemsmith.runs.stages import SERVED, STAGES

SOURCE = Path(gemsmith.__file__).parent


def test_every_record_is_the_one_of_its_stage():
    assert {name: stage.record.stage for name, stage in STAGES.items()} == {name: name for name in STAGES}
    assert {stage.record for stage in STAGES.values()} | {LmEvalRecord} == set(Record.__subclasses__())


@pytest.mark.parametrize("name", STAGES)
def test_every_key_that_a_stage_reads_is_one_of_the_recipe(name):
    keys = (*STAGES[name].keys, *STAGES[name].where_on)
    assert len(keys) == len(set(keys))
    for key in (*keys, *(key for more in STAGES[name].where_on.values() for key in more)):
        model = Recipe
        for part in key.split("."):
            assert part in model.model_fields, key
            model = model.model_fields[part].annotation


def test_a_stage_reads_only_records_of_stages_before_it():
    names = list(STAGES)
    for place, stage in enumerate(STAGES.values()):
        assert set(stage.upstream) <= set(names[:place])
    assert SERVED == ("serve", "bench", "eval")


@pytest.mark.parametrize("name", STAGES)
def test_the_function_of_a_stage_is_there(name):
    module, function = STAGES[name].function
    file = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert function in [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
