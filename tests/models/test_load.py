from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from gemsmith.checkpoint import open_checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.models import Execution, load_model, partition
from gemsmith.models.names import kernel_shape
from gemsmith.models.sharding import AXES, WEIGHTS, axis_size
from gemsmith.zoo import VARIANTS, find_variant, lora_targets, text_tensors


def test_every_tensor_is_read_once_and_lands_turned_and_cast(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-26b-a4b", "bfloat16")))
    read = []

    class Counting:
        folder, variant = checkpoint.folder, checkpoint.variant

        def read(self, name):
            read.append(name)
            return checkpoint.read(name)

    model = load_model(Counting(), dtype="float32", execution=Execution(remat="layer"))
    assert sorted(read) == sorted(tensor.name for tensor in text_tensors(checkpoint.variant))
    assert model.execution.remat == "layer"
    stem = "model.language_model.layers.1."
    number, repeat = next(
        (number, list(layers).index(1)) for number, layers in enumerate(checkpoint.variant.stacks) if 1 in layers
    )
    layer = model.layers[number]
    key, experts = (
        checkpoint.read(stem + name).astype(np.float32) for name in ("self_attn.k_proj.weight", "experts.down_proj")
    )
    np.testing.assert_array_equal(layer.self_attn.k_proj.kernel[repeat], key.T)
    np.testing.assert_array_equal(layer.experts.down_proj[repeat], experts.swapaxes(1, 2))
    np.testing.assert_array_equal(
        model.embed_tokens.embedding[...],
        checkpoint.read("model.language_model.embed_tokens.weight").astype(np.float32),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_a_checkpoint_of_other_shapes_is_refused(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    wider = replace(checkpoint, variant=replace(checkpoint.variant, ffn=checkpoint.variant.ffn * 2))
    with pytest.raises(
        CheckpointError, match=r"layers.0.mlp.down_proj.weight is \[64, 128\], tiny-12b needs \[64, 256\]"
    ):
        load_model(wider, dtype="float32")


def test_a_tensor_that_the_checkpoint_lacks_is_named(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    deeper = replace(checkpoint, variant=replace(checkpoint.variant, layers=6))
    with pytest.raises(CheckpointError, match=r"has no tensor model.language_model.layers.4"):
        load_model(deeper, dtype="float32")


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "sequence": 2, "tp": 8}, {"replica": 2}]
)
def test_every_split_divides_its_dimension(name, sizes):
    variant, mesh = find_variant(name), mesh_of(**sizes)
    for tensor in text_tensors(variant):
        for axes, size in zip(partition(variant, tensor, mesh=mesh), kernel_shape(tensor), strict=False):
            assert size % axis_size(mesh, axes) == 0, tensor.name


@pytest.mark.parametrize(("tp", "global_k"), [(4, "tp"), (8, None)])
def test_k_is_whole_on_every_device_where_tp_does_not_divide_its_heads(tp, global_k):
    variant, mesh = find_variant("gemma4-31b"), mesh_of(tp=tp)
    specs = {
        tensor.name.split("layers.")[-1]: partition(variant, tensor, mesh=mesh) for tensor in lora_targets(variant)
    }
    assert specs["5.self_attn.k_proj.weight"] == PartitionSpec(WEIGHTS, global_k)
    assert specs["4.self_attn.k_proj.weight"] == specs["5.self_attn.q_proj.weight"] == PartitionSpec(WEIGHTS, "tp")
    assert specs["5.self_attn.o_proj.weight"] == specs["5.mlp.down_proj.weight"] == PartitionSpec("tp", WEIGHTS)


def test_a_matrix_is_split_over_fsdp_and_sequence_together_and_whole_on_every_replica():
    variant, mesh = find_variant("gemma4-31b"), mesh_of(replica=2, fsdp=4, sequence=2)
    down = next(tensor for tensor in lora_targets(variant) if tensor.role == "down")
    assert partition(variant, down, mesh=mesh) == PartitionSpec("tp", ("fsdp", "sequence"))
