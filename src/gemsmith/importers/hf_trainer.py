"""Hugging Face's TrainingArguments, TRL's SFTConfig, the YAML of TRL's command line, and PEFT's adapter_config.json."""

from collections.abc import Mapping

from gemsmith.importers import rules
from gemsmith.importers.datasets import DATASET_RULES, hub_rule, path_rule
from gemsmith.importers.models import base_rule, targets_rule
from gemsmith.importers.table import Row, Rule, Setting, if_set, is_on, or_default, positive, read_defaults, read_rules

PROJECT, SFT_PROJECT, PEFT_PROJECT = "TrainingArguments", "TRL", "PEFT"
DEFAULTS, SFT_DEFAULTS, PEFT_DEFAULTS = map(read_defaults, ("trainer", "trl", "peft"))
# Of TRL's command line, where the model and the adapter are in the same file.
MODEL_DEFAULTS, LORA_DEFAULTS = map(read_defaults, ("trl_model", "trl_lora"))


def length_rule(setting: Setting) -> Row:
    """The row of the length in tokens. TRL cuts what is longer; Gemsmith never does, so there it is an error."""
    sets = {"data.on_too_long": "error"}
    if setting.value is None:
        return setting.derived(sets, "nothing is cut: a document of more than Gemsmith's default length is an error")
    why = "what is longer is cut there and an error here: data.on_too_long"
    return setting.mapped({"data.max_length": setting.read(positive)} | sets, why)


def packing_strategy_rule(setting: Setting) -> Row:
    """The row of how documents are packed; Gemsmith never cuts one."""
    if setting.value in (None, "bfd") or not setting.config.is_on("packing"):
        return setting.ignored("best fit, documents kept apart, as Gemsmith's" if setting.value else "not set")
    return setting.differs("cuts documents over rows; Gemsmith keeps each whole and apart from the others")


def assistant_rule(setting: Setting) -> Row:
    """The row of assistant_only_loss: what Gemsmith always does, and TRL for messages only when told."""
    if is_on(setting.value):
        return setting.ignored("answers only, as Gemsmith does")
    if setting.config.is_on("completion_only_loss"):
        return setting.ignored("completion_only_loss decides: answers only, as Gemsmith does")
    if setting.config.value("completion_only_loss") is False:
        return setting.ignored("completion_only_loss decides")
    return setting.differs(
        "TRL trains every token of messages, Gemsmith the answers (rows of prompt and completion: the same; say "
        "completion_only_loss: true)"
    )


@if_set
def dtype_rule(setting: Setting) -> Row:
    name = str(setting.value).removeprefix("torch.")
    if rules.is_quantized(setting.config) or (name == "float32" and setting.config.is_on("bf16")):
        return setting.ignored("another key decides train.dtype")
    if name in ("bfloat16", "auto"):
        return setting.mapped({"train.dtype": "bfloat16"}, "Gemma 4's own" if name == "auto" else "")
    if name == "float32":
        return setting.mapped({"train.dtype": "float32"})
    return setting.differs("Gemsmith has bfloat16 and float32", {"train.dtype": "bfloat16"})


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


_BATCH = rules.batch_rule("per_device_train_batch_size")

# What TrainingArguments, SFTConfig, and LLaMA-Factory, which takes the former's, have in common.
TRAINING_RULES: Mapping[str, Rule] = {
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

RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    **read_rules("trl"),
    "max_length": length_rule,
    "max_seq_length": length_rule,
    "packing_strategy": packing_strategy_rule,
    "assistant_only_loss": assistant_rule,
    "use_peft": use_peft_rule,
    "model_name_or_path": base_rule,
    "dtype": dtype_rule,
    "torch_dtype": dtype_rule,
    "lora_target_modules": targets_rule,
    "load_in_4bit": rules.four_bits_rule("bnb_4bit_quant_type", "use_bnb_nested_quant"),
    "load_in_8bit": rules.eight_bits_rule,
    "dataset_name": hub_rule,
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": DATASET_RULES[key] for key in ("split", "name", "data_files")},
}
PEFT_RULES: Mapping[str, Rule] = read_rules("peft") | {
    "base_model_name_or_path": base_rule,
    "target_modules": targets_rule,
}
