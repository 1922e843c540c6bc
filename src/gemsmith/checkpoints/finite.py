"""Weights that are no finite numbers, found by their bits: numpy's isfinite takes ten times as long for bfloat16."""

import math
from collections.abc import Mapping

import numpy as np

from gemsmith.arch import text_tensors
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.safetensors import TensorPlace
from gemsmith.errors import CheckpointError

# Of each dtype: the bits of a number's size, and those from which on it is infinity or NaN.
SIZE_BITS: Mapping[str, tuple[str, int, int]] = {
    "BF16": ("uint16", 0x7FFF, 0x7F80),
    "F16": ("uint16", 0x7FFF, 0x7C00),
    "F32": ("uint32", 0x7FFFFFFF, 0x7F800000),
}
_BLOCK_VALUES = 2**20


def refuse_nonfinite_base(base: Checkpoint, *, consequence: str) -> None:
    """Raises CheckpointError naming the text model's first tensor with NaN or infinity, and its file. Reads all."""
    counts = {tensor.name: count_nonfinite(base.places[tensor.name]) for tensor in text_tensors(base.variant)}
    broken = [name for name, count in counts.items() if count]
    if not broken:
        return
    place, many = base.places[broken[0]], f"; {len(broken)} tensors do" if broken[1:] else ""
    raise CheckpointError(
        f"checkpoint {base.source}: {broken[0]} in {place.file.name} holds NaN or infinity ({counts[broken[0]]:,} of "
        f"{math.prod(place.shape):,} values{many}), so {consequence}"
    )


def count_nonfinite(place: TensorPlace) -> int:
    """How many values of a tensor in BF16, F16 or F32 are NaN or infinity."""
    unsigned, size_bits, infinity = SIZE_BITS[place.dtype]
    values = place.read().view(unsigned).reshape(-1)
    blocks = (values[begin : begin + _BLOCK_VALUES] for begin in range(0, len(values), _BLOCK_VALUES))
    return sum(int(np.count_nonzero((block & size_bits) >= infinity)) for block in blocks)
