"""A checksum of a tensor's bits, computed where its parts are, split over devices and hosts, or from numpy.

    mixed = mix(bits, place)    sums modulo 2**32 over all places: mixed, and mixed · (2 place + 1)

For a given place, mix is a bijection of the bits and 2 place + 1 is odd, so one value that has changed always changes
both sums. As its place goes in, so do values that have changed places. Sums of integers do not depend on their order,
hence not on the mesh.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# The finalizer of MurmurHash3: https://github.com/aappleby/smhasher/blob/master/src/MurmurHash3.cpp
_FACTORS = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_SHIFTS = np.uint32(16), np.uint32(13), np.uint32(16)
_OF_PLACE = np.uint32(0x9E3779B1)
# Temporaries of these stay in a core's cache.
_VALUES_AT_ONCE = 2**16


def mix(bits: Any, place: Any) -> Any:
    """Both uint32, arrays of numpy or of JAX."""
    mixed = bits ^ (place * _OF_PLACE)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def weigh(mixed: Any, place: Any) -> Any:
    return mixed * (place * np.uint32(2) + np.uint32(1))


def write_checksum(dtype: Any, shape: Sequence[int], sums: Sequence[int]) -> str:
    """The checksum as it is saved, such as `float32[2,384,16] 0c8ae1f09b22d7e4`."""
    first, second = (int(total) % 2**32 for total in sums)
    return f"{dtype}[{','.join(map(str, shape))}] {first:08x}{second:08x}"


def checksum(array: np.ndarray) -> str:
    """The checksum of an array of numpy, of 1, 2 or 4 bytes a value."""
    words = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    first = second = 0
    for begin in range(0, len(words), _VALUES_AT_ONCE):
        bits = words[begin : begin + _VALUES_AT_ONCE].astype(np.uint32)
        place = np.arange(begin, begin + len(bits), dtype=np.uint64).astype(np.uint32)
        mixed = mix(bits, place)
        first += int(mixed.sum(dtype=np.uint64))
        second += int(weigh(mixed, place).sum(dtype=np.uint64))
    return write_checksum(array.dtype, array.shape, (first, second))
