"""PEFT's adapter_config.json, as LoraConfig writes it."""

from collections.abc import Mapping
from typing import Any

from gemsmith.importers.models import base_rule, targets_rule
from gemsmith.importers.table import Rule, flag, idle, number, plain, positive, refuse, to

PROJECT = "PEFT"
DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}

_ABOUT = idle("about the file or the loader, not the training")
_NOT_LORA = "another adapter than W + scale * B A"
_SOME_LAYERS = "not every layer gets the same adapter, where Gemsmith's do"

RULES: Mapping[str, Rule] = {
    "base_model_name_or_path": base_rule,
    "r": to("lora.rank", positive),
    "lora_alpha": to("lora.alpha", number),
    "lora_dropout": to("lora.dropout", number),
    "use_rslora": to("lora.rslora", flag),
    "target_modules": targets_rule,
    "peft_type": refuse("LORA", what="no LoRA adapter"),
    "task_type": refuse("CAUSAL_LM", what="no language modelling"),
    "exclude_modules": plain(otherwise=_SOME_LAYERS),
    "layers_to_transform": plain(otherwise=_SOME_LAYERS),
    "layers_pattern": plain(otherwise=_SOME_LAYERS),
    "rank_pattern": plain(otherwise=_SOME_LAYERS),
    "rank_pattern.*": plain(otherwise=_SOME_LAYERS),
    "alpha_pattern": plain(otherwise=_SOME_LAYERS),
    "alpha_pattern.*": plain(otherwise=_SOME_LAYERS),
    "use_dora": plain(False, otherwise=f"DoRA: {_NOT_LORA}"),
    "use_qalora": plain(False, otherwise=f"QALoRA: {_NOT_LORA}"),
    "lora_bias": plain(False, otherwise="biases of the adapter are trained too; Gemma 4 and Gemsmith have none"),
    "bias": plain("none", otherwise="biases are trained too; Gemsmith trains adapters only"),
    "fan_in_fan_out": plain(False, otherwise="for Conv1D layers; Gemma 4 has none"),
    "modules_to_save": plain(otherwise="these modules are trained whole; Gemsmith trains adapters only"),
    "trainable_token_indices": plain(otherwise="these tokens' embeddings are trained; Gemsmith trains adapters only"),
    "trainable_token_indices.*": plain(otherwise="these tokens' embeddings are trained; Gemsmith trains adapters only"),
    "target_parameters": plain(otherwise="adapters on bare parameters such as the experts'; Gemsmith has none there"),
    "layer_replication": plain(otherwise="layers are repeated"),
    "ensure_weight_tying": plain(False, otherwise="adapters on tied embeddings"),
    "init_lora_weights": plain(True, otherwise="the adapter starts otherwise; Gemsmith's as PEFT's default: A uniform, "
                                               "B = 0"),
    "loftq_config": plain(otherwise="the adapter starts from what quantization loses"),
    "loftq_config.*": plain(otherwise="the adapter starts from what quantization loses"),
    "revision": plain(
        "main", otherwise="a revision of the base; Gemsmith takes the newest: give a folder with that one"
    ),
    **{
        name: plain(False, otherwise=_NOT_LORA)
        for name in (
            "alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "kasa_config",
            "lora_ga_config", "monteclora_config",
            "use_bdlora", "velora_config",
        )
    },
    **dict.fromkeys(
        (
            "auto_mapping", "auto_mapping.*", "inference_mode", "megatron_config", "megatron_core",
            "peft_version", "qalora_group_size",
            "runtime_config", "runtime_config.*",
        ),
        _ABOUT,
    ),
}  # fmt: skip
