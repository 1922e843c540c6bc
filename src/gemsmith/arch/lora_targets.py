"""Which matrices get an adapter, by the kinds that lora.targets names, and how a base of 4 or 8 bits is held."""

import math
from collections.abc import Sequence

from gemsmith.arch.config import Variant, VisionTower
from gemsmith.arch.tensors import EXPERTS, LORA_KINDS, Tensor, text_tensors, vision_tensors
from gemsmith.errors import RecipeError, suggest

VISION = "vision"
"""The kind of all projections of a vision tower's layers, and of the one from its width to the text model's."""
ALL_LINEAR = "all-linear"
"""PEFT's name for every linear layer but the output's: of the text model also those of per-layer inputs and the router,
and all that embeds images, the projection of patches among them. Experts are none: they are no linear layers there."""
ALL_KINDS = (*LORA_KINDS, VISION)
_LINEAR = (*ALL_KINDS, "per_layer_projection", "per_layer_gate", "per_layer_out", "router", "vision_patch")


def lora_targets(variant: Variant, kinds: Sequence[str] = LORA_KINDS) -> list[Tensor]:
    """The matrices that get an adapter, each [out, in]: K of K = V layers among them, experts not.

    Raises RecipeError for a kind that does not exist, or none at all, or kinds of which the variant has no matrix.
    """
    allowed = (*ALL_KINDS, ALL_LINEAR)
    for kind in kinds:
        if kind not in allowed:
            near = suggest(kind.rpartition(".")[2].removesuffix("_proj"), allowed)  # PEFT's name is self_attn.q_proj
            raise RecipeError(f"lora.targets: {kind!r} matches nothing{near}; allowed: {', '.join(allowed)}")
    if not kinds:
        raise RecipeError(f"lora.targets is empty, so nothing would be trained; allowed: {', '.join(allowed)}")
    if ALL_LINEAR in kinds:
        return [tensor for tensor in (*text_tensors(variant), *vision_tensors(variant)) if tensor.role in _LINEAR]
    if VISION in kinds and not isinstance(variant.vision, VisionTower):
        raise RecipeError(f"lora.targets: {variant.name} has no vision tower; take {VISION} out")
    targets = [tensor for tensor in text_tensors(variant) if tensor.role in kinds]
    targets += [tensor for tensor in vision_tensors(variant) if tensor.role == VISION and VISION in kinds]
    if not targets:
        raise RecipeError(
            f"lora.targets: {variant.name} has no matrix of {', '.join(kinds)}, so nothing would be trained; add "
            "another kind"
        )
    return targets


def vision_targets(variant: Variant, kinds: Sequence[str]) -> set[str]:
    """The modules with an adapter that embed images. Raises RecipeError as lora_targets."""
    embedding = {tensor.module for tensor in vision_tensors(variant)}
    return embedding & {target.module for target in lora_targets(variant, kinds)}


def kinds_of(variant: Variant) -> tuple[str, ...]:
    """The kinds that lora.targets may name for this variant."""
    return ALL_KINDS if isinstance(variant.vision, VisionTower) else LORA_KINDS


KINDS = ("nf4", "int8")
BLOCK = 64  # inputs of an output that have one scale in nf4; else the largest number that divides both
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of nf4."""
ROLES = (*LORA_KINDS, *EXPERTS)
"""Nearly all that a layer multiplies with. Embeddings, the router, per-layer inputs and norms stay as they are."""


def is_quantized(tensor: Tensor) -> bool:
    """Whether a quantized base holds the tensor as quantized values and scales."""
    return tensor.role in ROLES


def block_of(inputs: int, kind: str) -> int:
    """Inputs of an output that have one scale: in int8 all of them."""
    return math.gcd(inputs, BLOCK) if kind == "nf4" else inputs


def disk_bytes(tensor: Tensor, dtype: str) -> float:
    """Of the tensor in a base of `train.dtype`, whose scales are bfloat16, or served in fp8, a byte a weight.

    >>> up = Tensor(name="up", shape=(21504, 5376), role="up")
    >>> [8 * disk_bytes(up, dtype) / up.size for dtype in ("bfloat16", "nf4")]
    [16.0, 4.25]
    """
    if dtype not in (*KINDS, "fp8") or not is_quantized(tensor):
        return tensor.size * (4 if dtype == "float32" else 2)
    if dtype == "fp8":
        return tensor.size
    return tensor.size * ((0.5 if dtype == "nf4" else 1) + 2 / block_of(tensor.shape[-1], dtype))
