"""Checksums of trained arrays, computed on their devices: only eight bytes of each tensor leave them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gemsmith.checkpoint.checksums import mix, weigh, write_checksum


def checksums(state: nnx.State) -> dict[str, str]:
    """Path of each array, as Orbax names it -> its checksum, the same on every mesh. All hosts must ask."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        # One at a time: of several programs under way at once, XLA's devices on CPU may each wait for another to join
        # in.
        sums = jax.device_get(_summing(_everywhere(leaf.sharding))(leaf))
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = write_checksum(leaf.dtype, leaf.shape, sums)
    return found


def _everywhere(sharding: Sharding) -> Sharding | None:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@cache
def _summing(sharding: Sharding | None) -> Any:
    return jax.jit(_sums, out_shardings=sharding)


def _sums(array: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").astype(jnp.uint32)
    # From an index of each axis: to flatten the array would move its parts between devices.
    place, stride = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride % 2**32)
        stride *= array.shape[axis]
    mixed = mix(bits, place)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weigh(mixed, place), dtype=jnp.uint32)])
