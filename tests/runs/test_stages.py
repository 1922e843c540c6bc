"""The table of stages: what each row names is there."""

import ast
from pathlib import Path

import pytest

import gemsmith
from gemsmith.recipe.keys import KEYS, PATHS
from gemsmith.recipe.load import plain_values
from gemsmith.recipe.schema import Data, Recipe
from gemsmith.runs.eval_records import LmEvalRecord
from gemsmith.runs.records import Record
from gemsmith.runs.stages import SERVED, STAGES, reads

SOURCE = Path(gemsmith.__file__).parent


def test_every_record_is_the_one_of_its_stage():
    assert {name: stage.record.stage for name, stage in STAGES.items()} == {name: name for name in STAGES}
    assert {stage.record for stage in STAGES.values()} | {LmEvalRecord} == set(Record.__subclasses__())


def test_every_key_says_which_stages_read_it():
    assert len(KEYS) > 70
    known = {*STAGES, "questions", "held_out", "trackers"}
    assert not [name for name, key in KEYS.items() if not key.stages or not {*key.stages.split()} <= known]
    # Mappings have keys of their own below theirs.
    given = set(plain_values(Recipe(checkpoint="x", data=Data(train="x"))))
    assert given == KEYS.keys()


def test_held_out_rows_are_read_by_eval_and_by_bench_with_images():
    assert reads("eval", "data.eval") and not reads("bench", "data.eval")
    assert reads("bench", "data.eval", image_requests=True) and not reads("serve", "data.eval")
    assert reads("data", "data.eval", held_out=True) and not reads("data", "data.eval")  # train.eval_steps


def test_what_is_a_path_or_not_compiled_is_said_by_the_key():
    assert PATHS == ("checkpoint", "data.train", "data.eval", "data.template", "train.init_adapter", "hardware.catalog")
    assert {"train.save_steps", "train.epochs"} <= {name for name, key in KEYS.items() if not key.compiled}


def test_a_stage_reads_only_records_of_stages_before_it():
    names = list(STAGES)
    for place, stage in enumerate(STAGES.values()):
        assert set(stage.upstream) <= set(names[:place])
    assert SERVED == ("serve", "bench", "eval")


@pytest.mark.parametrize("name", STAGES)
def test_the_function_of_a_stage_is_there(name):
    module, _, function = STAGES[name].function.partition(":")
    file = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert function in [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
