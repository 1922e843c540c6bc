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
    SourceConfig,
    flag,
    idle,
    is_on,
    number,
    or_default,
    plain,
    positive,
    read_as,
    refuse,
    row,
    to,
    to_do,
    whole,
)

PROJECT = "TrainingArguments"
SFT_PROJECT = "TRL"
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "learning_rate": 5e-5,
    "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "bf16": False, "gradient_checkpointing": False, "seed": 42, "save_steps": 500,
    "save_strategy": "steps",
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


def length_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the length in tokens.

    TRL cuts what is longer; Gemsmith never does, so there it is an error, not left out.
    """
    if value is None:
        why = "nothing is cut: a document of more than Gemsmith's default length is an error"
        return row(reading, key, value, "derived", why, data__on_too_long="error")
    why = "what is longer is cut there and an error here: data.on_too_long"
    length = read_as(positive, key, value, reading)
    return row(reading, key, value, "mapped", why, data__max_length=length, data__on_too_long="error")


def packing_strategy_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of how documents are packed; Gemsmith never cuts one."""
    if value in (None, "bfd") or not is_on(reading.value("packing")):
        return row(reading, key, value, "none", "best fit, documents kept apart, as Gemsmith's" if value else "not set")
    return row(
        reading, key, value, "differs", "cuts documents over rows; Gemsmith keeps each whole and apart from the others"
    )


def assistant_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of assistant_only_loss: what Gemsmith always does, and TRL for messages only when told."""
    if is_on(value):
        return row(reading, key, value, "none", "answers only, as Gemsmith does")
    if is_on(reading.value("completion_only_loss")):
        return row(reading, key, value, "none", "completion_only_loss decides: answers only, as Gemsmith does")
    if reading.value("completion_only_loss") is False:
        return row(reading, key, value, "none", "completion_only_loss decides")
    why = (
        "TRL trains every token of messages, Gemsmith the answers (rows of prompt and completion: the same; say "
        "completion_only_loss: true)"
    )
    return row(reading, key, value, "differs", why)


def dtype_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the dtype that the base is loaded in."""
    name = str(value).removeprefix("torch.")
    if value is None or rules.quantized(reading) or (name == "float32" and is_on(reading.value("bf16"))):
        return row(reading, key, value, "none", "not set" if value is None else "another key decides train.dtype")
    if name in ("bfloat16", "auto"):
        return row(reading, key, value, "mapped", "Gemma 4's own" if name == "auto" else "", train__dtype="bfloat16")
    if name == "float32":
        return row(reading, key, value, "mapped", "", train__dtype="float32")
    return row(reading, key, value, "differs", "Gemsmith has bfloat16 and float32", train__dtype="bfloat16")


def use_peft_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of use_peft: without an adapter, every weight is trained."""
    if is_on(value) or reading.adapter_elsewhere:
        return row(reading, key, value, "none", "LoRA, as Gemsmith does")
    return row(
        reading, key, value, "differs", "every weight is trained; Gemsmith trains LoRA adapters, here its default ones"
    )


def template_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a chat template's file."""
    if value is None:
        return row(reading, key, value, "none", "the checkpoint's own, as Gemsmith's default")
    if str(value).endswith((".jinja", ".jinja2", ".j2")):
        return row(reading, key, value, "mapped", "", data__template=str(value))
    return row(reading, key, value, "differs", "another model's template; set data.template to its file")


def average_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the mean over devices: Gemsmith's is over all tokens of a step."""
    if value is None or is_on(value) or rules.devices_of(reading) == 1:
        return row(reading, key, value, "none", "the mean over all tokens of a step, as Gemsmith's")
    return row(reading, key, value, "differs", "a mean of each device's mean; Gemsmith's is over all tokens of a step")


_LOGS = idle("logs and reports; Gemsmith writes its own")
_EVAL = idle("scores while it trains; Gemsmith scores data.eval afterwards")
_RUNS = idle("how it runs on GPUs, not what is learned")
_FILES = idle("where and when files are written; the run directory holds them")
_HUB = idle("the hub; Gemsmith uploads nothing")
_MASK = "tokens of the prompt are trained too; Gemsmith trains answers only"
_OTHER_LOSS = "another loss; Gemsmith's is the mean of -log p over the answers' tokens"
_BATCH = rules.batch_rule("per_device_train_batch_size", "gradient_accumulation_steps")
_ORDER = "another order of the rows; Gemsmith shuffles every epoch"
_WHOLE = "trained whole; Gemsmith trains adapters only"

# What TrainingArguments, SFTConfig, and LLaMA-Factory, which takes the former's, have in common.
TRAINING_RULES: Mapping[str, Rule] = {
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_train_epochs": or_default(rules.epochs_rule),
    "max_steps": rules.max_steps_rule,
    "learning_rate": to("optimizer.learning_rate", number),
    "lr_scheduler_type": or_default(rules.schedule_rule),
    "lr_scheduler_kwargs": plain(otherwise="the schedule's own settings; Gemsmith's schedules have none"),
    "lr_scheduler_kwargs.*": plain(otherwise="the schedule's own settings; Gemsmith's schedules have none"),
    "warmup_steps": or_default(rules.warmup_rule("lr_scheduler_type")),
    "warmup_ratio": rules.warmup_rule("lr_scheduler_type"),
    "optim": rules.optimizer_rule,
    "optim_args": plain(otherwise="the optimizer's own settings, which may be any"),
    "optim_args.*": plain(otherwise="the optimizer's own settings, which may be any"),
    "optim_target_modules": plain(otherwise="an optimizer for some modules; Gemsmith has one for all"),
    "adafactor": plain(False, otherwise="Gemsmith has AdamW only"),
    "weight_decay": to("optimizer.weight_decay", number),
    "adam_beta1": to("optimizer.beta1", number),
    "adam_beta2": to("optimizer.beta2", number),
    "adam_epsilon": to("optimizer.epsilon", number),
    "max_grad_norm": rules.clip_rule,
    "bf16": rules.half_rule,
    "fp16": rules.fp16_rule,
    "gradient_checkpointing": rules.remat_rule,
    "seed": to("seed", whole),
    "data_seed": plain(otherwise="an order of its own for the rows; Gemsmith orders them by seed"),
    "save_steps": rules.save_steps_rule,
    "save_total_limit": rules.keep_rule,
    "neftune_noise_alpha": plain(otherwise="noise on the embeddings; Gemsmith adds none"),
    "label_smoothing_factor": plain(0, otherwise=_OTHER_LOSS),
    "average_tokens_across_devices": average_rule,
    "train_sampling_strategy": plain("random", otherwise=_ORDER),
    "group_by_length": plain(False, otherwise=_ORDER),
    "dataloader_in_order": plain(True, otherwise=_ORDER),
    "dataloader_drop_last": plain(False, otherwise="the last rows of an epoch are left out; Gemsmith drops none"),
    "load_best_model_at_end": plain(False, otherwise="the result is the best checkpoint, Gemsmith's the last; "
                                                     "export.step picks one"),
    "resume_from_checkpoint": plain(False, otherwise="goes on from a checkpoint; Gemsmith starts anew"),
    "ignore_data_skip": plain(False, otherwise="a run that goes on repeats rows; Gemsmith's goes on where it was"),
    "fsdp": rules.several_devices,
    "deepspeed": rules.several_devices,
    "fsdp_config": rules.several_devices,
    "fsdp_config.*": rules.several_devices,
    "deepspeed.*": plain(otherwise="DeepSpeed's settings, which may be of any kind; write them as training arguments"),
    "num_processes": rules.count_rule,
    "accelerator_config.split_batches": plain(False, otherwise="a batch is split over the devices, so that a step has "
                                                               "fewer rows"),
    "accelerator_config.gradient_accumulation_kwargs": plain(otherwise="accumulation's own settings"),
    "include_num_input_tokens_seen": _LOGS,
    **dict.fromkeys(
        (
            "debug", "disable_tqdm", "include_tokens_per_second", "log_level", "log_level_replica",
            "log_on_each_node", "logging_dir",
            "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy", "project",
            "report_to", "run_name",
            "skip_memory_metrics", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id",
        ),
        _LOGS,
    ),
    **dict.fromkeys(
        (
            "batch_eval_metrics", "bf16_full_eval", "do_eval", "do_predict", "eval_accumulation_steps", "eval_delay",
            "eval_do_concat_batches", "eval_on_start", "eval_packing", "eval_steps", "eval_strategy",
            "eval_use_gather_object",
            "evaluation_strategy", "fp16_full_eval", "greater_is_better", "include_for_metrics",
            "include_inputs_for_metrics",
            "label_names",
            "metric_for_best_model", "per_device_eval_batch_size", "predict_with_generate", "prediction_loss_only",
        ),
        _EVAL,
    ),
    **dict.fromkeys(
        (
            "accelerator_config", "accelerator_config.*", "auto_find_batch_size",
            "dataloader_multiprocessing_context", "dataloader_num_workers",
            "dataloader_persistent_workers",
            "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend", "ddp_broadcast_buffers",
            "ddp_bucket_cap_mb",
            "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "full_determinism",
            "fp16_backend", "fp16_opt_level",
            "gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs.*", "half_precision_backend",
            "jit_mode_eval",
            "length_column_name", "liger_kernel_config", "liger_kernel_config.*", "local_rank",
            "mp_parameters", "no_cuda",
            "parallelism_config", "past_index", "per_gpu_eval_batch_size", "remove_unused_columns", "tf32",
            "torch_compile",
            "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "torchdynamo",
            "tpu_metrics_debug", "tpu_num_cores",
            "use_cache", "use_cpu", "use_ipex", "use_legacy_prediction_loop", "use_liger_kernel",
            "use_mps_device", "_n_gpu",
        ),
        _RUNS,
    ),
    **dict.fromkeys(
        (
            "do_train", "enable_jit_checkpoint", "output_dir", "overwrite_output_dir",
            "restore_callback_states_from_checkpoint",
            "save_on_each_node", "save_only_model", "save_safetensors", "save_strategy",
        ),
        _FILES,
    ),
    **dict.fromkeys(
        (
            "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy",
            "hub_token", "push_to_hub",
            "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token",
        ),
        _HUB,
    ),
}  # fmt: skip

RULES: Mapping[str, Rule] = {
    **TRAINING_RULES,
    "max_length": length_rule,
    "max_seq_length": length_rule,
    "truncation_mode": idle("nothing is cut here: data.on_too_long"),
    "packing": to("data.packing", flag, "documents kept apart"),
    "packing_strategy": packing_strategy_rule,
    "assistant_only_loss": assistant_rule,
    "completion_only_loss": plain(True, otherwise=_MASK),
    "loss_type": plain("nll", "chunked_nll", otherwise=_OTHER_LOSS),
    "router_aux_loss_coef": plain(0, otherwise=_OTHER_LOSS),
    # A dump of the arguments has a key's own name in place of every *_token, whatever was given.
    "eos_token": plain("<turn|>", "<EOS_TOKEN>", otherwise="another end of a turn than the chat template's"),
    "pad_token": idle("padding is never trained"),
    "chat_template_path": template_rule,
    "dataset_text_field": plain("text", "messages", otherwise="rows of plain text have no counterpart; Gemsmith trains "
                                                              "on messages"),
    "dataset_kwargs.skip_prepare_dataset": plain(False, otherwise="rows that are tokens already; Gemsmith takes text"),
    "model_init_kwargs.*": plain(otherwise="settings of the model's loading, which may change it"),
    "use_peft": use_peft_rule,
    "model_name_or_path": base_rule,
    "model_revision": plain("main", otherwise="a revision of the base; Gemsmith takes the newest: give a folder with "
                                              "that one"),
    "dtype": dtype_rule,
    "torch_dtype": dtype_rule,
    "lora_r": to("lora.rank", positive),
    "lora_alpha": to("lora.alpha", number),
    "lora_dropout": to("lora.dropout", number),
    "lora_target_modules": targets_rule,
    "lora_target_parameters": plain(otherwise="adapters on bare parameters such as the experts'; Gemsmith has none "
                                              "there"),
    "lora_modules_to_save": plain(otherwise=_WHOLE),
    "lora_task_type": refuse("CAUSAL_LM", what="no language modelling"),
    "use_rslora": to("lora.rslora", flag),
    "use_dora": plain(False, otherwise="DoRA: another adapter than W + scale * B A"),
    "load_in_4bit": rules.four_bits_rule("bnb_4bit_quant_type", "use_bnb_nested_quant"),
    "load_in_8bit": rules.eight_bits_rule,
    "bnb_4bit_quant_type": idle("which 4 bits; load_in_4bit says whether"),
    "use_bnb_nested_quant": idle("load_in_4bit says what becomes of it"),
    "bnb_4bit_quant_storage": idle("how it runs on GPUs, not what is learned"),
    "dataset_name": hub_rule,
    "datasets[].path": path_rule,
    **{f"datasets[].{key}": DATASET_RULES[key] for key in ("split", "name", "data_files")},
    "datasets[].columns": to_do("keep these columns only"),
    "dataset_config": to_do("take that configuration of the dataset"),
    "dataset_train_split": split_rule,
    "dataset_test_split": idle("which split scores; data.eval"),
    **dict.fromkeys(
        ("activation_offloading", "attn_implementation", "padding_free", "pad_to_multiple_of", "trust_remote_code",
         "ignore_bias_buffers"),
        _RUNS,
    ),
    **dict.fromkeys(("dataset_num_proc", "dataset_streaming", "dataset_batch_size", "shuffle_dataset"),
                    idle("how rows are prepared")),
    **dict.fromkeys(("env", "env.*", "accelerate_config"), _RUNS),
    **dict.fromkeys(
        ("beta", "loss_weights", "max_prompt_length", "max_completion_length", "num_generations", "reward_model_path",
         "reward_funcs",
         "reward_weights", "ref_model_init_kwargs", "desirable_weight", "undesirable_weight", "cpo_alpha",
         "simpo_gamma"),
        refuse(what="a key of training by preference or reward"),
    ),
}  # fmt: skip
