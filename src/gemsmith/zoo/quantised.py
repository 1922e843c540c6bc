"""How a base of 4 or 8 bits a weight is held: which tensors, in what blocks, and in how many bytes."""

import math

from gemsmith.zoo.tensors import LORA_KINDS, Tensor

KINDS = ("nf4", "int8")
BLOCK = 64
"""Inputs of an output that have one scale in nf4; where they are no multiple of it, the largest number that divides
both."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of nf4."""
ROLES = (*LORA_KINDS, "expert_gate_up", "expert_down")
"""Nearly all that a layer multiplies with. Embeddings, the router, per-layer inputs and norms stay as they are."""


def is_quantised(tensor: Tensor) -> bool:
    """Whether a quantised base holds the tensor as quantised values and scales."""
    return tensor.role in ROLES


def block_of(inputs: int, kind: str) -> int:
    """Inputs of an output that have one scale: in int8 all of them."""
    return math.gcd(inputs, BLOCK) if kind == "nf4" else inputs


def held_bytes(tensor: Tensor, dtype: str) -> float:
    """Of the tensor in a base of `train.dtype`; scales are bfloat16.

    >>> up = Tensor(name="up", shape=(21504, 5376), role="up")
    >>> [8 * held_bytes(up, dtype) / up.size for dtype in ("bfloat16", "nf4")]
    [16.0, 4.25]
    """
    if dtype not in KINDS or not is_quantised(tensor):
        return tensor.size * (4 if dtype == "float32" else 2)
    return tensor.size * ((0.5 if dtype == "nf4" else 1) + 2 / block_of(tensor.shape[-1], dtype))
