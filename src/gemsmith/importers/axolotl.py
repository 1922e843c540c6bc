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
    Setting,
    flag,
    if_set,
    ignored,
    maps_to,
    number,
    or_default,
    positive,
    refuse,
    supports,
)

PROJECT = "Axolotl"
_DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"
DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "lr_scheduler": "cosine",
    "warmup_steps": None, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "bf16": "auto", "gradient_checkpointing": False, "seed": 42, "sequence_len": 512,
    "sample_packing": False, "excess_length_strategy": "drop", "adapter": None, "lora_dropout": 0.0, _DOUBLE: True,
    "save_total_limit": 4,
}  # fmt: skip


def adapter_rule(setting: Setting) -> Row:
    """The row of the kind of adapter: none means that every weight is trained."""
    value = setting.value
    if value in ("lora", "qlora") or (value is None and setting.config.adapter_elsewhere):
        return setting.ignored("LoRA, as Gemsmith does")
    what = "every weight is trained" if value is None else "another kind of adapter"
    return setting.differs(f"{what}; Gemsmith trains LoRA adapters, here its default ones")


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


def too_long_rule(setting: Setting) -> Row:
    """The row of what happens to a document that is too long; Gemsmith never cuts one."""
    if setting.value in (None, "drop"):
        return setting.mapped({"data.on_too_long": "drop"})
    if setting.value == "raise":
        return setting.mapped({"data.on_too_long": "error"})
    return setting.derived({"data.on_too_long": "error"}, "it is cut there; here it is an error, as Gemsmith cuts none")


def plugins_rule(setting: Setting) -> Row:
    """The row of the plugins: kernels change nothing that is learned, others may."""
    kernels = (".cut_cross_entropy.", ".liger.", ".kernels.")
    plugins = setting.value if isinstance(setting.value, list) else [setting.value] if setting.value else []
    others = [str(name) for name in plugins if not any(kernel in str(name) for kernel in kernels)]
    if others:
        return setting.differs(f"{', '.join(others)} may train otherwise")
    return setting.ignored("faster kernels; the same training")


def template_rule(setting: Setting) -> Row:
    """The row of the chat template's name."""
    is_given_in_full = setting.value is None and setting.config.value("chat_template_jinja")
    name = "jinja" if is_given_in_full else setting.value
    if name is None or str(name).startswith(("gemma4", "tokenizer_default")):
        return setting.ignored("Gemma 4's; Gemsmith takes the checkpoint's own")
    return setting.ignored("chat_template_jinja has it") if name == "jinja" else setting.differs(rules.OTHER_TEMPLATE)


@if_set
def jinja_rule(setting: Setting) -> Row:
    """The row of a chat template given as a file, or in full."""
    template = str(setting.value)
    if "\n" not in template and "{" not in template:
        return setting.mapped({"data.template": template})
    file = "chat_template.jinja"
    return setting.to_do(f"write it to the file {file}", {"data.template": file})


def half_rule(setting: Setting) -> Row:
    """The row of bf16, whose null is off where its absence is `auto`."""
    value = False if setting.value is None else setting.value
    return replace(rules.half_rule(replace(setting, value=value)), value=setting.value)


_BATCH = rules.batch_rule("micro_batch_size", "gradient_accumulation_steps", total="batch_size")
_RATES = supports(otherwise="learning rates that differ between weights; Gemsmith has one")
_SOME_LAYERS = supports(otherwise="not every layer gets the same adapter, where Gemsmith's do")
_VOCABULARY = supports(otherwise=rules.VOCABULARY)
_WHOLE = supports(otherwise=rules.WHOLE)

RULES: Mapping[str, Rule] = {
    **rules.SHARED_RULES,
    "base_model": base_rule,
    "revision_of_model": supports("main", otherwise=rules.OTHER_REVISION),
    "adapter": adapter_rule,
    "lora_model_dir": rules.start_adapter_rule,
    "lora_r": maps_to("lora.rank", positive),
    "lora_alpha": maps_to("lora.alpha", number),
    "lora_dropout": maps_to("lora.dropout", number),
    "lora_target_modules": lora_targets_rule,
    "lora_target_linear": linear_switch("lora_target_modules"),
    "lora_target_parameters": supports(otherwise=rules.BARE_PARAMETERS),
    "lora_modules_to_save": _WHOLE,
    "lora_fan_in_fan_out": supports(False, otherwise="for Conv1D layers; Gemma 4 has none"),
    "peft_use_rslora": maps_to("lora.rslora", flag),
    "peft_use_dora": supports(False, otherwise="DoRA: another adapter than W + scale * B A"),
    "peft_layers_to_transform": _SOME_LAYERS,
    "peft_layers_pattern": _SOME_LAYERS,
    "peft_init_lora_weights": supports(
        True, otherwise="the adapter starts otherwise; Gemsmith's as PEFT's default: A uniform, B = 0"
    ),
    "peft_trainable_token_indices": _WHOLE,
    "peft_autocast_adapter_dtype": supports(True, otherwise="adapters in bfloat16; Gemsmith's are float32"),
    "loraplus_lr_ratio": _RATES,
    "loraplus_lr_embedding": ignored("of embeddings, which have no adapter here"),
    "relora": supports(False, otherwise="adapters are merged and begun anew while it trains"),
    "load_in_4bit": rules.four_bits_rule("bnb_config_kwargs.bnb_4bit_quant_type", _DOUBLE),
    "load_in_8bit": rules.eight_bits_rule,
    _DOUBLE: ignored("load_in_4bit says what becomes of it"),
    "bnb_config_kwargs.bnb_4bit_quant_type": ignored("which 4 bits; load_in_4bit says whether"),
    "gptq": supports(False, otherwise="a base in GPTQ's 4 bits; Gemsmith's are nf4"),
    "quantize_moe_experts": experts_rule,
    "rl": refuse(what="training by preference or reward"),
    "reward_model": refuse(False, what="a reward model"),
    "process_reward_model": refuse(False, what="a reward model"),
    "chat_template": template_rule,
    "chat_template_jinja": jinja_rule,
    "eot_tokens": supports(["<turn|>"], otherwise="other ends of a turn are trained; Gemsmith trains <turn|>"),
    "default_system_message": supports(otherwise="added to every row; put it into the rows"),
    "train_on_inputs": supports(False, otherwise=rules.ANSWERS_ONLY),
    "pretraining_dataset": supports(otherwise="plain text; Gemsmith trains on the answers in messages"),
    "pretraining_dataset[].*": supports(otherwise="plain text; Gemsmith trains on the answers in messages"),
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": rule for key, rule in DATASET_RULES.items()},
    "test_datasets[].path": test_path_rule,
    "test_datasets[].*": ignored("as datasets' own; for data.eval"),
    "val_set_size": held_out_rule("datasets[0].path"),
    "sequence_len": maps_to("data.max_length", positive),
    "excess_length_strategy": too_long_rule,
    "min_sample_len": supports(0, 1, 2, otherwise="shorter documents are left out; Gemsmith keeps them"),
    "sample_packing": maps_to("data.packing", flag, "documents kept apart"),
    "micro_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "batch_size": _BATCH,
    "num_epochs": rules.epochs_rule,
    "optimizer": rules.optimizer_rule,
    "lr_scheduler": or_default(rules.schedule_rule),
    "cosine_min_lr_ratio": supports(otherwise="the rate ends above 0; Gemsmith's cosine ends at 0"),
    "cosine_constant_lr_ratio": supports(otherwise="another curve than the cosine"),
    "lr_quadratic_warmup": supports(False, otherwise="another warm-up than a line"),
    "embedding_lr": _RATES,
    "embedding_lr_scale": _RATES,
    "lr_groups": _RATES,
    "lr_groups[].*": _RATES,
    "warmup_steps": warmup_rule,
    "warmup_ratio": rules.warmup_rule("lr_scheduler", rounding="down"),
    "max_grad_norm": or_default(rules.clip_rule),
    "noisy_embedding_alpha": rules.SHARED_RULES["neftune_noise_alpha"],
    "curriculum_sampling": supports(False, otherwise=rules.OTHER_ORDER),
    "sample_packing_sequentially": supports(False, otherwise="packed in the rows' order; Gemsmith packs by best fit"),
    "early_stopping_patience": supports(otherwise="ends early; Gemsmith runs all steps"),
    "bf16": half_rule,
    "float16": rules.fp16_rule,
    "bfloat16": ignored("as bf16, and without AMP; Gemsmith's adapters stay float32"),
    "fp8": supports(False, otherwise="products of 8 bits; Gemsmith has bfloat16 and float32"),
    "save_total_limit": or_default(rules.keep_rule),
    "plugins": plugins_rule,
    "special_tokens.pad_token": ignored("padding is never trained"),
    "special_tokens.eos_token": supports("<turn|>", "<eos>", otherwise=rules.VOCABULARY),
    "special_tokens.bos_token": supports("<bos>", otherwise=rules.VOCABULARY),
    "special_tokens.*": _VOCABULARY,
    "tokens": _VOCABULARY,
    "added_tokens_overrides.*": _VOCABULARY,
    "resize_token_embeddings_to_32x": supports(False, otherwise=rules.VOCABULARY),
    "unfrozen_parameters": _WHOLE,
    "processor_type": images_rule,
    "image_size": supports(
        otherwise="images are made that large first; Gemsmith takes them as they are, up to data.image_tokens"
    ),
    "image_resize_algorithm": ignored("image_size says whether"),
    "freeze_mm_modules": encoders_rule,
    "dataset_exact_deduplication": supports(False, otherwise="takes out repeated rows; do so in the rows"),
    "deepspeed.*": supports(otherwise="DeepSpeed's settings, which may be of any kind"),
    **dict.fromkeys(
        """
        context_parallel_size dp_replicate_size dp_shard_size ray_num_workers sequence_parallel_degree
        tensor_parallel_size world_size
        """.split(),
        rules.count_rule,
    ),
    **dict.fromkeys(
        """
        comet_* debug gc_steps include_tkps include_tokens_per_second logging_steps loss_watchdog_* mlflow_*
        profiler_steps use_comet use_mlflow use_tensorboard use_wandb wandb_*
        """.split(),
        ignored(rules.LOGS),
    ),
    **dict.fromkeys(
        """
        bench_dataset do_bench_eval do_causal_lm_eval eval_* evals_per_epoch evaluation_strategy greater_is_better
        metric_for_best_model
        """.split(),
        ignored(rules.EVALUATION),
    ),
    **dict.fromkeys(
        """
        auto_resume_from_checkpoints dataset_prepared_path hf_use_auth_token hub_* merge_lora merge_method output_dir
        push_dataset_to_hub save_first_step save_only_model save_safetensors save_strategy saves_per_epoch
        """.split(),
        ignored(rules.FILES),
    ),
    **dict.fromkeys(
        """
        accelerator_config.* activation_offloading attn_implementation auto_find_batch_size batch_flattening
        bnb_config_kwargs.bnb_4bit_compute_dtype bnb_config_kwargs.bnb_4bit_quant_storage chunked_cross_entropy
        cut_cross_entropy ddp ddp_* device device_map eager_attention experts_implementation flash_attention
        flash_attn_* flex_attention flex_attn_compile_kwargs.* fsdp_final_state_dict_type fsdp_version
        fused_attn_kernel gemma4_hybrid_attn_impl gpu_memory_limit gradient_checkpointing_kwargs.* heads_k_stride
        is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model liger_*
        local_rank lora_embedding_kernel lora_mlp_kernel lora_o_kernel lora_on_cpu lora_qkv_kernel low_cpu_mem_usage
        max_memory model_type moe_bnb_fast moe_dequant_chunk_size multipack_real_batches pad_to_sequence_len
        qlora_sharded_model_loading ray_run_name remove_unused_columns resources_per_worker.* ring_attn_func
        sample_packing_bin_size sample_packing_group_size sdp_attention strict tf32 tokenizer_type torch_compile
        torch_compile_* trust_remote_code type_of_model unsloth_* use_kernels use_ray use_scattermoe use_sonicmoe
        xformers_attention
        """.split(),
        ignored(rules.RUNS),
    ),
    **dict.fromkeys(
        """
        dataloader_* dataset_keep_in_memory dataset_num_proc dataset_processes shuffle_merged_datasets
        skip_prepare_dataset streaming
        """.split(),
        ignored("how rows are prepared; Gemsmith's data stage does that"),
    ),
}
