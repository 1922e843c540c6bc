"""Bytes that one device needs to serve a model, by formula: weights, keys and values, and one forward pass.

Not calibrated: of no server on a GPU or TPU is there a record yet. Each part is meant as an upper bound, so that what
is said to fit does; vLLM gives all that is left to keys and values.
"""

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from gemsmith.zoo import Tensor, Variant, text_tensors

LOGIT_ROWS = 1024
"""Sequences that vLLM samples for at once at most (vllm/engine/arg_utils.py, get_batch_defaults, 0.32.0)."""
ENCODER_BYTES = 1.2e9
"""Of the largest vision encoder, 27 layers of 1152, in bfloat16; every device may hold all of it."""
_QUANTISED = ("q", "k", "v", "o", "gate", "up", "down", "expert_gate_up", "expert_down")
"""What fp8 holds in a byte a weight; embeddings, norms and the router stay as they are."""


@dataclass(frozen=True, kw_only=True)
class ServingMemory:
    """Bytes on one device, by what they are for."""

    weights: float
    kv_cache: float
    """Of one sequence of the full length: with less, vLLM does not start."""
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
    pictures: bool = False,
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
    return ServingMemory(
        weights=weights + (ENCODER_BYTES if pictures else 0), kv_cache=kv, workspace=activations + logits
    )


@functools.cache
def weights_bytes(variant: Variant, dtype: str) -> float:
    """Of all text weights together."""
    return sum(held_bytes(tensor, dtype) for tensor in text_tensors(variant))


@functools.cache
def kv_bytes(variant: Variant, tp: int, dtype: str, context: int, batched_tokens: int = 0) -> float:
    """Keys and values of one request on one device, with so many tokens behind it and so many prefilled at once."""
    return sum(
        _kv_bytes_per_token(variant, layer, tp, dtype) * length
        for layer, length in _kept(variant, context, batched_tokens)
    )


def kv_bytes_per_token(variant: Variant, tp: int, dtype: str) -> float:
    """What one more token adds on one device before windows are full."""
    return kv_bytes(variant, tp, dtype, 1)


def held_bytes(tensor: Tensor, dtype: str) -> float:
    """Of a weight in memory: fp8 holds projections in a byte each and leaves the others as they are."""
    if dtype == "fp8" and tensor.role in _QUANTISED:
        return tensor.size
    return tensor.size * (4 if dtype == "float32" else 2)


def _kept(variant: Variant, length: int, batched_tokens: int) -> Iterable[tuple[int, int]]:
    """Layers that keep keys and values, and of how many tokens: a sliding window and what is prefilled at once."""
    for layer in range(variant.layers):
        if not variant.shares_kv(layer):
            reach = length if variant.is_global(layer) else min(length, variant.sliding_window + batched_tokens)
            yield layer, reach


def _kv_bytes_per_token(variant: Variant, layer: int, tp: int, dtype: str) -> float:
    """K and V of the heads that one device holds; where V is K's projection vLLM keeps both."""
    heads = max(1, -(-variant.kv_heads_of(layer) // tp))
    return 2 * heads * variant.head_dim_of(layer) * {"fp8": 1, "float32": 4}.get(dtype, 2)
