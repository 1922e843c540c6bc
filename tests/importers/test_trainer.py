"""TrainingArguments, SFTConfig, and the YAML of TRL's command line."""

import json
from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.importers import port

FOLDER = Path(__file__).parent / "settings"
SFT = json.loads((FOLDER / "sft_config.json").read_text())
ON_31B = ["checkpoint=google/gemma-4-31B-it"]


@pytest.mark.parametrize(
    ("changed", "dtype", "differing"),
    [
        ({"bf16": False}, "float32", []),
        ({"bf16": False, "dtype": "torch.bfloat16"}, "bfloat16", []),
        ({"bf16": True, "dtype": "float32"}, "bfloat16", []),
        ({"dtype": "float16"}, "bfloat16", ["dtype"]),
    ],
)
def test_the_dtype_is_that_of_the_products(tmp_path, write, changed, dtype, differing):
    ported = port([write(tmp_path, SFT | changed)], overrides=ON_31B)
    assert (ported.recipe.train.dtype, [row.key for row in ported.differences]) == (dtype, differing)


@pytest.mark.parametrize(
    ("changed", "differing"),
    [
        ({"assistant_only_loss": False}, ["assistant_only_loss"]),
        ({"assistant_only_loss": False, "completion_only_loss": True}, []),
        ({"assistant_only_loss": False, "completion_only_loss": False}, ["completion_only_loss"]),
    ],
)
def test_training_on_more_than_answers_is_a_difference(tmp_path, write, changed, differing):
    ported = port([write(tmp_path, SFT | changed)], overrides=ON_31B)
    assert [row.key for row in ported.differences] == differing


@pytest.mark.parametrize(("devices", "differing"), [(1, []), (4, ["average_tokens_across_devices"])])
def test_a_mean_of_each_devices_mean_differs_where_there_are_several(tmp_path, write, devices, differing):
    settings = SFT | {"average_tokens_across_devices": False}
    ported = port([write(tmp_path, settings)], overrides=ON_31B, devices=devices)
    assert [row.key for row in ported.differences] == differing


def test_a_length_that_is_no_number_is_refused(tmp_path, write):
    with pytest.raises(RecipeError, match="max_length is 'long'; it must be a whole number above 0"):
        port([write(tmp_path, SFT | {"max_length": "long"})], overrides=ON_31B)
