"""Hugging Face's TrainingArguments, TRL's SFTConfig, and the YAML of TRL's command line.

That one has model and dataset keys, too.
"""

from collections.abc import Mapping
from typing import Any

from gemsmith.importers import rules
from gemsmith.importers.datasets import DATASET_RULES, hub_rule, path_rule, split_rule
from gemsmith.importers.models import base_rule, targets_rule
from gemsmith.importers.table import (
    Row,
    Rule,
    Setting,
    flag,
    if_set,
    ignored,
    is_on,
    maps_to,
    number,
    or_default,
    positive,
    refuse,
    supports,
    to_do,
)

PROJECT = "TrainingArguments"
SFT_PROJECT = "TRL"
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "learning_rate": 5e-5,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "bf16": False, "gradient_checkpointing": False, "seed": 42,
    "save_steps": 500, "save_strategy": "steps",
}  # fmt: skip
SFT_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "learning_rate": 2e-5, "bf16": True, "gradient_checkpointing": True, "max_length": 1024, "packing": False,
    "assistant_only_loss": False,
}  # fmt: skip
# Of TRL's command line, where the model and the adapter are in the same file.
MODEL_DEFAULTS: dict[str, Any] = {"use_peft": False}
LORA_DEFAULTS: dict[str, Any] = {
    "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None, "use_rslora": False,
}  # fmt: skip


def length_rule(setting: Setting) -> Row:
    """The row of the length in tokens.

    TRL cuts what is longer; Gemsmith never does, so there it is an error, not left out.
    """
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
    """The row of the dtype that the base is loaded in."""
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
    return setting.differs("every weight is trained; Gemsmith trains LoRA adapters, here its default ones")


def template_rule(setting: Setting) -> Row:
    """The row of a chat template's file."""
    if setting.value is None:
        return setting.ignored("the checkpoint's own, as Gemsmith's default")
    if str(setting.value).endswith((".jinja", ".jinja2", ".j2")):
        return setting.mapped({"data.template": str(setting.value)})
    return setting.differs("another model's template; set data.template to its file")


def average_rule(setting: Setting) -> Row:
    """The row of the mean over devices: Gemsmith's is over all tokens of a step."""
    if setting.value is None or is_on(setting.value) or rules.count_devices(setting.config) == 1:
        return setting.ignored("the mean over all tokens of a step, as Gemsmith's")
    return setting.differs("a mean of each device's mean; Gemsmith's is over all tokens of a step")


_RUNS = ignored(rules.RUNS)
_BATCH = rules.batch_rule("per_device_train_batch_size", "gradient_accumulation_steps")

# What TrainingArguments, SFTConfig, and LLaMA-Factory, which takes the former's, have in common.
TRAINING_RULES: Mapping[str, Rule] = {
    **rules.SHARED_RULES,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_train_epochs": or_default(rules.epochs_rule),
    "lr_scheduler_type": or_default(rules.schedule_rule),
    "warmup_steps": or_default(rules.warmup_rule("lr_scheduler_type")),
    "warmup_ratio": rules.warmup_rule("lr_scheduler_type"),
    "optim": rules.optimizer_rule,
    "optim_target_modules": supports(otherwise="an optimizer for some modules; Gemsmith has one for all"),
    "adafactor": supports(False, otherwise="Gemsmith has AdamW only"),
    "max_grad_norm": rules.clip_rule,
    "bf16": rules.half_rule,
    "data_seed": supports(otherwise="an order of its own for the rows; Gemsmith orders them by seed"),
    "save_total_limit": rules.keep_rule,
    "label_smoothing_factor": supports(0, otherwise=rules.OTHER_LOSS),
    "average_tokens_across_devices": average_rule,
    "train_sampling_strategy": supports("random", otherwise=rules.OTHER_ORDER),
    "dataloader_in_order": supports(True, otherwise=rules.OTHER_ORDER),
    "ignore_data_skip": supports(False, otherwise="a resumed run repeats rows; Gemsmith's resumes where it was"),
    "deepspeed.*": supports(
        otherwise="DeepSpeed's settings, which may be of any kind; write them as training arguments"
    ),
    "num_processes": rules.count_rule,
    "accelerator_config.split_batches": supports(
        False, otherwise="a batch is split over the devices, so that a step has fewer rows"
    ),
    "accelerator_config.gradient_accumulation_kwargs": supports(otherwise="accumulation's own settings"),
    **dict.fromkeys(
        """
        debug disable_tqdm include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica
        log_on_each_node logging_* project report_to run_name skip_memory_metrics trackio_*
        """.split(),
        ignored(rules.LOGS),
    ),
    **dict.fromkeys(
        """
        batch_eval_metrics bf16_full_eval do_eval do_predict eval_* evaluation_strategy fp16_full_eval
        greater_is_better include_for_metrics include_inputs_for_metrics label_names metric_for_best_model
        per_device_eval_batch_size predict_with_generate prediction_loss_only
        """.split(),
        ignored(rules.EVALUATION),
    ),
    **dict.fromkeys(
        """
        accelerator_config.* auto_find_batch_size dataloader_* ddp_* fp16_backend fp16_opt_level full_determinism
        gradient_checkpointing_kwargs.* half_precision_backend jit_mode_eval length_column_name liger_kernel_config.*
        local_rank mp_parameters no_cuda parallelism_config past_index per_gpu_eval_batch_size remove_unused_columns
        tf32 torch_compile torch_compile_* torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores use_cache
        use_cpu use_ipex use_legacy_prediction_loop use_liger_kernel use_mps_device _n_gpu
        """.split(),
        _RUNS,
    ),
    **dict.fromkeys(
        """
        do_train enable_jit_checkpoint output_dir overwrite_output_dir restore_callback_states_from_checkpoint
        save_on_each_node save_only_model save_safetensors save_strategy
        """.split(),
        ignored(rules.FILES),
    ),
    **dict.fromkeys(["hub_*", "push_to_hub", "push_to_hub_*"], ignored("the hub; Gemsmith uploads nothing")),
}

RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    "max_length": length_rule,
    "max_seq_length": length_rule,
    "truncation_mode": ignored("nothing is cut here: data.on_too_long"),
    "packing": maps_to("data.packing", flag, "documents kept apart"),
    "packing_strategy": packing_strategy_rule,
    "assistant_only_loss": assistant_rule,
    "completion_only_loss": supports(True, otherwise=rules.ANSWERS_ONLY),
    "loss_type": supports("nll", "chunked_nll", otherwise=rules.OTHER_LOSS),
    "router_aux_loss_coef": supports(0, otherwise=rules.OTHER_LOSS),
    # A dump of the arguments has a key's own name in place of every *_token, whatever was given.
    "eos_token": supports("<turn|>", "<EOS_TOKEN>", otherwise="another end of a turn than the chat template's"),
    "pad_token": ignored("padding is never trained"),
    "chat_template_path": template_rule,
    "dataset_text_field": supports(
        "text", "messages", otherwise="rows of plain text have no counterpart; Gemsmith trains on messages"
    ),
    "dataset_kwargs.skip_prepare_dataset": supports(
        False, otherwise="rows that are tokens already; Gemsmith takes text"
    ),
    "model_init_kwargs.*": supports(otherwise="settings of the model's loading, which may change it"),
    "use_peft": use_peft_rule,
    "model_name_or_path": base_rule,
    "model_revision": supports("main", otherwise=rules.OTHER_REVISION),
    "dtype": dtype_rule,
    "torch_dtype": dtype_rule,
    "lora_r": maps_to("lora.rank", positive),
    "lora_alpha": maps_to("lora.alpha", number),
    "lora_dropout": maps_to("lora.dropout", number),
    "lora_target_modules": targets_rule,
    "lora_target_parameters": supports(otherwise=rules.BARE_PARAMETERS),
    "lora_modules_to_save": supports(otherwise=rules.WHOLE),
    "lora_task_type": refuse("CAUSAL_LM", what="no language modelling"),
    "use_rslora": maps_to("lora.rslora", flag),
    "use_dora": supports(False, otherwise="DoRA: another adapter than W + scale * B A"),
    "load_in_4bit": rules.four_bits_rule("bnb_4bit_quant_type", "use_bnb_nested_quant"),
    "load_in_8bit": rules.eight_bits_rule,
    "bnb_4bit_quant_type": ignored("which 4 bits; load_in_4bit says whether"),
    "use_bnb_nested_quant": ignored("load_in_4bit says what becomes of it"),
    "dataset_name": hub_rule,
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": DATASET_RULES[key] for key in ("split", "name", "data_files")},
    "datasets[].columns": to_do("keep these columns only"),
    "dataset_config": to_do("take that configuration of the dataset"),
    "dataset_train_split": split_rule,
    "dataset_test_split": ignored("which split scores; data.eval"),
    **dict.fromkeys(
        """
        accelerate_config activation_offloading attn_implementation bnb_4bit_quant_storage env.* ignore_bias_buffers
        pad_to_multiple_of padding_free trust_remote_code
        """.split(),
        _RUNS,
    ),
    **dict.fromkeys(
        "dataset_num_proc dataset_streaming dataset_batch_size shuffle_dataset".split(),
        ignored("how rows are prepared"),
    ),
    **dict.fromkeys(
        """
        beta cpo_alpha desirable_weight loss_weights max_completion_length max_prompt_length num_generations
        ref_model_init_kwargs reward_funcs reward_model_path reward_weights simpo_gamma undesirable_weight
        """.split(),
        refuse(what="a key of training by preference or reward"),
    ),
}
