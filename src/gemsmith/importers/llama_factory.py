"""LLaMA-Factory's YAML: the Trainer's arguments and its own."""

from collections.abc import Mapping

from gemsmith.importers import rules
from gemsmith.importers.datasets import factory_dataset_rule, factory_eval_rule, held_out_rule
from gemsmith.importers.hf_trainer import TRAINING_RULES, length_rule
from gemsmith.importers.models import base_rule, comma_targets, encoders_rule
from gemsmith.importers.table import Row, Rule, Setting, flag, number, positive, read_defaults, read_rules

PROJECT = "LLaMA-Factory"
DEFAULTS = read_defaults("llama_factory")


def alpha_rule(setting: Setting) -> Row:
    if setting.value is not None:
        return setting.mapped({"lora.alpha": setting.read(number)})
    alpha = 2.0 * setting.config.read("lora_rank", positive)
    return setting.derived({"lora.alpha": alpha}, "LLaMA-Factory's default: 2 x lora_rank")


def bits_rule(setting: Setting) -> Row:
    """The row of quantization_bit: bitsandbytes' 4 bits as nf4, or 8."""
    if str(setting.config.value("quantization_method") or "bnb").lower() not in ("bnb", "bitsandbytes"):
        return setting.differs("quantized by another method than bitsandbytes'")
    if str(setting.value) == "4":
        return rules.four_bits_rule("quantization_type", "double_quantization")(setting)
    if setting.value is None or str(setting.value) == "8":
        return rules.eight_bits_rule(setting)
    return setting.differs("Gemsmith's base has 4 or 8 bits, bfloat16 or float32")


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


RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    **read_rules("llama_factory"),
    "model_name_or_path": base_rule,
    "adapter_name_or_path": rules.start_adapter_rule,
    "lora_alpha": alpha_rule,
    "lora_target": comma_targets,
    "quantization_bit": bits_rule,
    "pure_bf16": rules.other_half_rule("adapters in bfloat16 too; Gemsmith's are float32"),
    "dataset": factory_dataset_rule,
    "eval_dataset": factory_eval_rule,
    "cutoff_len": length_rule,
    "val_size": held_out_rule("dataset"),
    "packing": packing_rule,
    "freeze_vision_tower": encoders_rule,
    "freeze_multi_modal_projector": encoders_rule,
    "disable_gradient_checkpointing": no_remat_rule,
}
