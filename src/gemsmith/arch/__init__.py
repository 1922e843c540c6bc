"""Facts about Gemma 4: its variants and every weight tensor they have. No machine-learning library is imported."""

from gemsmith.arch.config import PatchProjection, ScanBlocks, Variant, Vision, VisionTower, read_variant
from gemsmith.arch.lora_targets import ALL_LINEAR, VISION, kinds_of, lora_targets, vision_targets
from gemsmith.arch.tensors import LORA_KINDS, Tensor, parameter_count, text_tensors, trained_tensors, vision_tensors
from gemsmith.arch.variants import HUB_ID, VARIANTS, find_variant, variant_of_hub_id

__all__ = [
    "ALL_LINEAR", "HUB_ID", "LORA_KINDS", "VARIANTS", "VISION", "PatchProjection", "ScanBlocks", "Tensor", "Variant",
    "Vision", "VisionTower", "find_variant", "kinds_of", "lora_targets", "parameter_count", "read_variant",
    "text_tensors", "trained_tensors", "variant_of_hub_id", "vision_targets", "vision_tensors",
]  # fmt: skip
