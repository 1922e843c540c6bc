"""What JAX and Qwix still do otherwise than the models need. Where a test fails, upstream has changed: drop its row
in docs/upstream.md, and the code that it names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.models.splash import make_kernel


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:1]), ("fsdp",))


def test_jax_gives_a_uint4_a_byte_on_cpu():
    assert jnp.zeros((64, 8), jnp.uint4).on_device_size_in_bytes() == 64 * 8


def test_jax_refuses_uint4_on_a_mesh_once_compiled(mesh):
    """Once it takes them, quantized values can be a QArray of Qwix."""
    values = jax.device_put(jnp.zeros((64, 8), jnp.uint4), NamedSharding(mesh, PartitionSpec()))
    compiled = jax.jit(lambda x: x.astype(jnp.float32)).lower(values).compile()
    with pytest.raises(ValueError, match="layouts"):
        compiled(values)


def test_qwix_looks_nf4_up_in_a_table():
    """Once it does not, `dequantize` can be Qwix's own."""
    array = qwix.quantize(jnp.ones((128, 8)), "nf4", tiled_axes={0: 64})
    assert "gather" in str(jax.make_jaxpr(qwix.dequantize)(array))


def test_jax_multiplies_every_row_by_every_expert_on_cpu():
    rows, experts, loads = jnp.ones((64, 8)), jnp.ones((16, 8, 4)), jnp.full(16, 4, jnp.int32)
    compiled = jax.jit(jax.lax.ragged_dot).lower(rows, experts, loads).compile()
    assert compiled.cost_analysis()["flops"] >= 16 * (2 * 64 * 8 * 4)


def test_jax_compares_the_positions_of_blocks_that_are_seen_whole():
    compared = []
    mask = masks.CausalMask((256, 256))
    of_pairs = mask.mask_function
    mask.mask_function = lambda queries, keys: compared.append((queries.size, keys.size)) or of_pairs(queries, keys)
    assert mask[128:256, 0:128].all()
    assert compared == [(128, 128)]


def test_jax_does_not_say_over_which_axes_splash_attention_varies(mesh):
    kernel, heads = make_kernel(128, heads=1, window=None, interpret=True), jnp.ones((1, 128, 128))
    spec = PartitionSpec()
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(ValueError, match="check_vma"):
        sharded(heads, heads, heads)
