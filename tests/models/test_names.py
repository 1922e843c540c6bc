import jax.numpy as jnp
import pytest
from flax import nnx

from gemsmith.arch import VARIANTS, find_variant, parameter_count, text_tensors, vision_tensors
from gemsmith.models import abstract_model, by_path
from gemsmith.models.sharding import kernel_shape, path_of
from tiny_checkpoints import with_vision


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_paths_are_each_others_inverse(name):
    variant = VARIANTS[name]
    stacks = by_path(variant)
    found = [tensor.name for tensors in stacks.values() for tensor in tensors]
    assert sorted(found) == sorted(tensor.name for tensor in (*text_tensors(variant), *vision_tensors(variant)))
    assert all(path == path_of(variant, tensor) for path, tensors in stacks.items() for tensor in tensors)
    for tensors in stacks.values():
        layers = [tensor.layer for tensor in tensors]
        assert layers == [None] or layers == sorted(set(layers))


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b"])
@pytest.mark.parametrize("vision", [False, True])
def test_the_model_has_exactly_the_zoos_tensors(name, vision):
    variant = with_vision(find_variant(name))
    tensors = [*text_tensors(variant), *(vision_tensors(variant) if vision else [])]
    model = abstract_model(variant, dtype=jnp.bfloat16, vision=vision)
    leaves = [(path, leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))]
    expected = {}
    for tensor in tensors:
        repeats = () if tensor.layer is None else (len(by_path(variant)[path_of(variant, tensor)]),)
        expected[path_of(variant, tensor)] = (*repeats, *kernel_shape(tensor))
    assert {path: leaf.shape for path, leaf in leaves} == expected
    assert {leaf.dtype for _, leaf in leaves} == {jnp.dtype("bfloat16")}
    assert sum(leaf.size for _, leaf in leaves) == parameter_count(tensors)


def test_an_adapted_projection_has_hfs_name_and_a_kernel_in_by_out():
    variant = find_variant("gemma4-31b")
    tensor = next(tensor for tensor in text_tensors(variant) if tensor.name.endswith("layers.17.mlp.down_proj.weight"))
    path = path_of(variant, tensor)
    assert path == ("layers", 5, "mlp", "down_proj", "kernel")
    assert kernel_shape(tensor) == (21_504, 5376)
    assert by_path(variant)[path][2] == tensor
