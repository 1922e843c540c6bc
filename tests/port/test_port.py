"""Settings as the projects publish them, in our own words: what becomes of each key, and of the recipe."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemsmith.port import port
from gemsmith.port.read import leaves
from gemsmith.recipe import flatten
from gemsmith.recipe_file import dump_recipe, load_recipe
from gemsmith.zoo import LORA_KINDS

TEXT_ONLY = (
    r"model.language_model.layers.[\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
)

ADAPTER = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "google/gemma-4-31B-it", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
    "lora_alpha": 32,
    "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 16, "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"], "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
SFT = {
    "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_train_epochs": 3,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine", "warmup_steps": 50, "weight_decay": 0.01, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
    "max_grad_norm": 0.3, "bf16": True, "gradient_checkpointing": True, "max_length": 4096, "packing": True,
    "assistant_only_loss": True,
    "seed": 7, "save_steps": 200, "save_total_limit": 2, "logging_steps": 5, "report_to": "tensorboard",
}  # fmt: skip
TRL_YAML = {
    "model_name_or_path": "google/gemma-4-E4B-it", "dtype": "bfloat16", "attn_implementation": "sdpa",
    "use_peft": True, "lora_r": 8,
    "lora_alpha": 16, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "dataset_name": "train.jsonl",
    "learning_rate": 1e-4, "per_device_train_batch_size": 4, "max_length": 2048, "assistant_only_loss": True,
    "max_steps": 500,
    "warmup_steps": 0.1, "lr_scheduler_type": "linear",
}  # fmt: skip
AXOLOTL = {
    "base_model": "google/gemma-4-31B-it", "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rms_norm": True, "strict": False,
    "chat_template": "gemma4", "eot_tokens": ["<turn|>"], "datasets": [{"path": "chats.jsonl",
                                                            "type": "chat_template"}],
    "output_dir": "out", "sequence_len": 2048, "sample_packing": True, "adapter": "lora", "lora_r": 16,
    "lora_alpha": 32, "lora_dropout": 0,
    "lora_target_modules": TEXT_ONLY, "gradient_accumulation_steps": 4, "micro_batch_size": 1, "num_epochs": 1,
    "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "learning_rate": 2e-4, "bf16": "auto", "tf32": True,
    "gradient_checkpointing": True, "logging_steps": 1, "warmup_steps": 10, "evals_per_epoch": 4, "saves_per_epoch": 1,
    "weight_decay": 0.0, "wandb_project": None, "special_tokens": None,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "google/gemma-4-31B-it", "trust_remote_code": True, "stage": "sft", "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8, "lora_target": "all", "dataset": "identity,alpaca_en_demo", "template": "gemma4",
    "cutoff_len": 2048,
    "max_samples": 1000, "preprocessing_num_workers": 16, "output_dir": "saves/lora", "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True, "overwrite_output_dir": True, "report_to": "none", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "bf16": True, "ddp_timeout": 180000000, "resume_from_checkpoint": None,
}  # fmt: skip

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
        {"train.rows_per_step": 64, "train.epochs": 3, "optimizer.learning_rate": 2e-4, "optimizer.warmup_steps": 50,
         "optimizer.weight_decay": 0.01, "optimizer.beta2": 0.95, "optimizer.epsilon": 1e-6, "optimizer.clip_norm": 0.3,
         "train.dtype": "bfloat16", "train.remat": "layer", "data.max_length": 4096, "data.packing": True,
         "data.too_long": "error",
         "seed": 7, "train.checkpoint_every": 200, "train.keep_checkpoints": 2, "optimizer.schedule": "cosine"}, set()),
    "SFTConfig of few keys takes TRL's defaults": (
        {"per_device_train_batch_size": 1, "max_length": 512, "completion_only_loss": True},
        {"overrides": ["checkpoint=google/gemma-4-31B-it"]},
        {"optimizer.learning_rate": 2e-5, "optimizer.schedule": "linear", "optimizer.warmup_steps": 0,
         "optimizer.weight_decay": 0.0,
         "train.epochs": 3, "seed": 42, "data.packing": False, "train.checkpoint_every": 500}, set()),
    "TrainingArguments take their own": (
        {"output_dir": "o", "num_train_epochs": 1, "bf16": True, "max_grad_norm": 0},
        {"overrides": ["checkpoint=google/gemma-4-31B-it"]},
        {"optimizer.learning_rate": 5e-5, "train.rows_per_step": 8, "train.remat": "none",
         "optimizer.clip_norm": None}, set()),
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
        TRL_YAML, {}, {"data.train": "train.jsonl", "train.optimizer_steps": 500, "optimizer.warmup_ratio":
        0.1, "lora.rank": 8,
                       "lora.dropout": 0.05, "lora.targets": ["q", "k", "v", "o"], "train.dtype": "bfloat16"}, set()),
    "TRL's command line without an adapter": (
        {key: value for key, value in TRL_YAML.items() if not key.startswith("lora") and key != "use_peft"}, {}, {},
        {"use_peft"}),
    "TRL's command line with QLoRA": (
        TRL_YAML | {"load_in_4bit": True, "lora_target_modules": None}, {}, {"train.dtype": "nf4",
                                                            "lora.targets": ["q", "v"]}, set()),
    "TRL on all linear layers of an E4B": (
        TRL_YAML | {"lora_target_modules": "all-linear"}, {}, {"lora.targets": list(LORA_KINDS)},
        {"lora_target_modules"}),
    "Axolotl": (
        AXOLOTL, {}, {"data.train": "chats.jsonl", "data.format": "messages", "data.max_length": 2048,
        "data.packing": True,
                      "data.too_long": "drop", "lora.targets": list(LORA_KINDS), "train.rows_per_step": 4,
                      "optimizer.warmup_steps": 10,
                      "train.dtype": "bfloat16", "optimizer.clip_norm": 1.0, "lora.dropout": 0.0,
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
         "data.eval": "chats-eval.jsonl",
         "optimizer.clip_norm": 0.1}, {"optimizer"}),
    "Axolotl, all weights, on eight devices whose number it does not say": (
        {key: value for key, value in AXOLOTL.items() if not key.startswith(("lora", "adapter"))}
        | {"fsdp_version": 2, "fsdp_config": {"offload_params": False, "reshard_after_forward": True},
           "train_on_inputs": True}, {},
        {"train.rows_per_step": 4}, {"adapter", "fsdp_config.reshard_after_forward", "train_on_inputs"}),
    "Axolotl with Alpaca's prompts, experts and a ratio of unknown steps": (
        AXOLOTL | {"base_model": "google/gemma-4-26B-A4B", "datasets": [{"path": "tatsu/alpaca", "type": "alpaca"}],
                   "lora_target_parameters": ["experts.gate_up_proj"], "warmup_steps": None, "warmup_ratio": 0.1,
                   "lr_scheduler": "rex", "default_system_message": "Be brief."}, {},
        {"data.format": "prompt-response", "optimizer.warmup_ratio": 0.1},
        {"datasets[0].type", "lora_target_parameters", "lr_scheduler", "default_system_message"}),
    "LLaMA-Factory": (
        FACTORY, {}, {"lora.rank": 8, "lora.alpha": 16.0, "lora.dropout": 0.0, "lora.targets":
        list(LORA_KINDS), "data.train": "rows.jsonl",
                      "data.max_length": 2048, "data.too_long": "error", "train.rows_per_step": 8,
                      "optimizer.warmup_steps": 20,
                      "train.checkpoint_every": 500, "train.remat": "layer", "data.packing": False}, set()),
    "LLaMA-Factory, QLoRA, packed so that rows mix": (
        FACTORY | {"quantization_bit": 4, "double_quantization": False, "packing": True, "mask_history": True,
                   "use_dora": True,
                   "warmup_ratio": 0.1, "warmup_steps": 0}, {"steps": 95},
        {"train.dtype": "nf4", "optimizer.warmup_ratio": 0.1, "data.packing": True}, {"packing", "mask_history",
                                                            "use_dora"}),
    "LLaMA-Factory with several devices and all weights": (
        FACTORY | {"finetuning_type": "full", "deepspeed": "ds_z3.json", "neat_packing": True, "template": "llama3",
                   "val_size": 0.1},
        {"devices": 8}, {"train.rows_per_step": 64, "data.packing": True, "data.eval": "identity-eval.jsonl"},
        {"finetuning_type", "template"}),
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


def write(folder: Path, settings: dict[str, Any], name: str = "settings.yaml") -> Path:
    file = folder / name
    text = json.dumps(settings, indent=2) if file.suffix == ".json" else yaml.safe_dump(settings, sort_keys=False)
    file.write_text(text, encoding="utf-8")
    return file


def of(rows: list[Any], key: str) -> Any:
    return next(row for row in rows if row.key == key)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, ...]:
    settings, options, expected, differing = CASES[request.param]
    return settings, port([write(tmp_path, settings)], **options), expected, differing


def test_every_key_of_a_source_is_in_the_table_once(case):
    settings, ported, _, _ = case
    given = [row.key for row in ported.rows if row.given]
    assert sorted(given) == sorted(dict(leaves(settings)))


def test_the_recipe_has_what_the_source_says(case):
    _, ported, expected, _ = case
    recipe = dict(flatten(ported.recipe.model_dump(mode="json")))
    assert {key: recipe[key] for key in expected} == expected


def test_what_would_train_differently_is_named_and_nothing_else(case):
    _, ported, _, differing = case
    assert {row.key for row in ported.differences} == differing


def test_the_written_recipe_loads_to_the_same_one_and_gives_reasons(case, tmp_path):
    _, ported, _, _ = case
    text = dump_recipe(ported.recipe, ported.derived)
    (tmp_path / "ported.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "ported.yaml") == ported.recipe
    assert "  # " in text


def test_every_value_that_a_row_sets_is_the_recipes(case):
    _, ported, _, _ = case
    recipe = ported.recipe.model_dump(mode="json")
    for row in ported.rows:
        for key, value in row.sets.items():
            section = recipe
            for part in key.split("."):
                section = section[part]
            assert section == value, key


def test_there_are_more_than_twenty_cases():
    assert len(CASES) > 20


def test_two_files_of_a_run_make_one_recipe(tmp_path):
    ported = port([write(tmp_path, ADAPTER, "adapter_config.json"), write(tmp_path, SFT, "sft.json")], devices=2)
    assert (ported.recipe.lora.rank, ported.recipe.train.rows_per_step, ported.differences) == (16, 32, [])
    assert {row.file for row in ported.rows if row.given} == {"adapter_config.json", "sft.json"}
    assert not [row for row in ported.rows if row.key.startswith("lora.rank")]


def test_a_folder_gives_its_files(tmp_path):
    write(tmp_path, ADAPTER, "adapter_config.json")
    write(tmp_path, SFT | {"warmup_steps": 0, "warmup_ratio": 0.03}, "training_args.json")
    write(tmp_path, {"max_steps": 1001, "log_history": []}, "trainer_state.json")
    ported = port([tmp_path])
    assert ported.recipe.optimizer.warmup(1001) == 31
    assert of(ported.rows, "warmup_ratio").status == "mapped"


def test_a_key_that_no_rule_knows_is_a_difference_unless_it_is_not_set(tmp_path):
    ported = port([write(tmp_path, AXOLOTL | {"unheard_of": 3, "unheard": None})])
    assert [row.key for row in ported.differences] == ["unheard_of"]


def test_set_decides_against_the_source_and_says_so(tmp_path):
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


def test_devices_that_share_a_row_are_not_counted_twice(tmp_path):
    shared = AXOLOTL | {"tensor_parallel_size": 2, "context_parallel_size": 2}
    assert port([write(tmp_path, shared)], devices=8).recipe.train.rows_per_step == 8
    assert (
        port([write(tmp_path, AXOLOTL | {"dp_shard_size": 4, "dp_replicate_size": 2})]).recipe.train.rows_per_step == 32
    )


def test_rows_that_must_be_changed_first_are_not_named_as_they_are(tmp_path):
    held_out = port([write(tmp_path, AXOLOTL | {"val_set_size": 0.05})])
    sharegpt = port([write(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl", "type": "sharegpt"}]})])
    two = port([write(tmp_path, AXOLOTL | {"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]})])
    plain = port(
        [write(tmp_path, AXOLOTL | {"datasets": [{"path": "json", "data_files": "a.jsonl", "type": "chat_template"}]})]
    )
    for ported in (held_out, sharegpt, two):
        assert of(ported.rows, "datasets[0].path").status == "to do"
    assert (plain.recipe.data.train, of(plain.rows, "datasets[0].path").status) == ("a.jsonl", "mapped")


def test_a_checkpoint_folder_says_which_model_it_is(tmp_path, tiny_checkpoint):
    folder = tiny_checkpoint("tiny-e2b")
    ported = port([write(tmp_path, ADAPTER | {"base_model_name_or_path": str(folder), "target_modules": "all-linear"})])
    assert ported.recipe.checkpoint == str(folder)
    assert [row.key for row in ported.differences] == ["target_modules"]


def test_a_base_without_a_chat_template_is_pointed_out(tmp_path):
    ported = port([write(tmp_path, AXOLOTL | {"base_model": "google/gemma-4-31B"})])
    assert "google/gemma-4-31B-it" in of(ported.rows, "data.template").why


@pytest.mark.parametrize(
    ("entry", "train", "form", "status"),
    [
        (
            {
                "file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
                "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                         "assistant_tag": "assistant"},
            },
            "{folder}/rows.jsonl", "messages", "mapped",
        ),
        ({"file_name": "rows.jsonl", "formatting": "sharegpt"}, "mine.jsonl", "messages", "to do"),
        ({"file_name": "rows.json", "columns": {"prompt": "q", "response": "a"}}, "mine.jsonl", "prompt-response",
         "to do"),
        ({"file_name": "rows.json", "columns": {"prompt": "q", "history": "h"}}, "mine.jsonl", "messages", "to do"),
    ],
)  # fmt: skip
def test_llama_factorys_description_of_a_dataset_decides_its_form(tmp_path, entry, train, form, status):
    write(tmp_path, {"mine": entry}, "dataset_info.json")
    settings = {key: value for key, value in FACTORY.items() if key != "max_samples"} | {
        "dataset": "mine",
        "dataset_dir": str(tmp_path),
    }
    ported = port([write(tmp_path, settings)])
    assert (ported.recipe.data.train, ported.recipe.data.format) == (train.format(folder=tmp_path), form)
    assert of(ported.rows, "dataset").status == status


def test_porting_loads_no_library_of_machine_learning():
    code = "import sys, gemsmith.port.command; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"numpy", "jax", "torch", "transformers", "peft", "trl"}


def test_a_number_of_rows_that_is_text_is_held_out(tmp_path):
    ported = port([write(tmp_path, AXOLOTL | {"val_set_size": "500"})])
    assert of(ported.rows, "val_set_size").why == "move 500 of the rows out of data.train into chats-eval.jsonl"


def test_all_linear_is_understood_in_a_list_of_one(tmp_path):
    ported = port(
        [
            write(
                tmp_path,
                TRL_YAML | {"model_name_or_path": "google/gemma-4-31B-it", "lora_target_modules": ["all-linear"]},
            )
        ]
    )
    assert (ported.recipe.lora.targets, ported.differences) == (LORA_KINDS, [])


NOT_SET = dict.fromkeys(
    (
        "lora_dropout",
        "lr_scheduler",
        "weight_decay",
        "warmup_steps",
        "max_grad_norm",
        "seed",
        "adam_beta2",
        "adam_epsilon",
        "save_total_limit",
    )
)


def test_axolotls_nulls_are_axolotls_defaults(tmp_path):
    recipe = port([write(tmp_path, AXOLOTL | NOT_SET)]).recipe
    absent = port([write(tmp_path, {key: value for key, value in AXOLOTL.items() if key not in NOT_SET})]).recipe
    assert recipe == absent
    assert (recipe.lora.dropout, recipe.optimizer.weight_decay, recipe.seed) == (0.0, 0.0, 42)
    assert (recipe.optimizer.clip_norm, recipe.optimizer.warmup_ratio, recipe.optimizer.schedule) == (
        1.0,
        0.03,
        "cosine",
    )


def test_a_null_bf16_of_axolotl_is_off(tmp_path):
    assert port([write(tmp_path, AXOLOTL | {"bf16": None})]).recipe.train.dtype == "float32"


@pytest.mark.parametrize(
    ("settings", "overrides", "steps"),
    [
        (AXOLOTL | {"lr_scheduler": "constant", "warmup_steps": None}, [], 0),
        ({key: value for key, value in AXOLOTL.items() if key != "warmup_steps"} | {"lr_scheduler": "constant"}, [], 0),
        (AXOLOTL | {"warmup_steps": None, "warmup_ratio": 0.0}, [], 0),
        (AXOLOTL | {"warmup_steps": 1}, [], 2),
        (SFT | {"lr_scheduler_type": "SchedulerType.CONSTANT"}, ["checkpoint=google/gemma-4-31B-it"], 0),
        (SFT | {"warmup_steps": None, "warmup_ratio": 0}, ["checkpoint=google/gemma-4-31B-it"], 0),
        (SFT | {"warmup_steps": None}, ["checkpoint=google/gemma-4-31B-it"], 0),
    ],
)
def test_the_steps_of_warm_up_are_the_sources(tmp_path, settings, overrides, steps):
    assert port([write(tmp_path, settings)], overrides=overrides).recipe.optimizer.warmup(1000) == steps


def test_a_limit_of_no_checkpoints_is_no_limit(tmp_path):
    ported = port([write(tmp_path, SFT | {"save_total_limit": 0})], overrides=["checkpoint=google/gemma-4-31B-it"])
    assert of(ported.rows, "save_total_limit").status == "none"


def test_lists_where_a_name_is_usual_and_what_is_no_name_are_in_the_table(tmp_path):
    held_out = FACTORY | {"dataset": ["one", "two"], "val_size": 0.1, "eval_dataset": []}
    assert port([write(tmp_path, held_out)]).recipe.data.eval == "one-eval.jsonl"
    assert [row.key for row in port([write(tmp_path, AXOLOTL | {"plugins": 3})]).differences] == ["plugins"]
