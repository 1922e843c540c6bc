"""What serving takes by formula: bytes that one device needs, seconds of a prompt and of a token.

Bytes are not calibrated: of no server on a GPU or TPU is there a record yet. Each part is meant as an upper bound, so
that what is said to fit does; vLLM gives all that is left to keys and values.

A prompt's prefill and a decode step, which gives each request under way one token, are rooflines: the longer of bytes
through HBM and FLOPs, and what devices send each other beside it.
"""

import functools
from dataclasses import asdict, dataclass

from gemsmith.arch import Variant, text_tensors
from gemsmith.arch.lora_targets import disk_bytes
from gemsmith.arch.tensors import EXPERTS
from gemsmith.hardware import Machine
from gemsmith.hardware.model.work import ImageWork, forward_attention_flops

LOGIT_ROWS = 1024
"""Sequences that vLLM samples for at once at most (vllm/engine/arg_utils.py, get_batch_defaults, 0.32.0)."""
ENCODER_BYTES = 1.2e9  # of the largest vision encoder, 27 layers of 1152, in bfloat16; every device may hold all of it
SUMS_PER_LAYER = 2  # all-reduces of tensor parallel: after attention and after the FFN
_LOOKED_UP = "per_layer_embed"  # of which a token reads a row; the embedding matrix is read whole, as the head


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on one device, by what they are for."""

    weights: float
    kv_cache: float  # of one sequence of the full length: with less, vLLM does not start
    workspace: float

    @property
    def total(self) -> int:
        return int(sum(asdict(self).values()))


def serving_memory(
    variant: Variant,
    *,
    tp: int,
    max_model_len: int,
    weight_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    batched_tokens: int = 8192,
    images: bool = False,
) -> ServingMemory:
    """What one of `tp` devices holds that serve the text model together.

    Dtypes are bfloat16, float32 or fp8. A kv head that tp does not split is held by several devices.
    """
    weights = weights_bytes(variant, weight_dtype) / tp
    kv = kv_bytes(variant, tp, kv_dtype, max_model_len, batched_tokens)
    compute_bytes = 4 if weight_dtype == "float32" else 2
    # A layer's widest results, gate and up, beside the residual stream; experts run for as many as a token is sent to.
    widest = 2 * max(variant.ffn_of(layer) for layer in range(variant.layers))
    widest += 2 * variant.experts_per_token * variant.expert_ffn
    activations = batched_tokens * (widest / tp + 4 * variant.embed_dim) * compute_bytes
    logits = 2 * LOGIT_ROWS * variant.vocabulary * 4 / tp
    weights += ENCODER_BYTES if images else 0
    return ServingMemory(weights=weights, kv_cache=kv, workspace=activations + logits)


@functools.cache
def weights_bytes(variant: Variant, dtype: str) -> float:
    return sum(disk_bytes(tensor, dtype) for tensor in text_tensors(variant))


@functools.cache
def kv_bytes(variant: Variant, tp: int, dtype: str, context: int, batched_tokens: int = 0) -> float:
    """Keys and values of one request on one device, with so many tokens behind it and so many prefilled at once."""
    held = 0.0
    for layer in range(variant.layers):
        if not variant.shares_kv(layer):
            length = context if variant.is_global(layer) else min(context, variant.sliding_window + batched_tokens)
            heads = max(1, -(-variant.kv_heads_of(layer) // tp))
            # Where V is K's projection vLLM keeps both.
            held += 2 * heads * variant.head_dim_of(layer) * {"fp8": 1, "float32": 4}.get(dtype, 2) * length
    return held


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model on `tp` devices of a machine, in these dtypes."""

    variant: Variant
    machine: Machine
    tp: int
    weight_dtype: str
    kv_dtype: str

    @property
    def value_bytes(self) -> int:
        """Of an activation, and of a weight that is not fp8."""
        return 4 if self.weight_dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds by what takes them; `matmul_s` at the whole peak."""

    hbm_s: float
    matmul_s: float
    interconnect_s: float


def decode_step(served: Served, *, requests: float, context: float) -> Roofline:
    """One token for each of the requests, which have `context` tokens each."""
    variant = served.variant
    plain, experts = _read_bytes(variant, served.weight_dtype)
    # The share of the experts that so many tokens are sent to, each evenly.
    touched = 1 - (1 - variant.experts_per_token / variant.experts) ** requests if variant.experts else 0.0
    read = (plain + touched * experts) / served.tp
    read += requests * kv_bytes(variant, served.tp, served.kv_dtype, int(context))
    return _roofline(served, read, 2 * requests * _parameters_met(variant), requests)


def prefill(served: Served, tokens: int, images: ImageWork | None = None) -> Roofline:
    """A prompt of so many tokens, alone, soft tokens among them; its weights are read once.

    vLLM does not split the tower (gemma4_mm.py, 0.32.0): every device embeds all images of the prompt first.
    """
    variant = served.variant
    # The head is asked for the last token only.
    head = variant.vocabulary * variant.embed_dim
    flops = 2 * tokens * (_parameters_met(variant) - head) + forward_attention_flops(variant, tokens)
    weights = sum(_read_bytes(variant, served.weight_dtype)) - head * served.value_bytes
    read = weights / served.tp + tokens * kv_bytes(variant, served.tp, served.kv_dtype, 1)
    if images is not None:
        flops += served.tp * images.row_flops
        read += images.parameters * served.value_bytes
    return _roofline(served, read, flops, tokens)


def least_token_s(variant: Variant, machine: Machine) -> float:
    """Seconds that a token of a prompt takes at the least: its matmuls at the bfloat16 peak of all of the machine.

    Without attention and layers that take others' keys and values, which a server needs for the last token alone.
    """
    met = _parameters_met(variant, tuple(layer for layer in range(variant.layers) if variant.shares_kv(layer)))
    return 2 * (met - variant.vocabulary * variant.embed_dim) / (machine.chip.flops_per_s * machine.chips)


def _roofline(served: Served, read: float, flops: float, tokens: float) -> Roofline:
    """Of bytes that each device reads and FLOPs of all; each sum sends the residual stream once around the devices."""
    variant, machine, chip = served.variant, served.machine, served.machine.chip
    # Weights in fp8 are multiplied in bfloat16, those in float32 at half.
    peak_flops_per_s = chip.flops_per_s / chip.devices * served.tp * (0.5 if served.weight_dtype == "float32" else 1.0)
    sums_s = 0.0
    if served.tp > 1 and machine.interconnect_bytes_per_s is not None:
        share, width = 2 * (served.tp - 1) / served.tp, variant.embed_dim * served.value_bytes
        moved = SUMS_PER_LAYER * variant.layers * share * tokens * width
        sums_s = moved / (machine.interconnect_bytes_per_s / chip.devices)
    hbm_s = read / (chip.hbm_bytes_per_s / chip.devices)
    return Roofline(hbm_s=hbm_s, matmul_s=flops / peak_flops_per_s, interconnect_s=sums_s)


@functools.cache
def _read_bytes(variant: Variant, dtype: str) -> tuple[float, float]:
    """The weights that a step reads whole, and those of all experts."""
    tensors = text_tensors(variant)
    plain = sum(disk_bytes(tensor, dtype) for tensor in tensors if tensor.role not in (*EXPERTS, _LOOKED_UP))
    return plain, sum(disk_bytes(tensor, dtype) for tensor in tensors if tensor.role in EXPERTS)


@functools.cache
def _parameters_met(variant: Variant, without: tuple[int, ...] = ()) -> float:
    """Weights that one token is multiplied with, `without` those of some layers."""
    share = variant.experts_per_token / variant.experts if variant.experts else 0.0
    return sum(
        tensor.size * (share if tensor.role in EXPERTS else 1)
        for tensor in text_tensors(variant)
        if tensor.role != _LOOKED_UP and tensor.layer not in without
    )
