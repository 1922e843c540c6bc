"""LLaMA-Factory's YAML: the Trainer's arguments and its own."""

from collections.abc import Mapping
from typing import Any

from gemsmith.importers import rules
from gemsmith.importers.datasets import factory_dataset_rule, factory_eval_rule, held_out_rule
from gemsmith.importers.hf_trainer import DEFAULTS as TRAINER_DEFAULTS
from gemsmith.importers.hf_trainer import TRAINING_RULES, length_rule
from gemsmith.importers.models import base_rule, comma_targets, encoders_rule
from gemsmith.importers.table import (
    Row,
    Rule,
    Setting,
    flag,
    ignored,
    is_on,
    maps_to,
    number,
    positive,
    refuse,
    supports,
    to_do,
)

PROJECT = "LLaMA-Factory"
DEFAULTS: dict[str, Any] = TRAINER_DEFAULTS | {
    "finetuning_type": "lora", "lora_rank": 8, "lora_alpha": None, "lora_dropout": 0.0, "lora_target": "all",
    "use_rslora": False, "cutoff_len": 2048, "packing": False, "bf16": None, "double_quantization": True,
    "disable_gradient_checkpointing": False, "gradient_checkpointing": None, "dataset_dir": "data",
}  # fmt: skip


def method_rule(setting: Setting) -> Row:
    """The row of finetuning_type."""
    if setting.value in (None, "lora"):
        return setting.ignored("LoRA, as Gemsmith does")
    named = {"full": "every weight is trained", "freeze": "some layers are trained whole"}
    what = named.get(str(setting.value), "another kind of adapter")
    return setting.differs(f"{what}; Gemsmith trains LoRA adapters")


def alpha_rule(setting: Setting) -> Row:
    """The row of lora_alpha, by default twice the rank."""
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


def neat_rule(setting: Setting) -> Row:
    """The row of neat_packing, which switches packing on."""
    if not is_on(setting.value):
        return setting.ignored("packing decides")
    return setting.mapped({"data.packing": True}, "documents kept apart")


def no_remat_rule(setting: Setting) -> Row:
    """The row of disable_gradient_checkpointing."""
    off = setting.value is not None and setting.read(flag)
    return setting.mapped({"train.remat": "none" if off else "layer"}, "memory for time; the same numbers")


def template_rule(setting: Setting) -> Row:
    """The row of the template's name."""
    if setting.value is None or str(setting.value).lower().startswith("gemma4"):
        return setting.ignored("Gemma 4's; Gemsmith takes the checkpoint's own")
    return setting.differs(rules.OTHER_TEMPLATE)


_RUNS = ignored(rules.RUNS)
_BITS = ignored("quantization_bit says what becomes of it")
_OTHER_ADAPTER = "another adapter than W + scale * B A, or another start"

RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    "model_name_or_path": base_rule,
    "model_revision": supports("main", otherwise=rules.OTHER_REVISION),
    "adapter_name_or_path": rules.start_adapter_rule,
    "create_new_adapter": supports(
        False, otherwise="the named adapter is merged and another one begun; merge it first"
    ),
    "stage": refuse("sft", what="not the stage sft"),
    "finetuning_type": method_rule,
    "lora_rank": maps_to("lora.rank", positive),
    "lora_alpha": alpha_rule,
    "lora_dropout": maps_to("lora.dropout", number),
    "lora_target": comma_targets,
    "use_rslora": maps_to("lora.rslora", flag),
    "use_dora": supports(False, otherwise=f"DoRA: {_OTHER_ADAPTER}"),
    "additional_target": supports(otherwise=rules.WHOLE),
    "pissa_init": supports(False, otherwise=_OTHER_ADAPTER),
    "loraplus_lr_ratio": supports(otherwise="learning rates that differ between A and B; Gemsmith has one"),
    "loraplus_lr_embedding": ignored("of embeddings, which have no adapter here"),
    "quantization_bit": bits_rule,
    "quantization_method": _BITS,
    "quantization_type": _BITS,
    "double_quantization": _BITS,
    "pure_bf16": rules.other_half_rule("adapters in bfloat16 too; Gemsmith's are float32"),
    "dataset": factory_dataset_rule,
    "eval_dataset": factory_eval_rule,
    "dataset_dir": ignored(
        "where dataset_info.json describes the datasets; the row of dataset says what became of them"
    ),
    "media_dir": ignored("where images are; rows name them"),
    "template": template_rule,
    "default_system": supports(otherwise="added to every row; put it into the rows"),
    "cutoff_len": length_rule,
    "max_samples": to_do("keep the first rows only, that many of each dataset"),
    "val_size": held_out_rule("dataset"),
    "packing": packing_rule,
    "neat_packing": neat_rule,
    "train_on_prompt": supports(False, otherwise=rules.ANSWERS_ONLY),
    "mask_history": supports(False, otherwise="only the last answer is trained; Gemsmith trains every answer"),
    "mix_strategy": supports("concat", otherwise="mixes the datasets; mix them in the rows"),
    "interleave_probs": supports(otherwise="mixes the datasets; mix them in the rows"),
    "disable_shuffling": supports(False, otherwise="rows in their order; Gemsmith shuffles every epoch"),
    "ignore_pad_token_for_loss": supports(True, otherwise="padding is trained"),
    "early_stopping_steps": supports(otherwise="ends early; Gemsmith runs all steps"),
    "tool_format": supports(otherwise="rows with tools; Gemsmith's have system, user and assistant"),
    "freeze_vision_tower": encoders_rule,
    "freeze_multi_modal_projector": encoders_rule,
    "freeze_language_model": supports(False, otherwise="the text model is not trained; Gemsmith trains nothing else"),
    "resize_vocab": supports(False, otherwise=rules.VOCABULARY),
    "add_tokens": supports(otherwise=rules.VOCABULARY),
    "add_special_tokens": supports(otherwise=rules.VOCABULARY),
    "rope_scaling": supports(otherwise="other positions than Gemma 4's"),
    "shift_attn": supports(False, otherwise="another attention than Gemma 4's"),
    "mixture_of_depths": supports(otherwise="another model than Gemma 4"),
    "train_from_scratch": supports(False, otherwise="starts from random weights"),
    "moe_aux_loss_coef": supports(0, otherwise=rules.OTHER_LOSS),
    **dict.fromkeys(
        """
        fp8 use_adam_mini use_apollo use_asft_loss use_badam use_dft_loss use_eaft_loss use_galore use_hyper_parallel
        use_llama_pro use_mca use_muon
        """.split(),
        supports(False, otherwise="another way to train than AdamW on plain LoRA"),
    ),
    **dict.fromkeys(
        """
        apollo_* badam_* dpo_label_smoothing freeze_trainable_layers freeze_trainable_modules galore_* kto_*
        module_dropout oft_* pissa_convert pissa_iter ppo_* pref_* ref_model* reward_model* simpo_gamma
        """.split(),
        ignored("of another method, which another key switches on"),
    ),
    "disable_gradient_checkpointing": no_remat_rule,
    "gradient_checkpointing": ignored("on in LLaMA-Factory unless disable_gradient_checkpointing"),
    **dict.fromkeys(
        """
        audio_sampling_rate cache_dir crop_to_patches enable_liger_kernel export_* flash_attn fp8_backend
        fp8_enable_fsdp_float8_all_gather hf_hub_token image_* infer_* low_cpu_mem_usage ms_hub_token offload_folder
        om_hub_token placement_strategy print_param_status quantization_device_map ray_init_kwargs.* ray_run_name
        ray_storage_filesystem ray_storage_path resources_per_worker.* split_special_tokens trust_remote_code
        upcast_layernorm upcast_lmhead_output use_fast_tokenizer use_kv_cache use_reentrant_gc use_unsloth
        use_unsloth_gc use_v1_kernels video_*
        """.split(),
        _RUNS,
    ),
    "ray_num_workers": rules.count_rule,
    **dict.fromkeys(
        """
        compute_accuracy eval_num_beams eval_on_each_dataset include_effective_tokens_per_second plot_loss swanlab_*
        trackio_space_id use_swanlab wandb_project
        """.split(),
        ignored("logs, reports and scores; Gemsmith writes its own"),
    ),
    **dict.fromkeys(
        """
        buffer_size data_shared_file_system do_sample max_new_tokens overwrite_cache preprocessing_batch_size
        preprocessing_num_workers streaming temperature tokenized_path top_k top_p
        """.split(),
        ignored("how rows are prepared, or text written; Gemsmith's stages do that"),
    ),
}
