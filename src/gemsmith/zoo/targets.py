"""Which matrices get an adapter, by the kinds that lora.targets names."""

from collections.abc import Sequence

from gemsmith.errors import RecipeError, nearest
from gemsmith.zoo.tensors import LORA_KINDS, Tensor, text_tensors
from gemsmith.zoo.variant import Variant
from gemsmith.zoo.vision import VisionTower
from gemsmith.zoo.vision_tensors import vision_tensors

VISION = "vision"
"""The kind of all projections of a vision tower's layers, and of the one from its width to the text model's."""
ALL_KINDS = (*LORA_KINDS, VISION)


def lora_targets(variant: Variant, kinds: Sequence[str] = LORA_KINDS) -> list[Tensor]:
    """The matrices that get an adapter, each [out, in]: K of K = V layers among them, experts and router not.

    Raises RecipeError for a kind that does not exist, or none at all, or kinds of which the variant has no matrix.
    """
    for kind in kinds:
        if kind not in ALL_KINDS:
            near = nearest(kind.rpartition(".")[2].removesuffix("_proj"), ALL_KINDS)  # PEFT's name is self_attn.q_proj
            raise RecipeError(f"lora.targets: {kind!r} matches nothing{near}; allowed: {', '.join(ALL_KINDS)}")
    if not kinds:
        raise RecipeError(f"lora.targets is empty, so nothing would be trained; allowed: {', '.join(ALL_KINDS)}")
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


def kinds_of(variant: Variant) -> tuple[str, ...]:
    """The kinds that lora.targets may name for this variant."""
    return ALL_KINDS if isinstance(variant.vision, VisionTower) else LORA_KINDS
