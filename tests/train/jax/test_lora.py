from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from gemsmith.arch import LORA_KINDS, VARIANTS, find_variant, lora_targets
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.errors import RecipeError
from gemsmith.models import Execution, abstract_model, load_model
from gemsmith.models.sharding import AXES
from gemsmith.recipe.schema import Lora
from gemsmith.train.inputs import first_pair
from gemsmith.train.jax.backend import adapted_model
from gemsmith.train.jax.lora import add_adapters
from gemsmith.train.jax.mesh import make_mesh

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-12b")


def make_abstract(variant, execution=None):
    """The variant's model with shapes for weights."""
    return abstract_model(variant, dtype=jnp.bfloat16, execution=execution)


def flat_adapters(model):
    return dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))


@pytest.fixture(scope="module")
def small(small_checkpoint):
    checkpoint = open_checkpoint(str(small_checkpoint))
    return checkpoint.variant, load_model(checkpoint, abstract_model(checkpoint.variant, dtype="bfloat16"))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kinds", [LORA_KINDS, ("k", "down")])
def test_exactly_the_targets_of_the_zoo_are_adapted(name, kinds):
    variant = find_variant(name)
    model = add_adapters(make_abstract(variant), variant, Lora(rank=4, targets=kinds), seed=0)
    adapters = flat_adapters(model)
    modules = {path[:-1]: leaf.shape[0] for path, leaf in adapters.items()}
    assert len(adapters) == 2 * len(modules) and sum(modules.values()) == len(lora_targets(variant, kinds)), (
        "one for every layer of a stack"
    )
    assert {leaf.get_value().dtype for leaf in adapters.values()} == {jnp.dtype("float32")}


def test_the_31b_has_468_million_adapter_parameters_without_a_weight_in_memory():
    """Known from the tensors: 60 layers, rank 64, V on 50 of them."""
    variant = VARIANTS["gemma4-31b"]
    small_31b = replace(variant, layers=6)
    model = add_adapters(make_abstract(small_31b), small_31b, Lora(rank=64), seed=0)
    size = sum(leaf.get_value().size for leaf in flat_adapters(model).values())
    assert size * 10 == sum(64 * sum(target.shape) for target in lora_targets(variant))


def test_adapters_are_float32_over_a_bfloat16_base_and_start_as_pefts_do(small):
    variant, base = small
    model = add_adapters(base, variant, Lora(rank=4), seed=3)
    for path, leaf in flat_adapters(model).items():
        value = np.asarray(leaf[...])
        assert value.dtype == np.float32
        if path[-1] == "kernel_lora_b":
            assert not value.any()
        else:
            bound = 1 / np.sqrt(value.shape[1])
            assert np.abs(value).max() <= bound and value.std() == pytest.approx(bound / np.sqrt(3), rel=0.2)


def tensor_of(name):
    return next(
        tensor for tensor in lora_targets(find_variant("gemma4-31b")) if tensor.name.endswith(f"layers.{name}.weight")
    )


def test_a_wide_start_is_uniform():
    """peft: kaiming_uniform_(A, a=sqrt(5)), which is uniform in ±1/sqrt(in)."""
    start = first_pair(tensor_of("0.mlp.up_proj"), 64, seed=0).a * np.sqrt(5376)
    assert -1 <= start.min() < -0.99 and 0.99 < start.max() <= 1
    np.testing.assert_allclose(np.histogram(start, bins=10)[0] / start.size, 0.1, atol=0.01)


def test_a_modules_start_does_not_depend_on_what_else_is_adapted(small):
    variant, base = small
    all_kinds, only_up = (
        flat_adapters(add_adapters(base, variant, Lora(rank=4, targets=kinds), seed=3))
        for kinds in (LORA_KINDS, ("up",))
    )
    path = ("layers", 1, "mlp", "up_proj", "kernel_lora_a")
    assert (all_kinds[path][...] == only_up[path][...]).all()
    here, above = (tensor for tensor in lora_targets(variant, ("up",)))
    assert (all_kinds[path][0] == first_pair(above, 4, 3).a.T).all()
    for other in (first_pair(here, 4, 3), first_pair(above, 4, 4)):
        assert (all_kinds[path][0] != other.a.T).any()


def test_each_layer_of_a_stack_has_its_own_start():
    variant = find_variant("tiny-31b")
    graph, state = nnx.split(make_abstract(variant))
    zeros = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))
    adapters = flat_adapters(add_adapters(zeros, variant, Lora(rank=4, targets=("q",)), seed=0))
    for number, layers in enumerate(variant.stacks):
        stack = adapters["layers", number, "self_attn", "q_proj", "kernel_lora_a"][...]
        names = [f"layers.{layer}.self_attn.q_proj.weight" for layer in layers]
        tensors = [next(tensor for tensor in lora_targets(variant) if tensor.name.endswith(name)) for name in names]
        np.testing.assert_array_equal(stack, np.stack([first_pair(tensor, 4, 0).a.T for tensor in tensors]))


def test_the_base_keeps_its_weights_and_its_output(small):
    variant, base = small
    inputs = (jnp.arange(108, 118)[None], jnp.arange(10)[None], jnp.ones((1, 10), jnp.int32))
    adapted = add_adapters(base, variant, Lora(rank=4), seed=0)
    assert not flat_adapters(base)
    weights = dict(nnx.to_flat_state(nnx.state(adapted, nnx.Not(nnx.LoRAParam))))
    for path, leaf in nnx.to_flat_state(nnx.state(base)):
        assert weights[path][...] is leaf[...]
    np.testing.assert_array_equal(base(*inputs), adapted(*inputs))


def test_a_kind_that_does_not_exist_is_refused_with_the_near_one(small):
    variant, base = small
    with pytest.raises(RecipeError, match=r"lora.targets: 'gates' matches nothing \(did you mean gate\?\)"):
        add_adapters(base, variant, Lora(targets=("gates",)), seed=0)


def test_the_model_of_a_recipe_runs_as_the_recipe_says(small_recipe, small_checkpoint):
    checkpoint = open_checkpoint(str(small_checkpoint))
    recipe = small_recipe(train={"remat": ["q", "attended"]})
    model = adapted_model(recipe, checkpoint, make_mesh(recipe, checkpoint.variant))
    assert model.execution.remat == ("q", "attended") and model.execution.attention == "dense"
    assert len(flat_adapters(model)) == 26


@pytest.mark.parametrize(
    ("sizes", "a", "b"),
    [
        # up: A (32, R), B (R, 64). Beside the axis that it shares with its kernel, a matrix lies over what splits the
        # kernel's other one.
        ((1, 2, 1, 2), P(None, ("fsdp", "sequence"), None), P(None, None, ("tp", "fsdp", "sequence"))),
        ((1, 2, 2, 1), P(None, ("fsdp", "sequence"), None), P(None, None, ("tp", "fsdp", "sequence"))),
    ],
)
def test_adapters_are_split_like_their_kernels(sizes, a, b):
    variant, mesh = find_variant("tiny-31b"), jax.sharding.AbstractMesh(sizes, AXES)
    model = make_abstract(variant, Execution(mesh=mesh))
    adapters = flat_adapters(add_adapters(model, variant, Lora(rank=4, targets=("up",)), seed=0))
    specs = {path[-1]: leaf.get_value().sharding.spec for path, leaf in adapters.items()}
    assert specs == {"kernel_lora_a": a, "kernel_lora_b": b}
