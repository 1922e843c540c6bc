import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from gemsmith.checkpoint import open_checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.models import load_model, partition
from gemsmith.models.names import kernel_shape
from gemsmith.zoo import VARIANTS, find_variant, lora_targets, text_tensors


def test_every_tensor_is_read_once_and_lands_turned_and_cast(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-26b-a4b", "bfloat16")))
    read = []

    class Counting:
        folder, variant = checkpoint.folder, checkpoint.variant

        def read(self, name):
            read.append(name)
            return checkpoint.read(name)

    model = load_model(Counting(), dtype="float32", remat="layer")
    assert sorted(read) == sorted(tensor.name for tensor in text_tensors(checkpoint.variant))
    assert model.remat == "layer"
    stem = "model.language_model.layers.1."
    np.testing.assert_array_equal(
        model.layers[1].self_attn.k_proj.kernel[...], checkpoint.read(f"{stem}self_attn.k_proj.weight").astype(np.float32).T
    )
    np.testing.assert_array_equal(
        model.layers[1].experts.down_proj[...], checkpoint.read(f"{stem}experts.down_proj").astype(np.float32).swapaxes(1, 2)
    )
    np.testing.assert_array_equal(
        model.embed_tokens.embedding[...], checkpoint.read("model.language_model.embed_tokens.weight").astype(np.float32)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_a_checkpoint_of_other_shapes_is_refused(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    wider = replace(checkpoint, variant=replace(checkpoint.variant, ffn=checkpoint.variant.ffn * 2))
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.gate_proj.weight is \[128, 64\], tiny-12b needs \[256, 64\]"):
        load_model(wider, dtype="float32")


def test_a_tensor_that_the_checkpoint_lacks_is_named(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    deeper = replace(checkpoint, variant=replace(checkpoint.variant, layers=6))
    with pytest.raises(CheckpointError, match=r"has no tensor model.language_model.layers.4"):
        load_model(deeper, dtype="float32")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("fsdp", "tp"), [(4, 1), (1, 4), (2, 2), (2, 8)])
def test_every_split_divides_its_dimension(name, fsdp, tp):
    variant, mesh = find_variant(name), AbstractMesh((fsdp, tp), ("fsdp", "tp"))
    for tensor in text_tensors(variant):
        for axis, size in zip(partition(variant, tensor, mesh=mesh), kernel_shape(tensor), strict=False):
            assert axis is None or size % mesh.shape[axis] == 0, tensor.name


@pytest.mark.parametrize(("tp", "global_k"), [(4, "tp"), (8, None)])
def test_k_is_whole_on_every_device_where_tp_does_not_divide_its_heads(tp, global_k):
    variant, mesh = find_variant("gemma4-31b"), AbstractMesh((1, tp), ("fsdp", "tp"))
    specs = {tensor.name.split("layers.")[-1]: partition(variant, tensor, mesh=mesh) for tensor in lora_targets(variant)}
    assert specs["5.self_attn.k_proj.weight"] == PartitionSpec("fsdp", global_k)
    assert specs["4.self_attn.k_proj.weight"] == specs["5.self_attn.q_proj.weight"] == PartitionSpec("fsdp", "tp")
    assert specs["5.self_attn.o_proj.weight"] == specs["5.mlp.down_proj.weight"] == PartitionSpec("tp", "fsdp")


SHARDED = """
import jax, numpy as np, sys
from flax import nnx
from gemsmith.checkpoint import open_checkpoint
from gemsmith.models import load_model

checkpoint = open_checkpoint(sys.argv[1])
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tp"))
model, sharded = load_model(checkpoint, dtype="float32"), load_model(checkpoint, dtype="float32", mesh=mesh)
tokens = np.random.default_rng(0).integers(0, 1024, (2, 80))
inputs = (tokens, np.broadcast_to(np.arange(80), (2, 80)), np.ones_like(tokens))
run = nnx.jit(type(model).__call__)
error = np.abs(np.asarray(run(model, *inputs)) - np.asarray(run(sharded, *inputs))).max()
assert error < 1e-4, error
kernel = sharded.layers[0].mlp.gate_proj.kernel[...]
assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 2, kernel.shape[1] // 2), kernel.sharding
"""


def test_a_model_on_four_devices_has_its_parts_and_the_same_logits(tiny_checkpoint):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED, str(tiny_checkpoint("tiny-12b"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
