import json
from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.recipe import differing_keys, recipe_schema
from gemsmith.recipe_file import build_recipe

MINIMAL = {"checkpoint": "folder", "data": {"train": "rows.jsonl"}}
SCHEMA = Path(__file__).parents[1] / "recipes" / "recipe.schema.json"


@pytest.mark.parametrize(
    ("backend", "key", "expected"),
    [
        (
            "tunix",
            "attention=sdpa",
            "attention: sdpa was given, train.backend tunix has auto, splash, dense; set one of them",
        ),
        ("trl", "attention=splash", "attention: splash was given, train.backend trl has auto, documents, sdpa, eager"),
        ("trl", "remat=[o]", "remat: a list of results was given, train.backend trl has auto, none, layer; set"),
        (
            "trl",
            "offload=[o]",
            r'offload: \["o"\] was given, but train.backend trl keeps all on the device; leave it out, or set ',
        ),
        (
            "trl",
            "compiler_options.a=true",
            'compiler_options: {"a": true} was given, but train.backend trl does not use',
        ),
        ("trl", "tuned=off", "tuned: off was given, but train.backend trl has none of .* set train.backend to tunix$"),
        (
            "trl",
            "checkpoint_folder=gs://b/f",
            "checkpoint_folder: gs://b/f was given, but train.backend trl saves to folders only",
        ),
        ("trl", "dtype=int8", "dtype: int8 was given, train.backend trl has bfloat16, float32, nf4; set one"),
    ],
)
def test_what_a_backend_has_not_is_refused_before_any_stage(backend, key, expected):
    with pytest.raises(RecipeError, match=f"^train.{expected}"):
        build_recipe(MINIMAL, [f"train.backend={backend}", f"train.{key}"])
    assert build_recipe(MINIMAL, [f"train.backend={'trl' if backend == 'tunix' else 'tunix'}", f"train.{key}"])


def test_differing_keys_are_named_with_both_values():
    one, two = (build_recipe(MINIMAL, [f"lora.rank={rank}"]) for rank in (8, 16))
    assert differing_keys(one, two) == {"lora.rank": (8, 16)}


def test_the_shipped_schema_is_the_recipes_own():
    """Made again with: gemsmith schema > recipes/recipe.schema.json."""
    assert json.loads(SCHEMA.read_text()) == recipe_schema()


def test_a_base_is_held_in_what_can_be_trained_on():
    values = {"checkpoint": "x", "data": {"train": "x"}}
    assert build_recipe(values, ["train.dtype=nf4"]).train.dtype == "nf4"
    with pytest.raises(
        RecipeError, match=r"train\.dtype: 'int4' was given, input should be 'bfloat16', 'float32', 'nf4' or 'int8'"
    ):
        build_recipe(values, ["train.dtype=int4"])
