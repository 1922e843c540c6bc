"""What one training step has to do and to hold, by formula, from the zoo's tensors. No ML library is imported."""

from gemsmith.sizing.memory import Memory, memory_of, rows_per_device, tokens_per_device, weight_shards
from gemsmith.sizing.remat import choose_remat
from gemsmith.sizing.work import Attention, Remat, Work, attended_pairs, attention_on, work_of

__all__ = [
    "Attention",
    "Memory",
    "Remat",
    "Work",
    "attended_pairs",
    "attention_on",
    "choose_remat",
    "memory_of",
    "rows_per_device",
    "tokens_per_device",
    "weight_shards",
    "work_of",
]
