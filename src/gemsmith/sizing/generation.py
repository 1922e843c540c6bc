"""Seconds of serving by formula: a prompt's prefill, and a decode step that gives each request under way one token.

Both are a roofline: the longer of bytes through HBM and FLOPs, and what devices send each other beside it.
"""

import functools
from dataclasses import dataclass

from gemsmith.hardware import Machine
from gemsmith.sizing.pictures import Pictures
from gemsmith.sizing.serving import held_bytes, kv_bytes, kv_bytes_per_token
from gemsmith.sizing.work import attended_pairs
from gemsmith.zoo import Variant, text_tensors

SUMS_PER_LAYER = 2
"""All-reduces of tensor parallel: after attention and after the FFN."""
_EXPERTS = ("expert_gate_up", "expert_down")
_LOOKED_UP = "per_layer_embed"
"""Of which a token reads a row; the embedding matrix is read whole, as the head."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model on `tp` devices of a machine, in these dtypes."""

    variant: Variant
    machine: Machine
    tp: int
    weight_dtype: str
    kv_dtype: str

    @property
    def peak_flops_per_s(self) -> float:
        """Of all tp devices; fp8 weights are multiplied in bfloat16, float32 ones at half."""
        chip = self.machine.chip
        return chip.flops_per_s / chip.devices * self.tp * (0.5 if self.weight_dtype == "float32" else 1.0)

    @property
    def hbm_bytes_per_s(self) -> float:
        """Of one device."""
        return self.machine.chip.hbm_bytes_per_s / self.machine.chip.devices


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
    read = (plain + _touched_experts(variant, requests) * experts) / served.tp
    read += requests * kv_bytes(variant, served.tp, served.kv_dtype, int(context))
    return Roofline(
        hbm_s=read / served.hbm_bytes_per_s,
        matmul_s=2 * requests * _parameters_met(variant) / served.peak_flops_per_s,
        interconnect_s=_sums_s(served, requests),
    )


def prefill(served: Served, tokens: int, pictures: Pictures | None = None) -> Roofline:
    """A prompt of so many tokens, alone, soft tokens among them; its weights are read once.

    vLLM does not split the tower (gemma4_mm.py, 0.32.0): every device embeds all of the prompt's pictures, before the
    text model begins.
    """
    variant = served.variant
    # The head is asked for the last token only.
    flops = 2 * tokens * (_parameters_met(variant) - variant.vocabulary * variant.embed_dim)
    flops += _attention_flops(variant, tokens)
    weights = sum(_read_bytes(variant, served.weight_dtype)) - _head_bytes(variant, served.weight_dtype)
    read = weights / served.tp + tokens * kv_bytes_per_token(variant, served.tp, served.kv_dtype)
    if pictures is not None:
        flops += served.tp * pictures.row_flops
        read += pictures.parameters * (4.0 if served.weight_dtype == "float32" else 2.0)
    return Roofline(
        hbm_s=read / served.hbm_bytes_per_s,
        matmul_s=flops / served.peak_flops_per_s,
        interconnect_s=_sums_s(served, tokens),
    )


def least_token_s(variant: Variant, machine: Machine) -> float:
    """Seconds that a token of a prompt takes at the least: its matmuls at the bfloat16 peak of all of the machine.

    Without attention, and without layers that take others' keys and values: a server may leave those out for all but
    the last token.
    """
    met = _parameters_met(variant, tuple(layer for layer in range(variant.layers) if variant.shares_kv(layer)))
    return 2 * (met - variant.vocabulary * variant.embed_dim) / (machine.chip.flops_per_s * machine.chips)


def _sums_s(served: Served, tokens: float) -> float:
    """Each sum sends and receives the residual stream once around the devices."""
    speed = served.machine.interconnect_bytes_per_s
    if served.tp == 1 or speed is None:
        return 0.0
    variant, share = served.variant, 2 * (served.tp - 1) / served.tp
    width = variant.embed_dim * (4 if served.weight_dtype == "float32" else 2)
    return SUMS_PER_LAYER * variant.layers * share * tokens * width / (speed / served.machine.chip.devices)


@functools.cache
def _read_bytes(variant: Variant, dtype: str) -> tuple[float, float]:
    """The weights that a step reads whole, and those of all experts."""
    plain = experts = 0.0
    for tensor in text_tensors(variant):
        if tensor.role in _EXPERTS:
            experts += held_bytes(tensor, dtype)
        elif tensor.role != _LOOKED_UP:
            plain += held_bytes(tensor, dtype)
    return plain, experts


def _head_bytes(variant: Variant, dtype: str) -> float:
    return variant.vocabulary * variant.embed_dim * (4.0 if dtype == "float32" else 2.0)


@functools.cache
def _attention_flops(variant: Variant, tokens: int) -> int:
    """Forward, each token with those before it in its reach."""
    return sum(
        4
        * variant.heads
        * variant.head_dim_of(layer)
        * attended_pairs(tokens, None if variant.is_global(layer) else variant.sliding_window, "flash")
        for layer in range(variant.layers)
    )


def _touched_experts(variant: Variant, tokens: float) -> float:
    """The share of the experts that so many tokens are sent to, each evenly."""
    return 1 - (1 - variant.experts_per_token / variant.experts) ** tokens if variant.experts else 0.0


@functools.cache
def _parameters_met(variant: Variant, without: tuple[int, ...] = ()) -> float:
    """Weights that one token is multiplied with, `without` those of some layers."""
    share = variant.experts_per_token / variant.experts if variant.experts else 0.0
    return sum(
        tensor.size * (share if tensor.role in _EXPERTS else 1)
        for tensor in text_tensors(variant)
        if tensor.role != _LOOKED_UP and tensor.layer not in without
    )
