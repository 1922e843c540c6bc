import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from gemsmith.errors import RecipeError
from gemsmith.recipe.keys import recipe_schema
from gemsmith.recipe.load import build_recipe, default_values, dump_recipe
from gemsmith.recipe.schema import Recipe, eval_tasks, longest_answer
from gemsmith.runs.run import stage_keys
from gemsmith.system.yaml import parse_yaml

MINIMAL = {"checkpoint": "folder", "data": {"train": "rows.jsonl"}}

SCHEMA = Path(__file__).parents[2] / "recipes" / "recipe.schema.json"


def test_the_shipped_schema_is_the_recipes_own():
    """Made again with: gemsmith schema > recipes/recipe.schema.json."""
    assert json.loads(SCHEMA.read_text()) == recipe_schema()


def described(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Every key below the model, dotted, with its description; those that are sections need none."""
    for key, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if field.annotation not in sections:
            yield f"{prefix}{key}", field.description
        for section in sections:
            yield from described(section, f"{prefix}{key}.")


def test_every_key_has_a_description_that_is_a_sentence():
    descriptions = dict(described(Recipe))
    assert descriptions.keys() >= default_values().keys() | {"checkpoint", "train.mesh.fsdp", "data.train.rows"}
    assert not [key for key, text in descriptions.items() if not (text and text[-1] == ".")]


def test_a_base_is_held_in_what_can_be_trained_on():
    values = {"checkpoint": "x", "data": {"train": "x"}}
    assert build_recipe(values, ["train.dtype=nf4"]).train.dtype == "nf4"
    with pytest.raises(
        RecipeError, match=r"train\.dtype: 'int4' was given, input should be 'bfloat16', 'float32', 'nf4' or 'int8'"
    ):
        build_recipe(values, ["train.dtype=int4"])


VERILOG = {"task": "verilog", "dataset": "d"}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([{"task": "verilog"}], "eval.tasks.0.dataset: is missing; verilog needs the folder"),
        (
            [VERILOG | {"prompt": "kind"}],
            "eval.tasks.0.prompt: kind was given; verilog has official, fenced, paper; set one, or name",
        ),
        ([VERILOG, VERILOG], "eval.tasks.1: is the same as eval.tasks.0"),
        ([VERILOG | {"temprature": 1.0}], "unknown key eval.tasks.0.temprature (did you mean temperature?); allowed"),
        ([VERILOG | {"samples": 0}], "eval.tasks.0.samples: 0 was given, input should be greater than 0"),
        ([VERILOG | {"top_p": 1.5}], "eval.tasks.0.top_p: 1.5 was given, input should be less than or equal to 1"),
        ([{"task": "exact"}], "eval.tasks.0.task: exact scores held-out rows, but data.eval names none"),
        ("verilog", "eval.tasks: 'verilog' was given, it must be a list"),
    ],
)
def test_a_task_of_eval_that_cannot_be_is_one_line(tasks, expected):
    with pytest.raises(RecipeError) as error:
        build_recipe(MINIMAL | {"eval": {"tasks": tasks}})
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_held_out_rows_are_answered_greedily_and_once():
    values = {"checkpoint": "x", "data": {"train": "x", "eval": "y"}}
    with pytest.raises(RecipeError, match=r"^eval\.tasks\.0\.samples: was given, but exact judges one greedy answer"):
        build_recipe(values | {"eval": {"tasks": [{"task": "exact", "samples": 5}]}})
    assert build_recipe(values | {"eval": {"tasks": [{"task": "exact", "max_tokens": 5}]}})


def test_the_keys_of_before_there_were_tasks_mean_one_task_on_the_held_out_rows():
    old = build_recipe({"checkpoint": "x", "data": {"train": "x", "eval": "y"}, "eval": {"scorer": "verilog-exact"}})
    assert [task.task for task in eval_tasks(old)] == ["verilog-exact"]
    assert eval_tasks(build_recipe(MINIMAL)) == () and longest_answer(build_recipe(MINIMAL)) == 0
    several = build_recipe(MINIMAL | {"eval": {"tasks": [VERILOG | {"max_tokens": 2048}], "max_tokens": 64}})
    assert longest_answer(several) == 2048


def test_a_task_survives_the_dumped_recipe():
    recipe = build_recipe(MINIMAL | {"eval": {"tasks": [VERILOG | {"temperature": 0, "seed": 3}]}})
    assert build_recipe(parse_yaml(dump_recipe(recipe), "recipe")) == recipe
    assert stage_keys(recipe, "eval")["eval.tasks"][0]["seed"] == 3
