"""Which difference confounds which ratio: one table, for runs and for published numbers alike."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["training speed", "serving speed", "quality", "cost"]
KINDS: tuple[Kind, ...] = ("training speed", "serving speed", "quality", "cost")
_T: tuple[Kind, ...] = ("training speed", "cost")
_S: tuple[Kind, ...] = ("serving speed", "cost")
_Q: tuple[Kind, ...] = ("quality",)
_TQ: tuple[Kind, ...] = ("training speed", "quality", "cost")
_SQ: tuple[Kind, ...] = ("serving speed", "quality", "cost")
_ROWS = "data:rows_sha256"


@dataclass(frozen=True)
class Rule:
    """Conditions whose names match the pattern, what a difference in them confounds, and why."""

    pattern: str
    confounds: tuple[Kind, ...]
    why: str
    follows: tuple[str, ...] = ()
    """Patterns of conditions that this one is a consequence of: where that is compared on purpose, so is this."""
    needed: bool = False  # whether what is not recorded counts as a difference: that it was the same cannot be said
    settled_by: str | None = None
    """A condition that says what this one came to: where that is recorded and alike, this one bears on nothing."""


# The first that matches holds. A longer name of the same prefix stands before the shorter.
RULES = (
    Rule("model", KINDS, "another model"),
    Rule("checkpoint", KINDS, "another base", settled_by="data:checkpoint_sha256"),
    Rule("seed", _Q, "one seed against another is partly chance"),
    Rule("data.eval*", (), "the questions say it: eval:questions"),
    Rule("data.held_out", _TQ, "other rows are trained on", settled_by=_ROWS),
    Rule("data.max_length", _TQ, "longer rows cost more attention and hold other documents", settled_by=_ROWS),
    Rule("data.packing", _TQ, "rows that are not packed are partly padding", settled_by=_ROWS),
    Rule("data.template", _TQ, "other text around the same rows", settled_by=_ROWS),
    Rule("data.*", _TQ, "other rows", settled_by=_ROWS),
    Rule("lora.alpha", _Q, "the size of the adapters' effect"),
    Rule("lora.rslora", _Q, "the size of the adapters' effect"),
    Rule("lora.dropout", _TQ, "regularization, and the work of it"),
    Rule("lora.*", KINDS, "other adapters: other capacity, and other work where they are trained or served"),
    Rule("optimizer.warmup*", _Q, "another schedule", settled_by="train:warmup_steps"),
    Rule("optimizer.*", _Q, "another optimization"),
    Rule("train.epochs", ("quality", "cost"), "more or fewer updates: hours, cost and what is learnt"),
    Rule("train.max_steps", ("quality", "cost"), "more or fewer updates: hours, cost and what is learnt"),
    Rule("train.global_batch_size", _TQ, "another batch: fuller matmuls, other updates"),
    Rule("train.tokens_per_step", _TQ, "another batch: fuller matmuls, other updates"),
    Rule("train.method", KINDS, "adapters, or the weights themselves: other capacity, other work"),
    Rule("train.init_adapter", _Q, "another start"),
    Rule("train.dtype", _TQ, "other precision"),
    Rule("train.double_quant", _TQ, "other precision"),
    Rule("train.backend", _TQ, "another implementation"),
    Rule("train.on_*", _Q, "which updates are left out"),
    Rule("train.*spike_factor", _Q, "which updates are left out"),
    Rule("train.checkpoint_folder", (), "where steps are saved"),
    Rule("train.eval_steps", ("cost",), "held-out rows take time while it trains; not in the steps' times"),
    Rule("train.keep", _Q, "weights of another step"),
    Rule("train.early_*", ("quality", "cost"), "when training ends", settled_by="train:steps"),
    Rule("train.save_*", (), "how often steps are saved and how many stay; not in the steps' times"),
    Rule("train.mesh*", _T, "devices share a step otherwise", settled_by="train:mesh"),
    Rule("train.attention", _T, "another kernel", settled_by="train:attention"),
    Rule("train.remat", _T, "more or less is recomputed", settled_by="train:remat"),
    Rule("train.*", _T, "how a step runs"),
    Rule("export.step", _Q, "weights of another step"),
    Rule("export.merge_into", _Q, "the weights that were trained on, or the base's own"),
    Rule("serve.host", (), "an address"),
    Rule("serve.port", (), "an address"),
    Rule("serve.python", (), "where vLLM is installed; the engine's version says what it is"),
    Rule("serve.start_timeout_s", (), "how long a start may take"),
    Rule("serve.weights", _SQ, "base with adapter, or merged: other work, other rounding"),
    Rule("serve.dtype", _SQ, "other precision"),
    Rule("serve.kv_cache_dtype", _SQ, "half the bytes of the KV cache are read, and rounded"),
    Rule("serve.*", _S, "how the server runs"),
    Rule("bench.timeout_s", (), "when a request counts as lost; those are counted"),
    Rule("bench.slo_*", (), "what counts as good, not how fast it is"),
    Rule("bench.images", _S, "requests with images are embedded too, and are chats"),
    Rule("bench.prompts", (), "each load says how many requests it had"),
    Rule("bench.*", (), "loads are compared one by one, each with its like"),
    Rule("eval.limit*", _Q, "other questions"),
    Rule("eval.concurrency", (), "how fast the questions are asked"),
    Rule("eval.*", _Q, "another way to score"),
    Rule("hardware.*", (), "what was planned for, not what it ran on"),
    Rule("train:stale", KINDS, "made from other settings or records than those there now"),
    Rule("data:stale", _TQ, "made from other settings than those there now"),
    Rule("export:stale", _SQ, "made from other settings or records than those there now"),
    Rule("bench:stale", _S, "made from other settings or records than those there now"),
    Rule("eval:stale", _Q, "made from other settings or records than those there now"),
    Rule("*:stale", (), "no number of it is compared, and a price is a condition of its own"),
    Rule("data:seed", _Q, "other rows, or another order", ("seed",), settled_by=_ROWS),
    Rule("*:seed", _Q, "one seed against another is partly chance", ("seed",)),
    Rule(_ROWS, _TQ, "other packed rows", ("data.*", "seed"), needed=True),
    Rule("data:loss_mask_sha256", _Q, "the loss is over other tokens", ("data.*", "seed"), needed=True),
    Rule("data:loss_mask", _Q, "the loss is over other tokens"),
    Rule("data:checkpoint_sha256", KINDS, "another base", ("checkpoint", "model")),
    Rule("data:template_sha256", _TQ, "other text around the same rows", ("data.template", "checkpoint"), needed=True),
    Rule("data:packing_efficiency", _TQ, "padding takes time and teaches nothing", ("data.*", "seed"), needed=True),
    Rule("data:rows", _TQ, "other rows", ("data.*",)),
    Rule("train:machine", _T, "another machine", ("train:platform",), needed=True),
    Rule("train:mesh", _T, "devices share a step otherwise", ("train.mesh", "train:machine"), needed=True),
    Rule("train:hosts", _T, "another number of hosts", ("train:machine",)),
    Rule("train:attention", _T, "another kernel", ("train.attention", "train:machine", "train.backend")),
    Rule("train:remat", _T, "more or less is recomputed", ("train.remat", "train:machine", "train.backend")),
    Rule("train:base_dtype", _TQ, "other precision", ("train.dtype",)),
    Rule("train:adapted", _TQ, "other modules have adapters", ("lora.targets",), needed=True),
    Rule("train:trained_parameters", _TQ, "more or fewer weights are trained", ("lora.*", "train:adapted")),
    Rule("train:compiled_from_cache", ("cost",), "compiling is part of the hours that are paid"),
    Rule("train:adapter_dtype", _Q, "adapters and moments of other precision"),
    Rule("train:adapter_start", _Q, "adapters start from other values"),
    Rule("train:steps", _Q, "more or fewer updates", ("train.epochs", "train.max_steps", "train.global_batch_size")),
    Rule("train:warmup_steps", _Q, "another schedule", ("optimizer.*", "train.epochs", "train.max_steps")),
    Rule("train:skipped_steps", _Q, "updates were left out", ("train.on_*",)),
    Rule("train:gemsmith", _T, "another Gemsmith"),
    Rule("train:version_*", _T, "another version", ("train.backend",)),
    Rule("bench:machine", _S, "another machine", needed=True),
    Rule("bench:vllm", _S, "another engine, or version of it", needed=True),
    Rule("bench:dtype", _S, "other precision", ("serve.dtype",), needed=True),
    Rule("bench:quantization", _S, "weights of other precision", needed=True),
    Rule("bench:kv_cache_dtype", _S, "KV cache of other precision", ("serve.kv_cache_dtype",), needed=True),
    Rule("bench:tensor_parallel", _S, "devices share the model otherwise", ("bench:machine",)),
    Rule("bench:data_parallel", _S, "another number of copies", ("bench:machine",)),
    Rule("bench:max_model_len", _S, "other room for requests", ("serve.max_model_len",)),
    Rule("bench:chunked_prefill", _S, "another schedule of prompts"),
    Rule("bench:prefix_caching", _S, "repeated prompts may cost nothing", needed=True),
    Rule("bench:kv_cache_tokens", _S, "other room for requests", ("bench:machine", "serve.*")),
    Rule("bench:weights", _S, "base with adapter, or merged", ("serve.weights",)),
    Rule("bench:gemsmith", _S, "another Gemsmith"),
    Rule("eval:vllm", _Q, "another engine, or version of it", needed=True),
    Rule("eval:elsewhere", _Q, "a server answered whose weights were not checked"),
    Rule("eval:dtype", _Q, "other precision", ("serve.dtype",)),
    Rule("eval:kv_cache_dtype", _Q, "KV cache of other precision", ("serve.kv_cache_dtype",), needed=True),
    Rule("eval:quantization", _Q, "weights of other precision", needed=True),
    Rule("eval:*", _Q, "another way to score"),
    Rule("price:*_usd_per_hour", ("cost",), "another price of an hour", ("train:machine", "bench:machine")),
    Rule("price:*", ("cost",), "dollars of another day, region or source"),
    Rule("*", KINDS, "no rule says what it changes, so it may change everything"),
)


def rule_of(condition: str) -> Rule:
    """The first rule whose pattern matches the condition's name; of an unknown name one that confounds everything.

    >>> rule_of("optimizer.beta1").confounds, rule_of("serve.port").confounds
    (('quality',), ())
    """
    return next(rule for rule in RULES if fnmatchcase(condition, rule.pattern))


def follows_from(condition: str, varying: tuple[str, ...]) -> str | None:
    """The one of `varying` that the condition is, or is a consequence of."""
    patterns = (condition, *rule_of(condition).follows)
    return next((name for name in varying if any(fnmatchcase(name, pattern) for pattern in patterns)), None)
