"""Checksums computed on devices are those that numpy finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.checkpoints.steps import checksum
from gemsmith.train.jax.checkpoints import checksums

VALUES = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)


def state_of(**arrays):
    return nnx.State({name: nnx.Param(array) for name, array in arrays.items()})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_arrays_of_every_width_have_the_checksums_of_numpy(dtype):
    array = jnp.asarray(VALUES * 10, dtype)
    assert list(checksums(state_of(one=array)).values()) == [checksum(np.asarray(array))]


def test_a_mesh_changes_no_checksum():
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    split = jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    assert checksums(state_of(one=split)) == checksums(state_of(one=jnp.asarray(VALUES)))


def test_one_bit_or_two_exchanged_values_change_it():
    flipped, exchanged = VALUES.copy(), VALUES.copy()
    flipped.view(np.uint32)[1, 2, 3] ^= 1
    exchanged[0, 0, :2] = exchanged[0, 0, 1::-1]
    found = checksums(state_of(a=jnp.asarray(VALUES), b=jnp.asarray(flipped), c=jnp.asarray(exchanged)))
    assert len(found) == len(set(found.values())) == 3
