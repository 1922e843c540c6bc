"""Axolotl's YAML."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemsmith.importers import rules
from gemsmith.importers.datasets import DATASET_RULES, held_out_rule, path_rule, test_path_rule
from gemsmith.importers.models import base_rule, encoders_rule, experts_rule, images_rule, linear_switch, targets_rule
from gemsmith.importers.table import (
    Row,
    Rule,
    SourceConfig,
    flag,
    idle,
    is_on,
    number,
    or_default,
    plain,
    positive,
    refuse,
    row,
    to,
    whole,
)

PROJECT = "Axolotl"
_DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"
DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "lr_scheduler": "cosine",
    "warmup_steps": None,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
    "bf16": "auto",
    "gradient_checkpointing": False, "seed": 42, "sequence_len": 512, "sample_packing": False,
    "excess_length_strategy": "drop",
    "adapter": None, "lora_dropout": 0.0, _DOUBLE: True, "save_total_limit": 4,
}  # fmt: skip


def adapter_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the kind of adapter: none means that every weight is trained."""
    if value in ("lora", "qlora") or (value is None and reading.adapter_elsewhere):
        return row(reading, key, value, "none", "LoRA, as Gemsmith does")
    what = "every weight is trained" if value is None else "another kind of adapter"
    return row(reading, key, value, "differs", f"{what}; Gemsmith trains LoRA adapters, here its default ones")


def targets(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of lora_target_modules, which lora_target_linear overrules."""
    if value is None or is_on(reading.value("lora_target_linear")):
        return row(
            reading, key, value, "none", "not set" if value is None else "lora_target_linear decides: all linear layers"
        )
    return targets_rule(key, value, reading)


def warmup(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the warm-up; where the file has none, Axolotl takes 3 % of the steps, at most 100."""
    if value is not None or reading.given.get("warmup_ratio") is not None:
        return rules.warmup_rule("lr_scheduler", rounding="down")(key, value, reading)
    if rules.is_constant(reading.value("lr_scheduler")):
        return row(reading, key, value, "derived", "a constant schedule has no warm-up", optimizer__warmup_steps=0)
    steps, default = reading.steps or rules.max_steps_of(reading), "Axolotl's default: 3 % of the steps, at most 100"
    if steps is None:
        return rules.ratio_row(reading, key, value, "derived", f"{default}; {rules.STEPS_HINT}", ratio=0.03)
    return row(
        reading, key, value, "derived", default, optimizer__warmup_steps=rules.not_one(min(int(0.03 * steps), 100))
    )


def too_long_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of what happens to a document that is too long; Gemsmith never cuts one."""
    if value in (None, "drop"):
        return row(reading, key, value, "mapped", "", data__on_too_long="drop")
    why = "" if value == "raise" else "it is cut there; here it is an error, as Gemsmith cuts none"
    return row(reading, key, value, "mapped" if value == "raise" else "derived", why, data__on_too_long="error")


def plugins_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the plugins: kernels change nothing that is learned, others may."""
    kernels = ("cut_cross_entropy", "liger", "kernels")
    others = [
        name
        for name in (value if isinstance(value, list) else [value] if value else [])
        if not any(f".{kernel}." in str(name) for kernel in kernels)
    ]
    if others:
        return row(reading, key, value, "differs", f"{', '.join(map(str, others))} may train otherwise")
    return row(reading, key, value, "none", "faster kernels; the same training")


def template_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the chat template's name."""
    name = "jinja" if value is None and reading.value("chat_template_jinja") else value
    if name is None or str(name).startswith(("gemma4", "tokenizer_default")):
        return row(reading, key, value, "none", "Gemma 4's; Gemsmith takes the checkpoint's own")
    if name == "jinja":
        return row(reading, key, value, "none", "chat_template_jinja has it")
    return row(reading, key, value, "differs", "another model's template; Gemsmith takes the checkpoint's own")


def jinja_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a chat template given as a file, or in full."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    if "\n" not in str(value) and "{" not in str(value):
        return row(reading, key, value, "mapped", "", data__template=str(value))
    template = "chat_template.jinja"
    return row(reading, key, value, "to do", f"write it to the file {template}", data__template=template)


def half_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of bf16, whose null is off where its absence is `auto`."""
    return replace(rules.half_rule(key, False if value is None else value, reading), value=value)


_BATCH = rules.batch_rule("micro_batch_size", "gradient_accumulation_steps", total="batch_size")
_LOGS = idle("logs and reports; Gemsmith writes its own")
_EVAL = idle("scores while it trains; Gemsmith scores data.eval afterwards")
_RUNS = idle("how it runs on GPUs, not what is learned")
_FILES = idle("where and when files are written; the run directory holds them")
_RATES = "learning rates that differ between weights; Gemsmith has one"
_PREFERENCE = refuse(what="training by preference or reward")
_WHOLE = "trained whole; Gemsmith trains adapters only"
_VOCABULARY = "the vocabulary is changed; Gemsmith trains with Gemma's own"

RULES: Mapping[str, Rule] = {
    "base_model": base_rule,
    "revision_of_model": plain("main", otherwise="a revision of the base; Gemsmith takes the newest: give a folder "
                                                 "with that one"),
    "adapter": adapter_rule,
    "lora_model_dir": rules.start_adapter_rule,
    "lora_r": to("lora.rank", positive),
    "lora_alpha": to("lora.alpha", number),
    "lora_dropout": to("lora.dropout", number),
    "lora_target_modules": targets,
    "lora_target_linear": linear_switch("lora_target_modules"),
    "lora_target_parameters": plain(otherwise="adapters on bare parameters such as the experts'; Gemsmith has none "
                                              "there"),
    "lora_modules_to_save": plain(otherwise=_WHOLE),
    "lora_fan_in_fan_out": plain(False, otherwise="for Conv1D layers; Gemma 4 has none"),
    "peft_use_rslora": to("lora.rslora", flag),
    "peft_use_dora": plain(False, otherwise="DoRA: another adapter than W + scale * B A"),
    "peft_layers_to_transform": plain(otherwise="not every layer gets the same adapter, where Gemsmith's do"),
    "peft_layers_pattern": plain(otherwise="not every layer gets the same adapter, where Gemsmith's do"),
    "peft_init_lora_weights": plain(True, otherwise="the adapter starts otherwise; Gemsmith's as PEFT's default: A "
                                                    "uniform, B = 0"),
    "peft_trainable_token_indices": plain(otherwise=_WHOLE),
    "peft_autocast_adapter_dtype": plain(True, otherwise="adapters in bfloat16; Gemsmith's are float32"),
    "loraplus_lr_ratio": plain(otherwise=_RATES),
    "loraplus_lr_embedding": idle("of embeddings, which have no adapter here"),
    "relora": plain(False, otherwise="adapters are merged and begun anew while it trains"),
    "load_in_4bit": rules.four_bits_rule("bnb_config_kwargs.bnb_4bit_quant_type", _DOUBLE),
    "load_in_8bit": rules.eight_bits_rule,
    _DOUBLE: idle("load_in_4bit says what becomes of it"),
    "bnb_config_kwargs.bnb_4bit_quant_type": idle("which 4 bits; load_in_4bit says whether"),
    "gptq": plain(False, otherwise="a base in GPTQ's 4 bits; Gemsmith's are nf4"),
    "quantize_moe_experts": experts_rule,
    "rl": _PREFERENCE,
    "reward_model": refuse(False, what="a reward model"),
    "process_reward_model": refuse(False, what="a reward model"),
    "chat_template": template_rule,
    "chat_template_jinja": jinja_rule,
    "eot_tokens": plain(["<turn|>"], otherwise="other ends of a turn are trained; Gemsmith trains <turn|>"),
    "default_system_message": plain(otherwise="added to every row; put it into the rows"),
    "train_on_inputs": plain(False, otherwise="tokens of the prompt are trained too; Gemsmith trains answers only"),
    "pretraining_dataset": plain(otherwise="plain text; Gemsmith trains on the answers in messages"),
    "pretraining_dataset[].*": plain(otherwise="plain text; Gemsmith trains on the answers in messages"),
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": rule for key, rule in DATASET_RULES.items()},
    "test_datasets[].path": test_path_rule,
    "test_datasets[].*": idle("as datasets' own; for data.eval"),
    "val_set_size": held_out_rule("datasets[0].path"),
    "sequence_len": to("data.max_length", positive),
    "excess_length_strategy": too_long_rule,
    "min_sample_len": plain(0, 1, 2, otherwise="shorter documents are left out; Gemsmith keeps them"),
    "sample_packing": to("data.packing", flag, "documents kept apart"),
    "micro_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "batch_size": _BATCH,
    "num_epochs": rules.epochs_rule,
    "max_steps": rules.max_steps_rule,
    "optimizer": rules.optimizer_rule,
    "optim_args": plain(otherwise="the optimizer's own settings, which may be any"),
    "optim_args.*": plain(otherwise="the optimizer's own settings, which may be any"),
    "lr_scheduler": or_default(rules.schedule_rule),
    "lr_scheduler_kwargs": plain(otherwise="the schedule's own settings; Gemsmith's schedules have none"),
    "lr_scheduler_kwargs.*": plain(otherwise="the schedule's own settings; Gemsmith's schedules have none"),
    "cosine_min_lr_ratio": plain(otherwise="the rate ends above 0; Gemsmith's cosine ends at 0"),
    "cosine_constant_lr_ratio": plain(otherwise="another curve than the cosine"),
    "lr_quadratic_warmup": plain(False, otherwise="another warm-up than a line"),
    "learning_rate": to("optimizer.learning_rate", number),
    "embedding_lr": plain(otherwise=_RATES),
    "embedding_lr_scale": plain(otherwise=_RATES),
    "lr_groups": plain(otherwise=_RATES),
    "lr_groups[].*": plain(otherwise=_RATES),
    "warmup_steps": warmup,
    "warmup_ratio": rules.warmup_rule("lr_scheduler", rounding="down"),
    "weight_decay": to("optimizer.weight_decay", number),
    "adam_beta1": to("optimizer.beta1", number),
    "adam_beta2": to("optimizer.beta2", number),
    "adam_epsilon": to("optimizer.epsilon", number),
    "max_grad_norm": or_default(rules.clip_rule),
    "neftune_noise_alpha": plain(otherwise="noise on the embeddings; Gemsmith adds none"),
    "noisy_embedding_alpha": plain(otherwise="noise on the embeddings; Gemsmith adds none"),
    "group_by_length": plain(False, otherwise="another order of the rows; Gemsmith shuffles every epoch"),
    "curriculum_sampling": plain(False, otherwise="another order of the rows; Gemsmith shuffles every epoch"),
    "sample_packing_sequentially": plain(False, otherwise="packed in the rows' order; Gemsmith packs by best fit"),
    "dataloader_drop_last": plain(False, otherwise="the last rows of an epoch are left out; Gemsmith drops none"),
    "early_stopping_patience": plain(otherwise="ends early; Gemsmith runs all steps"),
    "load_best_model_at_end": plain(False, otherwise="the result is the best checkpoint, Gemsmith's the last; "
                                                     "export.step picks one"),
    "resume_from_checkpoint": plain(False, otherwise="goes on from a checkpoint; Gemsmith starts anew"),
    "bf16": half_rule,
    "fp16": rules.fp16_rule,
    "float16": rules.fp16_rule,
    "bfloat16": idle("as bf16, and without AMP; Gemsmith's adapters stay float32"),
    "fp8": plain(False, otherwise="products of 8 bits; Gemsmith has bfloat16 and float32"),
    "gradient_checkpointing": rules.remat_rule,
    "seed": to("seed", whole),
    "save_steps": rules.save_steps_rule,
    "save_total_limit": or_default(rules.keep_rule),
    "plugins": plugins_rule,
    "special_tokens": plain(otherwise=_VOCABULARY),
    "special_tokens.pad_token": idle("padding is never trained"),
    "special_tokens.eos_token": plain("<turn|>", "<eos>", otherwise=_VOCABULARY),
    "special_tokens.bos_token": plain("<bos>", otherwise=_VOCABULARY),
    "special_tokens.*": plain(otherwise=_VOCABULARY),
    "tokens": plain(otherwise=_VOCABULARY),
    "added_tokens_overrides.*": plain(otherwise=_VOCABULARY),
    "resize_token_embeddings_to_32x": plain(False, otherwise=_VOCABULARY),
    "unfrozen_parameters": plain(otherwise=_WHOLE),
    "processor_type": images_rule,
    "image_size": plain(otherwise="images are made that large first; Gemsmith takes them as they are, up to "
                                  "data.image_tokens"),
    "image_resize_algorithm": idle("image_size says whether"),
    "freeze_mm_modules": encoders_rule,
    "dataset_exact_deduplication": plain(False, otherwise="takes out repeated rows; do so in the rows"),
    "deepspeed": rules.several_devices,
    "deepspeed.*": plain(otherwise="DeepSpeed's settings, which may be of any kind"),
    "fsdp": rules.several_devices,
    "fsdp_config": rules.several_devices,
    "fsdp_config.*": rules.several_devices,
    "fsdp_version": _RUNS,
    "fsdp_final_state_dict_type": _RUNS,
    **dict.fromkeys(
        ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "dp_shard_size",
         "dp_replicate_size", "world_size",
         "ray_num_workers"),
        rules.count_rule,
    ),
    **dict.fromkeys(
        ("logging_steps", "use_tensorboard", "profiler_steps", "include_tokens_per_second", "include_tkps", "gc_steps",
         "debug",
         "loss_watchdog_threshold", "loss_watchdog_patience", "mlflow_*", "wandb_*", "comet_*", "use_wandb",
         "use_mlflow", "use_comet"),
        _LOGS,
    ),
    **dict.fromkeys(
        ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy", "eval_batch_size",
         "eval_sample_packing",
         "eval_table_size", "eval_max_new_tokens", "eval_max_tokens", "do_causal_lm_eval",
         "eval_causal_lm_metrics", "do_bench_eval",
         "bench_dataset", "metric_for_best_model", "greater_is_better"),
        _EVAL,
    ),
    **dict.fromkeys(
        ("output_dir", "saves_per_epoch", "save_strategy", "save_only_model", "save_safetensors", "save_first_step",
         "dataset_prepared_path", "hub_model_id", "hub_strategy", "push_dataset_to_hub", "hf_use_auth_token",
         "auto_resume_from_checkpoints", "merge_lora", "merge_method"),
        _FILES,
    ),
    **dict.fromkeys(
        ("strict", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "attn_implementation",
         "flash_attention",
         "flex_attention", "flex_attn_compile_kwargs.*", "sdp_attention", "xformers_attention",
         "eager_attention", "flash_attn_*",
         "gemma4_hybrid_attn_impl", "fused_attn_kernel", "activation_offloading", "gradient_checkpointing_kwargs",
         "gradient_checkpointing_kwargs.*", "ddp", "ddp_*", "device_map", "device", "local_rank",
         "max_memory", "gpu_memory_limit",
         "low_cpu_mem_usage", "lora_on_cpu", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
         "lora_embedding_kernel", "liger_*",
         "cut_cross_entropy", "chunked_cross_entropy", "use_kernels", "use_scattermoe", "use_sonicmoe",
         "experts_implementation",
         "moe_bnb_fast", "moe_dequant_chunk_size", "qlora_sharded_model_loading", "unsloth_*", "pad_to_sequence_len",
         "multipack_real_batches", "sample_packing_group_size", "sample_packing_bin_size", "batch_flattening",
         "heads_k_stride",
         "ring_attn_func", "auto_find_batch_size", "accelerator_config", "accelerator_config.*",
         "trust_remote_code", "model_type",
         "tokenizer_type", "type_of_model", "is_llama_derived_model", "is_mistral_derived_model",
         "is_falcon_derived_model",
         "is_qwen_derived_model", "remove_unused_columns", "use_ray", "ray_run_name", "resources_per_worker.*",
         "bnb_config_kwargs.bnb_4bit_compute_dtype", "bnb_config_kwargs.bnb_4bit_quant_storage"),
        _RUNS,
    ),
    **dict.fromkeys(
        ("dataset_processes", "dataset_num_proc", "dataset_keep_in_memory", "dataloader_num_workers",
         "dataloader_pin_memory",
         "dataloader_prefetch_factor", "dataloader_persistent_workers", "shuffle_merged_datasets",
         "skip_prepare_dataset", "streaming"),
        idle("how rows are prepared; Gemsmith's data stage does that"),
    ),
}  # fmt: skip
