"""Several hosts, each with some of the devices: how they meet, what each reads of a batch, and what they must agree on.

Only the first host writes records and logs; a step's metrics, and so every decision that follows from them, are the same on all.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gemsmith.data import Batch
from gemsmith.data.pack import ARRAYS

Shapes = dict[str, jax.ShapeDtypeStruct]


def is_first_host() -> bool:
    return jax.process_index() == 0


def local_rows(like: jax.ShapeDtypeStruct) -> list[int]:
    """The rows of a batch that the devices of this host hold, in order."""
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    return sorted({row for index in indices for row in range(*index[0].indices(like.shape[0]))})


def place_batch(batch: Batch, rows: Sequence[int], shapes: Shapes) -> dict[str, jax.Array]:
    """The batch's arrays over the devices of all hosts. `batch` holds only the rows that `rows` numbers: those of this host's devices."""
    places = {row: place for place, row in enumerate(rows)}
    return {name: _place_rows(getattr(batch, name), places, shapes[name]) for name in ARRAYS}


def place_number(value: float, like: jax.ShapeDtypeStruct) -> jax.Array:
    """An array that is this number on all devices of this host."""
    filled = np.full(like.shape, value, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: filled[index])


def _place_rows(array: np.ndarray, places: dict[int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        chosen = [places[row] for row in range(*index[0].indices(like.shape[0]))]
        return array[chosen][:, *index[1:]].astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, part)
