"""A checkpoint as training held it: with the weights that it trained, or those that a quantized base stands for.

Computed as gemsmith.models.quantization and bitsandbytes do, bit for bit, and without either, on whatever machine they
ran: no quotient of two bfloat16 lies within 2e-7 of the middle between two levels of nf4, and in int8 the middle is
compared without division.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from gemsmith.arch import text_tensors
from gemsmith.arch.lora_targets import KINDS, LEVELS, block_of, is_quantized
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.safetensors import FLOATS, TensorPlace, numpy_dtype
from gemsmith.errors import CheckpointError
from gemsmith.recipe.schema import Train

_LEVELS = np.array(LEVELS, np.float32)
_MIDPOINTS = ((np.array(LEVELS[1:]) + np.array(LEVELS[:-1])) / 2).astype(np.float32)


def as_trained(base: Checkpoint, train: Train) -> Checkpoint:
    """The base whose places read what training held of it; the base itself where it was not quantized.

    Scales are those before train.double_quant rounds them, which only losses are then compared with.
    """
    if train.dtype not in KINDS:
        return base
    places = dict(base.places)
    for tensor in filter(is_quantized, text_tensors(base.variant)):
        place = places[tensor.name]
        places[tensor.name] = replace(place, held=partial(_dequantized_rows, place, train.dtype))
    return replace(base, places=places)


def with_trained(base: Checkpoint, weights: Mapping[str, np.ndarray]) -> Checkpoint:
    """The base whose places read those weights, by name, instead. Raises CheckpointError where they do not fit it."""
    places = dict(base.places)
    for name, value in weights.items():
        place = places.get(name)
        if place is None or place.shape != value.shape or place.dtype not in FLOATS:
            found = "is missing" if place is None else f"is {place.dtype} {list(place.shape)}"
            raise CheckpointError(f"checkpoint {base.folder}: {name} {found}; was trained: {list(value.shape)}")
        places[name] = replace(place, held=partial(_trained_rows, place, value))
    return replace(base, places=places)


def _dequantized_rows(place: TensorPlace, kind: str, rows: slice) -> np.ndarray:
    return dequantized(place.rows(rows), kind=kind)


def _trained_rows(place: TensorPlace, weights: np.ndarray, rows: slice) -> np.ndarray:
    """Rows of what was trained, rounded to the file's dtype."""
    with np.errstate(over="ignore"):  # float16 overflows to infinity, which the merge refuses
        return weights.reshape(place.matrix)[rows].astype(numpy_dtype(place.dtype))


def dequantized(weight: np.ndarray, *, kind: str) -> np.ndarray:
    """What is left of weights (…, in) once they were quantized from bfloat16, and dequantized to it, in their dtype."""
    blocks = weight.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, block_of(weight.shape[-1], kind))
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = (largest if kind == "nf4" else largest / np.float32(127)).astype(ml_dtypes.bfloat16).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)
    if kind == "nf4":
        number, scaled = np.zeros(blocks.shape, np.uint8), blocks / divisor
        for midpoint in _MIDPOINTS:  # ten times as fast as np.searchsorted
            number += scaled > midpoint
        levels = _LEVELS[number]
    else:
        size = np.abs(blocks)
        low = np.floor(size / divisor)
        levels = np.sign(blocks) * np.minimum(low + (size > (low + np.float32(0.5)) * divisor), 127)
    return (levels * scale).astype(ml_dtypes.bfloat16).reshape(weight.shape).astype(weight.dtype)
