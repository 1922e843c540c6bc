"""Facts about Gemma 4: its variants and every weight tensor they have. No machine-learning library is imported."""

from gemsmith.zoo.gemma4 import VARIANTS, find_variant, variant_of_hub_id
from gemsmith.zoo.targets import ALL_LINEAR, VISION, kinds_of, lora_targets, vision_targets
from gemsmith.zoo.tensors import LORA_KINDS, Tensor, parameter_count, text_tensors
from gemsmith.zoo.variant import ScanBlocks, Variant, read_variant
from gemsmith.zoo.vision import PatchProjection, Vision, VisionTower
from gemsmith.zoo.vision_tensors import class_names, name_in_files, vision_tensors

__all__ = [
    "ALL_LINEAR",
    "LORA_KINDS",
    "VARIANTS",
    "VISION",
    "PatchProjection",
    "ScanBlocks",
    "Tensor",
    "Variant",
    "Vision",
    "VisionTower",
    "class_names",
    "find_variant",
    "kinds_of",
    "lora_targets",
    "name_in_files",
    "parameter_count",
    "read_variant",
    "text_tensors",
    "variant_of_hub_id",
    "vision_targets",
    "vision_tensors",
]
