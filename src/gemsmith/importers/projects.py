"""Whose settings are understood, and the rules of the keys of which keys.yaml says no row.

Hugging Face's TrainingArguments, TRL's SFTConfig and the YAML of its command line, PEFT's adapter_config.json,
LLaMA-Factory's YAML, which takes the Trainer's arguments, and Axolotl's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from gemsmith.importers import datasets, models, rules
from gemsmith.importers.table import (
    Row,
    Rule,
    Setting,
    flag,
    if_set,
    is_on,
    number,
    or_default,
    positive,
    read_defaults,
    read_rules,
)


class Project(NamedTuple):
    """Where a file's keys are from: the rule of each, and what holds where the file leaves it out."""

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]


def length_rule(setting: Setting) -> Row:
    """The row of the length in tokens. TRL cuts what is longer; Gemsmith never does, so there it is an error."""
    sets = {"data.on_too_long": "error"}
    if setting.value is None:
        return setting.derived(sets, "nothing is cut: a document of more than Gemsmith's default length is an error")
    why = "what is longer is cut there and an error here: data.on_too_long"
    return setting.mapped({"data.max_length": setting.read(positive)} | sets, why)


def use_peft_rule(setting: Setting) -> Row:
    """The row of use_peft: without an adapter, every weight is trained."""
    if is_on(setting.value) or setting.config.adapter_elsewhere:
        return setting.ignored("LoRA, as Gemsmith does")
    return rules.full_rule(setting)


def average_rule(setting: Setting) -> Row:
    """The row of the mean over devices: Gemsmith's is over all tokens of a step."""
    if setting.value is None or is_on(setting.value) or rules.count_devices(setting.config) == 1:
        return setting.ignored("the mean over all tokens of a step, as Gemsmith's")
    return setting.differs("a mean of each device's mean; Gemsmith's is over all tokens of a step")


def alpha_rule(setting: Setting) -> Row:
    if setting.value is not None:
        return setting.mapped({"lora.alpha": setting.read(number)})
    alpha = 2.0 * setting.config.read("lora_rank", positive)
    return setting.derived({"lora.alpha": alpha}, "LLaMA-Factory's default: 2 x lora_rank")


def packing_rule(setting: Setting) -> Row:
    """The row of packing, in which documents see each other unless neat_packing is on."""
    on = setting.value is not None and setting.read(flag)
    if setting.config.is_on("neat_packing"):
        return setting.mapped({"data.packing": True}, "documents kept apart by neat_packing")
    if on:
        why = "documents in a row see each other; Gemsmith keeps them apart"
        return setting.differs(why, {"data.packing": True})
    return setting.mapped({"data.packing": False})


def no_remat_rule(setting: Setting) -> Row:
    off = setting.value is not None and setting.read(flag)
    return setting.mapped({"train.remat": "none" if off else "layer"}, "memory for time; the same numbers")


def adapter_rule(setting: Setting) -> Row:
    """The row of the kind of adapter: none means that every weight is trained."""
    value = setting.value
    if value in ("lora", "qlora") or (value is None and setting.config.adapter_elsewhere):
        return setting.ignored("LoRA, as Gemsmith does")
    if value is None:
        return rules.full_rule(setting)
    return setting.differs("another kind of adapter; Gemsmith trains LoRA's, here its default ones")


@if_set
def lora_targets_rule(setting: Setting) -> Row:
    """The row of lora_target_modules, which lora_target_linear overrules."""
    if setting.config.is_on("lora_target_linear"):
        return setting.ignored("lora_target_linear decides: all linear layers")
    return models.targets_rule(setting)


def warmup_rule(setting: Setting) -> Row:
    """The row of the warm-up; where the file has none, Axolotl takes 3 % of the steps, at most 100."""
    config = setting.config
    if setting.value is not None or config.given.get("warmup_ratio") is not None:
        return rules.warmup_rule("lr_scheduler", rounding="down")(setting)
    if rules.has_no_warmup(config.value("lr_scheduler")):
        return setting.derived({"optimizer.warmup_steps": 0}, "a constant schedule has no warm-up")
    steps, default = config.steps or rules.max_steps(config), "Axolotl's default: 3 % of the steps, at most 100"
    if steps is None:
        return rules.ratio_row(setting, 0.03, "derived", f"{default}; {rules.STEPS_HINT}")
    return setting.derived({"optimizer.warmup_steps": rules.not_one(min(int(0.03 * steps), 100))}, default)


def plugins_rule(setting: Setting) -> Row:
    """The row of the plugins: kernels change nothing that is learned, others may."""
    kernels = (".cut_cross_entropy.", ".liger.", ".kernels.")
    plugins = setting.value if isinstance(setting.value, list) else [setting.value] if setting.value else []
    others = [str(name) for name in plugins if not any(kernel in str(name) for kernel in kernels)]
    if others:
        return setting.differs(f"{', '.join(others)} may train otherwise")
    return setting.ignored("faster kernels; the same training")


def half_rule(setting: Setting) -> Row:
    """The row of bf16, whose null is off where its absence is `auto`."""
    value = False if setting.value is None else setting.value
    return replace(rules.half_rule(replace(setting, value=value)), value=setting.value)


_BATCH = rules.batch_rule("per_device_train_batch_size")
_AXOLOTL_BATCH = rules.batch_rule("micro_batch_size", total="batch_size")
# What TrainingArguments, SFTConfig, and LLaMA-Factory have in common.
_TRAINING: Mapping[str, Rule] = {
    **rules.SHARED_RULES,
    **read_rules("training"),
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_train_epochs": or_default(rules.epochs_rule),
    "warmup_steps": or_default(rules.warmup_rule("lr_scheduler_type")),
    "warmup_ratio": rules.warmup_rule("lr_scheduler_type"),
    "max_grad_norm": rules.clip_rule,
    "bf16": rules.half_rule,
    "save_total_limit": rules.keep_rule,
    "average_tokens_across_devices": average_rule,
}
_TRL: Mapping[str, Rule] = {
    **_TRAINING,
    **read_rules("trl"),
    "max_length": length_rule,
    "max_seq_length": length_rule,
    "use_peft": use_peft_rule,
    "model_name_or_path": models.base_rule,
    "lora_target_modules": models.targets_rule,
    "dataset_name": datasets.hub_rule,
    "datasets[].path": datasets.path_rule,
    **{f"datasets[].{key}": datasets.DATASET_RULES[key] for key in ("split", "name", "data_files")},
}
_PEFT = read_rules("peft") | {"base_model_name_or_path": models.base_rule, "target_modules": models.targets_rule}
_LLAMA_FACTORY: Mapping[str, Rule] = {
    **_TRAINING,
    **read_rules("llama_factory"),
    "model_name_or_path": models.base_rule,
    "adapter_name_or_path": rules.start_adapter_rule,
    "lora_alpha": alpha_rule,
    "lora_target": models.comma_targets,
    "dataset": datasets.factory_dataset_rule,
    "eval_dataset": datasets.factory_eval_rule,
    "cutoff_len": length_rule,
    "val_size": datasets.held_out_rule("dataset"),
    "packing": packing_rule,
    "freeze_vision_tower": models.encoders_rule,
    "freeze_multi_modal_projector": models.encoders_rule,
    "disable_gradient_checkpointing": no_remat_rule,
}
_AXOLOTL: Mapping[str, Rule] = {
    **rules.SHARED_RULES,
    **read_rules("axolotl"),
    "base_model": models.base_rule,
    "adapter": adapter_rule,
    "lora_model_dir": rules.start_adapter_rule,
    "lora_target_modules": lora_targets_rule,
    "lora_target_linear": models.linear_rule,
    "quantize_moe_experts": models.experts_rule,
    "datasets[].path": datasets.path_rule,
    **{f"datasets[].{key}": rule for key, rule in datasets.DATASET_RULES.items()},
    "test_datasets[].path": datasets.test_path_rule,
    "val_set_size": datasets.held_out_rule("datasets[0].path"),
    "micro_batch_size": _AXOLOTL_BATCH,
    "gradient_accumulation_steps": _AXOLOTL_BATCH,
    "batch_size": _AXOLOTL_BATCH,
    "num_epochs": rules.epochs_rule,
    "warmup_steps": warmup_rule,
    "warmup_ratio": rules.warmup_rule("lr_scheduler", rounding="down"),
    "max_grad_norm": or_default(rules.clip_rule),
    "bf16": half_rule,
    "save_total_limit": or_default(rules.keep_rule),
    "plugins": plugins_rule,
    "processor_type": models.images_rule,
    "freeze_mm_modules": models.encoders_rule,
}

TRAINER = Project("TrainingArguments", _TRL, read_defaults("trainer"))
TRL = Project("TRL", _TRL, read_defaults("trl"))
PEFT = Project("PEFT", _PEFT, read_defaults("peft"))
LLAMA_FACTORY = Project("LLaMA-Factory", _LLAMA_FACTORY, read_defaults("llama_factory"))
AXOLOTL = Project("Axolotl", _AXOLOTL, read_defaults("axolotl"))
