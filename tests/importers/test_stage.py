"""Settings as the projects publish them, in our own words: what becomes of each key, and of the recipe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemsmith.arch import LORA_KINDS
from gemsmith.importers import port
from gemsmith.importers.convert import leaves
from gemsmith.recipe.load import dump_recipe, load_recipe, plain_values, with_values
from gemsmith.runs.resolve import absolute_paths
from support.cases import each

FOLDER = Path(__file__).parent / "settings"
ADAPTER = json.loads((FOLDER / "adapter_config.json").read_text())
SFT = json.loads((FOLDER / "sft_config.json").read_text())
TRL_YAML = yaml.safe_load((FOLDER / "trl.yaml").read_text())
AXOLOTL = yaml.safe_load((FOLDER / "axolotl.yaml").read_text())
FACTORY = yaml.safe_load((FOLDER / "llama_factory.yaml").read_text())

# name -> (settings, --set and other options, keys of the recipe, keys of the source that train differently)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = {
    "adapter": (ADAPTER, {}, {"lora.rank": 16, "lora.alpha": 32.0, "lora.dropout": 0.05, "lora.targets": ["q", "v"],
                              "checkpoint": "google/gemma-4-31B-it"}, set()),
    "adapter of a 12B with rsLoRA and a pattern": (
        ADAPTER | {"base_model_name_or_path": "google/gemma-4-12B", "use_rslora": True,
                   "target_modules": r".*\.(gate|up|down)_proj"}, {},
        {"lora.rslora": True, "lora.targets": ["gate", "up", "down"], "checkpoint": "google/gemma-4-12B"}, set()),
    "adapter with all that Gemsmith has not": (
        ADAPTER | {"use_dora": True, "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 4}, "bias": "all",
                   "init_lora_weights": "pissa", "layers_to_transform": [0, 1],
                   "target_parameters": ["experts.down_proj"]}, {},
        {"lora.rank": 16},
        {"use_dora", "modules_to_save", "rank_pattern.q_proj", "bias", "init_lora_weights", "layers_to_transform",
         "target_parameters"}),
    "adapter on a part of the layers": (
        ADAPTER | {"target_modules": r"model\.language_model\.layers\.[0-9]\.self_attn\.q_proj"}, {},
        {"lora.targets": ["q"]},
        {"target_modules"}),
    "adapter on the head": (ADAPTER | {"target_modules": ["q_proj", "lm_head"]}, {}, {"lora.targets": ["q"]},
                            {"target_modules"}),
    "SFTConfig": (
        SFT, {"overrides": ["checkpoint=google/gemma-4-31B-it"], "devices": 4},
        {"train.global_batch_size": 64, "train.epochs": 3, "optimizer.learning_rate": 2e-4,
         "optimizer.warmup_steps": 50, "optimizer.weight_decay": 0.01, "optimizer.beta2": 0.95,
         "optimizer.epsilon": 1e-6, "optimizer.max_grad_norm": 0.3,
         "train.dtype": "bfloat16", "train.remat": "layer", "data.max_length": 4096, "data.packing": True,
         "data.on_too_long": "error",
         "seed": 7, "train.save_steps": 200, "train.save_total_limit": 2, "optimizer.schedule": "cosine"}, set()),
    "SFTConfig of few keys takes TRL's defaults": (
        {"per_device_train_batch_size": 1, "max_length": 512, "completion_only_loss": True},
        {"overrides": ["checkpoint=google/gemma-4-31B-it"]},
        {"optimizer.learning_rate": 2e-5, "optimizer.schedule": "linear", "optimizer.warmup_steps": 0,
         "optimizer.weight_decay": 0.0,
         "train.epochs": 3, "seed": 42, "data.packing": False, "train.save_steps": 500}, set()),
    "TrainingArguments take their own": (
        {"output_dir": "o", "num_train_epochs": 1, "bf16": True, "max_grad_norm": 0},
        {"overrides": ["checkpoint=google/gemma-4-31B-it"]},
        {"optimizer.learning_rate": 5e-5, "train.global_batch_size": 8, "train.remat": "none",
         "optimizer.max_grad_norm": None}, set()),
    "messages of which all is trained": (
        SFT | {"assistant_only_loss": False}, {"overrides": ["checkpoint=google/gemma-4-31B-it"]}, {},
        {"assistant_only_loss"}),
    "settings with other losses, optimizers and orders": (
        SFT | {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2},
               "optim": "adafactor",
               "neftune_noise_alpha": 5, "label_smoothing_factor": 0.1, "group_by_length": True,
               "packing_strategy": "wrapped",
               "loss_type": "dft", "load_best_model_at_end": True, "fp16": True},
        {"overrides": ["checkpoint=google/gemma-4-31B-it"]}, {"optimizer.schedule": "cosine"},
        {"lr_scheduler_type", "lr_scheduler_kwargs.num_cycles", "optim", "neftune_noise_alpha",
         "label_smoothing_factor",
         "group_by_length", "packing_strategy", "loss_type", "load_best_model_at_end", "fp16"}),
    "TRL's command line": (
        TRL_YAML, {}, {"data.train": "train.jsonl", "train.max_steps": 500, "optimizer.warmup_ratio":
        0.1, "lora.rank": 8,
                       "lora.dropout": 0.05, "lora.targets": ["q", "k", "v", "o"], "train.dtype": "bfloat16"}, set()),
    "TRL's command line without an adapter": (
        {key: value for key, value in TRL_YAML.items() if key != "use_peft"}, {},
        {"train.method": "full", "lora.rank": 64, "optimizer.learning_rate": TRL_YAML["learning_rate"]}, set()),
    "TRL's command line without an adapter or a rate": (
        {key: value for key, value in TRL_YAML.items() if not key.startswith(("lora", "use_peft", "learning_rate"))},
        {}, {"train.method": "full", "lora.rank": 64, "optimizer.learning_rate": 2e-5}, set()),
    "SFTConfig of a run that trained all weights": (
        SFT, {"overrides": ["checkpoint=google/gemma-4-31B-it", "train.method=full"]},
        {"train.method": "full", "optimizer.learning_rate": 2e-4, "lora.alpha": 64.0}, set()),
    "TRL's command line with QLoRA": (
        TRL_YAML | {"load_in_4bit": True, "lora_target_modules": None}, {}, {"train.dtype": "nf4",
                                                            "lora.targets": ["q", "v"]}, set()),
    "TRL on all linear layers of an E4B": (
        TRL_YAML | {"lora_target_modules": "all-linear"}, {}, {"lora.targets": list(LORA_KINDS)},
        {"lora_target_modules"}),
    "Axolotl": (
        AXOLOTL, {}, {"data.train": "chats.jsonl", "data.format": "messages", "data.max_length": 2048,
        "data.packing": True,
                      "data.on_too_long": "drop", "lora.targets": list(LORA_KINDS), "train.global_batch_size": 4,
                      "optimizer.warmup_steps": 10,
                      "train.dtype": "bfloat16", "optimizer.max_grad_norm": 1.0, "lora.dropout": 0.0,
                      "train.remat": "layer"}, set()),
    "Axolotl, QLoRA on rows of the hub": (
        AXOLOTL | {"base_model": "google/gemma-4-31B", "adapter": "qlora", "load_in_4bit": True,
                   "optimizer": "adamw_torch_8bit",
                   "datasets": [{"path": "someone/chats", "type": "chat_template", "split": "train[:10%]",
                                 "field_messages": "conversations", "message_property_mappings": {"role": "from",
                                                            "content": "value"}}],
                   "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}, "val_set_size": 0.05,
                   "warmup_steps": None,
                   "warmup_ratio": 0.1, "max_grad_norm": 0.1}, {"steps": 305},
        {"train.dtype": "nf4", "optimizer.warmup_steps": 30, "data.train": "chats.jsonl",
         "data.eval": "5%",
         "optimizer.max_grad_norm": 0.1}, {"optimizer"}),
    "Axolotl, all weights, on eight devices whose number it does not say": (
        {key: value for key, value in AXOLOTL.items() if not key.startswith(("lora", "adapter"))}
        | {"fsdp_version": 2, "fsdp_config": {"offload_params": False, "reshard_after_forward": True},
           "train_on_inputs": True}, {},
        {"train.global_batch_size": 4, "train.method": "full"},
        {"fsdp_config.reshard_after_forward", "train_on_inputs"}),
    "Axolotl with Alpaca's prompts, experts and a ratio of unknown steps": (
        AXOLOTL | {"base_model": "google/gemma-4-26B-A4B", "datasets": [{"path": "tatsu/alpaca", "type": "alpaca"}],
                   "lora_target_parameters": ["experts.gate_up_proj"], "warmup_steps": None, "warmup_ratio": 0.1,
                   "lr_scheduler": "rex", "default_system_message": "Be brief."}, {},
        {"data.format": "alpaca", "optimizer.warmup_ratio": 0.1},
        {"datasets[0].type", "lora_target_parameters", "lr_scheduler", "default_system_message"}),
    "LLaMA-Factory": (
        FACTORY, {}, {"lora.rank": 8, "lora.alpha": 16.0, "lora.dropout": 0.0, "lora.targets":
        list(LORA_KINDS), "data.train": "rows.jsonl",
                      "data.max_length": 2048, "data.on_too_long": "error", "train.global_batch_size": 8,
                      "optimizer.warmup_steps": 20,
                      "train.save_steps": 500, "train.remat": "layer", "data.packing": False}, set()),
    "LLaMA-Factory, QLoRA, packed so that rows mix": (
        FACTORY | {"quantization_bit": 4, "double_quantization": False, "packing": True, "mask_history": True,
                   "use_dora": True,
                   "warmup_ratio": 0.1, "warmup_steps": 0}, {"steps": 95},
        {"train.dtype": "nf4", "optimizer.warmup_ratio": 0.1, "data.packing": True}, {"packing", "mask_history",
                                                            "use_dora"}),
    "LLaMA-Factory with several devices and all weights": (
        FACTORY | {"finetuning_type": "full", "deepspeed": "ds_z3.json", "neat_packing": True, "template": "llama3",
                   "val_size": 0.1},
        {"devices": 8}, {"train.global_batch_size": 64, "data.packing": True, "data.eval": "10%",
                         "train.method": "full", "lora.rank": 64},
        {"template"}),
    "a base that is a copy": (
        ADAPTER | {"base_model_name_or_path": "me/mine"}, {"overrides": ["model=gemma4-12b"]},
        {"model": "gemma4-12b", "checkpoint": "me/mine"}, set()),
    "a base that another repeats under its size's name": (
        ADAPTER | {"base_model_name_or_path": "unsloth/gemma-4-26b-a4b-it"}, {}, {"model": "gemma4-26b-a4b"}, set()),
    "another family's settings on a Gemma 4": (
        AXOLOTL | {"base_model": "Qwen/Qwen3-4B", "chat_template": "chatml"},
        {"overrides": ["checkpoint=google/gemma-4-12B-it"]},
        {"checkpoint": "google/gemma-4-12B-it"}, {"chat_template"}),
}  # fmt: skip


@pytest.fixture
def case(tmp_path: Path, write) -> Callable[[str], tuple[Any, ...]]:
    def make(name: str) -> tuple[Any, ...]:
        settings, options, expected, differing = CASES[name]
        return settings, port([write(tmp_path, settings)], **options), expected, differing

    return make


each_case = each("name", CASES, ids=map(str, CASES))


@each_case
def test_every_key_of_a_source_is_in_the_table_once(case, name):
    settings, ported, _, _ = case(name)
    given = [row.key for row in ported.rows if row.given]
    assert sorted(given) == sorted(dict(leaves(settings)))


@each_case
def test_the_recipe_has_what_the_source_says(case, name):
    _, ported, expected, _ = case(name)
    recipe = plain_values(ported.recipe)
    assert {key: recipe[key] for key in expected} == expected


@each_case
def test_what_would_train_differently_is_named_and_nothing_else(case, name):
    _, ported, _, differing = case(name)
    assert {row.key for row in ported.differences} == differing


@each_case
def test_the_written_recipe_loads_to_the_same_one_and_gives_reasons(case, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, ported, _, _ = case(name)
    text = dump_recipe(ported.recipe, ported.derived)
    (tmp_path / "ported.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "ported.yaml") == with_values(ported.recipe, absolute_paths(ported.recipe))
    assert "  # " in text


@each_case
def test_every_value_that_a_row_sets_is_the_recipes(case, name):
    _, ported, _, _ = case(name)
    recipe = ported.recipe.model_dump(mode="json")
    for row in ported.rows:
        for key, value in row.sets.items():
            section = recipe
            for part in key.split("."):
                section = section[part]
            assert section == value, key


def test_there_are_more_than_twenty_cases():
    assert len(CASES) > 20


def test_two_files_of_a_run_make_one_recipe(tmp_path, write):
    ported = port([write(tmp_path, ADAPTER, "adapter_config.json"), write(tmp_path, SFT, "sft.json")], devices=2)
    assert (ported.recipe.lora.rank, ported.recipe.train.global_batch_size, ported.differences) == (16, 32, [])
    assert {row.file for row in ported.rows if row.given} == {"adapter_config.json", "sft.json"}
    assert not [row for row in ported.rows if row.key.startswith("lora.rank")]


def test_set_decides_against_the_source_and_says_so(tmp_path, write):
    source = write(tmp_path, AXOLOTL | {"lr_scheduler": "rex", "warmup_steps": None, "warmup_ratio": 0.1})
    ported = port(
        [source],
        overrides=["optimizer.schedule=linear", "optimizer.warmup_steps=5", "data.train=mine.jsonl", "lora.rank=4"],
    )
    assert ported.differences == []
    assert {row.key for row in ported.rows if row.status == "set"} == {
        "lr_scheduler",
        "warmup_ratio",
        "datasets[0].path",
        "lora_r",
    }
    assert ported.recipe.lora.rank == 4


def test_a_base_without_a_chat_template_is_pointed_out(tmp_path, write, of):
    ported = port([write(tmp_path, AXOLOTL | {"base_model": "google/gemma-4-31B"})])
    assert "google/gemma-4-31B-it" in of(ported.rows, "data.template").why
