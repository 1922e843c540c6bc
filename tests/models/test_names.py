import jax.numpy as jnp
import pytest
from flax import nnx

from gemsmith.models import Gemma4, hf_name_of, path_of
from gemsmith.models.names import kernel_shape
from gemsmith.zoo import VARIANTS, find_variant, parameter_count, text_tensors


@pytest.mark.parametrize("name", VARIANTS)
def test_names_and_paths_are_each_others_inverse(name):
    tensors = text_tensors(VARIANTS[name])
    assert [hf_name_of(path_of(tensor)) for tensor in tensors] == [tensor.name for tensor in tensors]


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b"])
def test_the_model_has_exactly_the_zoos_tensors(name):
    variant = find_variant(name)
    model = nnx.eval_shape(lambda: Gemma4(variant, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    shapes = {path: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert shapes == {path_of(tensor): kernel_shape(tensor) for tensor in text_tensors(variant)}
    assert {leaf.dtype for _, leaf in nnx.to_flat_state(nnx.state(model))} == {jnp.dtype("bfloat16")}
    count = sum(leaf.size for _, leaf in nnx.to_flat_state(nnx.state(model)))
    assert count == parameter_count(text_tensors(variant))


def test_an_adapted_projection_has_hfs_name_and_a_kernel_in_by_out():
    tensor = next(tensor for tensor in text_tensors(find_variant("gemma4-31b")) if tensor.name.endswith("layers.5.mlp.down_proj.weight"))
    assert path_of(tensor) == ("layers", 5, "mlp", "down_proj", "kernel")
    assert kernel_shape(tensor) == (21_504, 5376)
