"""Which matrices get an adapter, by the kinds that lora.targets names."""

from collections.abc import Sequence

from gemsmith.errors import RecipeError, nearest
from gemsmith.zoo.tensors import LORA_KINDS, Tensor, text_tensors
from gemsmith.zoo.variant import Variant
from gemsmith.zoo.vision import VisionTower
from gemsmith.zoo.vision_tensors import vision_tensors

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
            near = nearest(kind.rpartition(".")[2].removesuffix("_proj"), allowed)  # PEFT's name is self_attn.q_proj
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
    """The modules with an adapter that embed pictures. Raises RecipeError as lora_targets."""
    embedding = {tensor.module for tensor in vision_tensors(variant)}
    return embedding & {target.module for target in lora_targets(variant, kinds)}


def kinds_of(variant: Variant) -> tuple[str, ...]:
    """The kinds that lora.targets may name for this variant."""
    return ALL_KINDS if isinstance(variant.vision, VisionTower) else LORA_KINDS
