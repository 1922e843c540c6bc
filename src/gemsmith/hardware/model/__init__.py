"""What one training step has to do and to hold, by formula, from the zoo's tensors. No ML library is imported."""

from gemsmith.hardware.model.memory import (
    Memory,
    choose_remat,
    held_on_cpu,
    memory_breakdown,
    memory_of,
    micro_batches,
    rows_per_device,
    tokens_per_device,
    weight_shards,
)
from gemsmith.hardware.model.work import ImageWork, StepCost, forward_attention_flops, images_of, on_chips, step_cost

__all__ = [
    "ImageWork", "Memory", "StepCost", "choose_remat", "forward_attention_flops", "held_on_cpu", "images_of",
    "memory_breakdown", "memory_of", "micro_batches", "on_chips", "rows_per_device", "step_cost", "tokens_per_device",
    "weight_shards",
]  # fmt: skip
