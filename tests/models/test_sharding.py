"""How arrays lie on a mesh."""

import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from gemsmith.arch import VARIANTS, find_variant, lora_targets, text_tensors
from gemsmith.models.sharding import AXES, WEIGHTS, axis_size, kernel_shape, partition


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "sequence": 2, "tp": 8}, {"replica": 2}]
)
def test_every_split_divides_its_dimension(sizes):
    mesh = mesh_of(**sizes)
    for variant in VARIANTS.values():
        for tensor in text_tensors(variant):
            for axes, size in zip(partition(variant, tensor, mesh=mesh), kernel_shape(tensor), strict=False):
                assert size % axis_size(mesh, axes) == 0, (variant.name, tensor.name)


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
