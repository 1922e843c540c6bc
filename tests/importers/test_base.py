"""The base model of a source, and its target modules."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gemsmith.arch import LORA_KINDS
from gemsmith.errors import RecipeError
from gemsmith.importers import port
from gemsmith.system import patterns

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


AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())


def differing(tmp_path, write, settings, *overrides):
    ported = port([write(tmp_path, settings)], overrides=overrides, devices=1)
    return [row.key for row in ported.differences], ported.recipe


def test_all_linear_layers_are_adapted_where_the_backend_can(tmp_path, write):
    all_linear = AXOLOTL | {"base_model": "google/gemma-4-E4B-it", "lora_target_linear": True}
    differs, recipe = differing(tmp_path, write, all_linear, "train.backend=trl")
    assert (differs, recipe.lora.targets) == ([], ("all-linear",))
    ported = port([write(tmp_path, all_linear)])
    (row,) = ported.differences
    assert "per_layer_gate" in row.why and row.why.endswith("--set train.backend=trl adapts them all")


def test_rows_with_images_are_ported_and_not_refused(tmp_path, write):
    pattern = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
    images = {"processor_type": "AutoProcessor", "freeze_mm_modules": True, "lora_target_modules": pattern}
    sees = AXOLOTL | images | {"base_model": "google/gemma-4-E2B-it", "lora_target_linear": False}
    for backend in ("tunix", "trl"):
        differs, recipe = differing(tmp_path, write, sees, f"train.backend={backend}")
        assert (differs, recipe.lora.targets) == ([], LORA_KINDS)
    tower = sees | {"lora_target_modules": pattern + r"|.*(vision_tower|embed_vision).*"}
    assert differing(tmp_path, write, tower)[1].lora.targets == (*LORA_KINDS, "vision")
    # With images all linear layers are also those that embed them.
    whole = sees | {"base_model": "google/gemma-4-31B-it", "lora_target_linear": True}
    assert differing(tmp_path, write, whole)[0] == ["lora_target_linear"]
    assert differing(tmp_path, write, whole, "train.backend=trl")[0] == []
    assert differing(tmp_path, write, sees | {"freeze_mm_modules": False})[0] == ["freeze_mm_modules"]
    assert differing(tmp_path, write, sees | {"image_size": 512})[0] == ["image_size"]


def test_quantised_experts_are_what_the_backend_does(tmp_path, write):
    for backend, quantized in (("tunix", True), ("trl", False)):
        settings = AXOLOTL | {"base_model": "google/gemma-4-26B-A4B-it", "quantize_moe_experts": quantized}
        assert differing(tmp_path, write, settings, f"train.backend={backend}")[0] == []
        settings["quantize_moe_experts"] = not quantized
        assert differing(tmp_path, write, settings, f"train.backend={backend}")[0] == ["quantize_moe_experts"]


def test_a_pattern_that_takes_for_ever_is_one_line(tmp_path, write, monkeypatch):
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.05)
    for pattern in (r"(?:a|.|a?.)+[0-9].*QQ|(?:.|..)+[QX]", "(?:(?:a{1000}){1000}){1000}"):
        with pytest.raises(RecipeError, match="not a regular expression that can be used"):
            port([write(tmp_path, AXOLOTL | {"lora_target_modules": pattern, "lora_target_linear": False})])


def test_an_alias_bomb_and_a_pipe_are_one_line(tmp_path):
    lines = ["base_model: google/gemma-4-31B-it", "a: &a [x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghijkl")]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, said in (("bomb.yaml", "aliases are recursive, or make more"), ("pipe.yaml", "is not a regular file")):
        with pytest.raises(RecipeError, match=said):
            port([tmp_path / name])
