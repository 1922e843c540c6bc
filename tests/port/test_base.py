"""The base model of a source, and its target modules."""

import json
from pathlib import Path

import yaml

from gemsmith.port import port
from gemsmith.zoo import LORA_KINDS

FOLDER = Path(__file__).parent / "settings"
ADAPTER = json.loads((FOLDER / "adapter_config.json").read_text())
TRL_YAML = yaml.safe_load((FOLDER / "trl.yaml").read_text())


def test_a_checkpoint_folder_says_which_model_it_is(tmp_path, tiny_checkpoint, write):
    folder = tiny_checkpoint("tiny-e2b")
    ported = port([write(tmp_path, ADAPTER | {"base_model_name_or_path": str(folder), "target_modules": "all-linear"})])
    assert ported.recipe.checkpoint == str(folder)
    assert [row.key for row in ported.differences] == ["target_modules"]


def test_all_linear_is_understood_in_a_list_of_one(tmp_path, write):
    ported = port(
        [
            write(
                tmp_path,
                TRL_YAML | {"model_name_or_path": "google/gemma-4-31B-it", "lora_target_modules": ["all-linear"]},
            )
        ]
    )
    assert (ported.recipe.lora.targets, ported.differences) == (LORA_KINDS, [])
