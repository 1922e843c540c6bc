"""What one training step has to do and to hold, by formula, from the zoo's tensors. No ML library is imported."""

from gemsmith.hardware.model.memory import (
    Memory,
    choose_remat,
    held_on_cpu,
    memory_of,
    micro_batches,
    parts_of,
    rows_per_device,
    tokens_per_device,
    weight_shards,
)
from gemsmith.hardware.model.work import ImageWork, Work, attended_pairs, images_of, on_chips, work_of

__all__ = [
    "ImageWork",
    "Memory",
    "Work",
    "attended_pairs",
    "choose_remat",
    "held_on_cpu",
    "memory_of",
    "micro_batches",
    "on_chips",
    "parts_of",
    "images_of",
    "rows_per_device",
    "tokens_per_device",
    "weight_shards",
    "work_of",
]
