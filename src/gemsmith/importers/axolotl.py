"""Axolotl's YAML."""

from collections.abc import Mapping
from dataclasses import replace

from gemsmith.importers import rules
from gemsmith.importers.datasets import DATASET_RULES, held_out_rule, path_rule, test_path_rule
from gemsmith.importers.models import base_rule, encoders_rule, experts_rule, images_rule, linear_rule, targets_rule
from gemsmith.importers.table import Row, Rule, Setting, if_set, or_default, read_defaults, read_rules

PROJECT = "Axolotl"
DEFAULTS = read_defaults("axolotl")


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
    return targets_rule(setting)


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


def template_rule(setting: Setting) -> Row:
    is_given_in_full = setting.value is None and setting.config.value("chat_template_jinja")
    name = "jinja" if is_given_in_full else setting.value
    if name is None or str(name).startswith(("gemma4", "tokenizer_default")):
        return setting.ignored("Gemma 4's; Gemsmith takes the checkpoint's own")
    if name == "jinja":
        return setting.ignored("chat_template_jinja has it")
    return setting.differs("another model's template; Gemsmith takes the checkpoint's own")


def half_rule(setting: Setting) -> Row:
    """The row of bf16, whose null is off where its absence is `auto`."""
    value = False if setting.value is None else setting.value
    return replace(rules.half_rule(replace(setting, value=value)), value=setting.value)


_BATCH = rules.batch_rule("micro_batch_size", total="batch_size")

RULES: Mapping[str, Rule] = {
    **rules.SHARED_RULES,
    **read_rules("axolotl"),
    "base_model": base_rule,
    "adapter": adapter_rule,
    "lora_model_dir": rules.start_adapter_rule,
    "lora_target_modules": lora_targets_rule,
    "lora_target_linear": linear_rule,
    "load_in_4bit": rules.four_bits_rule(
        "bnb_config_kwargs.bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_use_double_quant"
    ),
    "load_in_8bit": rules.eight_bits_rule,
    "quantize_moe_experts": experts_rule,
    "chat_template": template_rule,
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": rule for key, rule in DATASET_RULES.items()},
    "test_datasets[].path": test_path_rule,
    "val_set_size": held_out_rule("datasets[0].path"),
    "micro_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "batch_size": _BATCH,
    "num_epochs": rules.epochs_rule,
    "warmup_steps": warmup_rule,
    "warmup_ratio": rules.warmup_rule("lr_scheduler", rounding="down"),
    "max_grad_norm": or_default(rules.clip_rule),
    "bf16": half_rule,
    "float16": rules.fp16_rule,
    "save_total_limit": or_default(rules.keep_rule),
    "plugins": plugins_rule,
    "processor_type": images_rule,
    "freeze_mm_modules": encoders_rule,
}
