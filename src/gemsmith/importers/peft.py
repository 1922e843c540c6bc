"""PEFT's adapter_config.json, as LoraConfig writes it."""

from collections.abc import Mapping
from typing import Any

from gemsmith.importers.models import base_rule, targets_rule
from gemsmith.importers.rules import BARE_PARAMETERS, OTHER_REVISION
from gemsmith.importers.table import Rule, flag, ignored, maps_to, number, positive, refuse, supports

PROJECT = "PEFT"
DEFAULTS: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}

_NOT_LORA = "another adapter than W + scale * B A"
_SOME_LAYERS = supports(otherwise="not every layer gets the same adapter, where Gemsmith's do")

RULES: Mapping[str, Rule] = {
    "base_model_name_or_path": base_rule,
    "r": maps_to("lora.rank", positive),
    "lora_alpha": maps_to("lora.alpha", number),
    "lora_dropout": maps_to("lora.dropout", number),
    "use_rslora": maps_to("lora.rslora", flag),
    "target_modules": targets_rule,
    "peft_type": refuse("LORA", what="no LoRA adapter"),
    "task_type": refuse("CAUSAL_LM", what="no language modelling"),
    "exclude_modules": _SOME_LAYERS,
    "layers_to_transform": _SOME_LAYERS,
    "layers_pattern": _SOME_LAYERS,
    "rank_pattern.*": _SOME_LAYERS,
    "alpha_pattern.*": _SOME_LAYERS,
    "use_dora": supports(False, otherwise=f"DoRA: {_NOT_LORA}"),
    "use_qalora": supports(False, otherwise=f"QALoRA: {_NOT_LORA}"),
    "lora_bias": supports(False, otherwise="biases of the adapter are trained too; Gemma 4 and Gemsmith have none"),
    "bias": supports("none", otherwise="biases are trained too; Gemsmith trains adapters only"),
    "fan_in_fan_out": supports(False, otherwise="for Conv1D layers; Gemma 4 has none"),
    "modules_to_save": supports(otherwise="these modules are trained whole; Gemsmith trains adapters only"),
    "trainable_token_indices.*": supports(
        otherwise="these tokens' embeddings are trained; Gemsmith trains adapters only"
    ),
    "target_parameters": supports(otherwise=BARE_PARAMETERS),
    "layer_replication": supports(otherwise="layers are repeated"),
    "ensure_weight_tying": supports(False, otherwise="adapters on tied embeddings"),
    "init_lora_weights": supports(
        True, otherwise="the adapter starts otherwise; Gemsmith's as PEFT's default: A uniform, B = 0"
    ),
    "loftq_config.*": supports(otherwise="the adapter starts from what quantization loses"),
    "revision": supports("main", otherwise=OTHER_REVISION),
    **dict.fromkeys(
        """
        alora_invocation_tokens arrow_config corda_config eva_config kasa_config lora_ga_config monteclora_config
        use_bdlora velora_config
        """.split(),
        supports(False, otherwise=_NOT_LORA),
    ),
    **dict.fromkeys(
        """
        auto_mapping.* inference_mode megatron_config megatron_core peft_version qalora_group_size runtime_config.*
        """.split(),
        ignored("about the file or the loader, not the training"),
    ),
}
