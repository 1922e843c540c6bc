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
    SourceConfig,
    flag,
    idle,
    is_on,
    number,
    plain,
    positive,
    read_as,
    refuse,
    row,
    to,
    to_do,
)

PROJECT = "LLaMA-Factory"
DEFAULTS: dict[str, Any] = TRAINER_DEFAULTS | {
    "finetuning_type": "lora", "lora_rank": 8, "lora_alpha": None, "lora_dropout": 0.0, "lora_target": "all",
    "use_rslora": False,
    "cutoff_len": 2048, "packing": False, "bf16": None, "double_quantization": True,
    "disable_gradient_checkpointing": False,
    "gradient_checkpointing": None, "dataset_dir": "data",
}  # fmt: skip


def method_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of finetuning_type."""
    if value in (None, "lora"):
        return row(reading, key, value, "none", "LoRA, as Gemsmith does")
    what = {"full": "every weight is trained", "freeze": "some layers are trained whole"}.get(
        str(value), "another kind of adapter"
    )
    return row(reading, key, value, "differs", f"{what}; Gemsmith trains LoRA adapters")


def alpha_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of lora_alpha, by default twice the rank."""
    if value is None:
        alpha = 2.0 * read_as(positive, "lora_rank", reading.value("lora_rank"), reading)
        return row(reading, key, value, "derived", "LLaMA-Factory's default: 2 x lora_rank", lora__alpha=alpha)
    return row(reading, key, value, "mapped", "", lora__alpha=read_as(number, key, value, reading))


def bits_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of quantization_bit: bitsandbytes' 4 bits as nf4, or 8."""
    if str(reading.value("quantization_method") or "bnb").lower() not in ("bnb", "bitsandbytes"):
        return row(reading, key, value, "differs", "quantized by another method than bitsandbytes'")
    if str(value) == "4":
        return rules.four_bits_rule("quantization_type", "double_quantization")(key, value, reading)
    if value is None or str(value) == "8":
        return rules.eight_bits_rule(key, value, reading)
    return row(reading, key, value, "differs", "Gemsmith's base has 4 or 8 bits, bfloat16 or float32")


def packing_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of packing, in which documents see each other unless neat_packing is on."""
    on = value is not None and read_as(flag, key, value, reading)
    if is_on(reading.value("neat_packing")):
        return row(reading, key, value, "mapped", "documents kept apart by neat_packing", data__packing=True)
    if on:
        return row(
            reading,
            key,
            value,
            "differs",
            "documents in a row see each other; Gemsmith keeps them apart",
            data__packing=True,
        )
    return row(reading, key, value, "mapped", "", data__packing=False)


def neat_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of neat_packing, which switches packing on."""
    if not is_on(value):
        return row(reading, key, value, "none", "packing decides")
    return row(reading, key, value, "mapped", "documents kept apart", data__packing=True)


def no_remat_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of disable_gradient_checkpointing."""
    off = value is not None and read_as(flag, key, value, reading)
    return row(
        reading, key, value, "mapped", "memory for time; the same numbers", train__remat="none" if off else "layer"
    )


def template_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the template's name."""
    if value is None or str(value).lower().startswith("gemma4"):
        return row(reading, key, value, "none", "Gemma 4's; Gemsmith takes the checkpoint's own")
    return row(reading, key, value, "differs", "another model's template; Gemsmith takes the checkpoint's own")


def pure_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of pure_bf16."""
    if not is_on(value):
        return row(reading, key, value, "none", "off")
    dtype = {} if rules.quantized(reading) else {"train.dtype": "bfloat16"}
    return row(reading, key, value, "differs", "adapters in bfloat16 too; Gemsmith's are float32", **dtype)


_RUNS = idle("how it runs on GPUs, not what is learned")
_SWITCH_WHY = "another way to train than AdamW on plain LoRA"
_ADAPTER_WHY = "another adapter than W + scale * B A, or another start"

RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    "model_name_or_path": base_rule,
    "model_revision": plain("main", otherwise="a revision of the base; Gemsmith takes the newest: give a folder with "
                                              "that one"),
    "adapter_name_or_path": rules.start_adapter_rule,
    "create_new_adapter": plain(False, otherwise="the named adapter is merged and another one begun; merge it first"),
    "stage": refuse("sft", what="not the stage sft"),
    "finetuning_type": method_rule,
    "lora_rank": to("lora.rank", positive),
    "lora_alpha": alpha_rule,
    "lora_dropout": to("lora.dropout", number),
    "lora_target": comma_targets,
    "use_rslora": to("lora.rslora", flag),
    "use_dora": plain(False, otherwise=f"DoRA: {_ADAPTER_WHY}"),
    "additional_target": plain(otherwise="trained whole; Gemsmith trains adapters only"),
    "pissa_init": plain(False, otherwise=_ADAPTER_WHY),
    "loraplus_lr_ratio": plain(otherwise="learning rates that differ between A and B; Gemsmith has one"),
    "loraplus_lr_embedding": idle("of embeddings, which have no adapter here"),
    "quantization_bit": bits_rule,
    "quantization_method": idle("quantization_bit says what becomes of it"),
    "quantization_type": idle("quantization_bit says what becomes of it"),
    "double_quantization": idle("quantization_bit says what becomes of it"),
    "pure_bf16": pure_rule,
    "upcast_layernorm": _RUNS,
    "upcast_lmhead_output": _RUNS,
    "dataset": factory_dataset_rule,
    "eval_dataset": factory_eval_rule,
    "dataset_dir": idle("where dataset_info.json describes the datasets; the row of dataset says what became of them"),
    "media_dir": idle("where images are; rows name them"),
    "template": template_rule,
    "default_system": plain(otherwise="added to every row; put it into the rows"),
    "cutoff_len": length_rule,
    "max_samples": to_do("keep the first rows only, that many of each dataset"),
    "val_size": held_out_rule("dataset"),
    "packing": packing_rule,
    "neat_packing": neat_rule,
    "train_on_prompt": plain(False, otherwise="tokens of the prompt are trained too; Gemsmith trains answers only"),
    "mask_history": plain(False, otherwise="only the last answer is trained; Gemsmith trains every answer"),
    "mix_strategy": plain("concat", otherwise="mixes the datasets; mix them in the rows"),
    "interleave_probs": plain(otherwise="mixes the datasets; mix them in the rows"),
    "disable_shuffling": plain(False, otherwise="rows in their order; Gemsmith shuffles every epoch"),
    "ignore_pad_token_for_loss": plain(True, otherwise="padding is trained"),
    "early_stopping_steps": plain(otherwise="ends early; Gemsmith runs all steps"),
    "tool_format": plain(otherwise="rows with tools; Gemsmith's have system, user and assistant"),
    "freeze_vision_tower": encoders_rule,
    "freeze_multi_modal_projector": encoders_rule,
    "freeze_language_model": plain(False, otherwise="the text model is not trained; Gemsmith trains nothing else"),
    "resize_vocab": plain(False, otherwise="the vocabulary is changed; Gemsmith trains with Gemma's own"),
    "add_tokens": plain(otherwise="the vocabulary is changed; Gemsmith trains with Gemma's own"),
    "add_special_tokens": plain(otherwise="the vocabulary is changed; Gemsmith trains with Gemma's own"),
    "rope_scaling": plain(otherwise="other positions than Gemma 4's"),
    "shift_attn": plain(False, otherwise="another attention than Gemma 4's"),
    "mixture_of_depths": plain(otherwise="another model than Gemma 4"),
    "train_from_scratch": plain(False, otherwise="starts from random weights"),
    "moe_aux_loss_coef": plain(0, otherwise="another loss; Gemsmith's is the mean of -log p over the answers' tokens"),
    **dict.fromkeys(
        ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_dft_loss", "use_asft_loss",
         "use_eaft_loss",
         "use_llama_pro", "use_mca", "use_hyper_parallel", "fp8"),
        plain(False, otherwise=_SWITCH_WHY),
    ),
    **dict.fromkeys(
        ("galore_*", "apollo_*", "badam_*", "oft_*", "module_dropout", "freeze_trainable_layers",
         "freeze_trainable_modules",
         "pissa_iter", "pissa_convert", "ref_model*", "reward_model*", "pref_*", "ppo_*", "kto_*",
         "simpo_gamma", "dpo_label_smoothing"),
        idle("of another method, which another key switches on"),
    ),
    "disable_gradient_checkpointing": no_remat_rule,
    "gradient_checkpointing": idle("on in LLaMA-Factory unless disable_gradient_checkpointing"),
    **dict.fromkeys(
        ("flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc", "use_reentrant_gc", "use_fast_tokenizer",
         "low_cpu_mem_usage", "trust_remote_code", "cache_dir", "use_v1_kernels", "quantization_device_map",
         "offload_folder",
         "split_special_tokens", "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status",
         "use_kv_cache", "infer_*",
         "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "image_*", "video_*", "crop_to_patches",
         "audio_sampling_rate",
         "ray_run_name", "ray_storage_path", "ray_storage_filesystem", "resources_per_worker.*",
         "placement_strategy", "ray_init_kwargs",
         "ray_init_kwargs.*", "export_*"),
        _RUNS,
    ),
    "ray_num_workers": rules.count_rule,
    **dict.fromkeys(
        ("plot_loss", "use_swanlab", "swanlab_*", "include_effective_tokens_per_second", "compute_accuracy",
         "eval_on_each_dataset",
         "eval_num_beams", "wandb_project", "trackio_space_id"),
        idle("logs, reports and scores; Gemsmith writes its own"),
    ),
    **dict.fromkeys(
        ("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "streaming", "buffer_size",
         "tokenized_path",
         "data_shared_file_system", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k"),
        idle("how rows are prepared, or text written; Gemsmith's stages do that"),
    ),
}  # fmt: skip
