"""A projection and its adapter as one matmul give what they give apart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.arch import Variant
from gemsmith.models import Execution, abstract_model, token_nll
from gemsmith.recipe.backends import Optimizations
from gemsmith.recipe.schema import Lora
from gemsmith.train.jax.lora import add_adapters
from gemsmith.train.jax.upstream import fused_lora_matmul, set_dropout

# q, gate and up are wider than their input, o and down narrower, k and v as wide or narrower.
VARIANT = Variant(
    name="odd", layers=4, global_every=2, embed_dim=16, ffn=32, heads=4, kv_heads=1, global_kv_heads=1, head_dim=8,
    global_head_dim=16,
    sliding_window=4, vocabulary=64,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
INPUTS = (TOKENS, np.broadcast_to(np.arange(12), (2, 12)), np.ones((2, 12), int))


def make_model(*, fuses, dropout=0.0, dtype=jnp.float32, variant=VARIANT):
    execution = Execution(optimizations=Optimizations(fuses_lora=fuses), remat=("lora",))
    graph, state = nnx.split(abstract_model(variant, dtype=dtype, execution=execution))
    random = np.random.default_rng(0)
    base = nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0.1, 0.2, x.shape), x.dtype), state))
    model = add_adapters(base, variant, Lora(rank=2, alpha=3.0, dropout=dropout), seed=0)
    nnx.update(
        model,
        jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype), nnx.state(model, nnx.LoRAParam)),
    )
    return model


def loss_of(graph, trained, frozen, keys):
    model = nnx.merge(graph, trained, frozen)
    set_dropout(model, keys)
    return token_nll(model, model.hidden(*INPUTS), TOKENS, np.ones_like(TOKENS, bool))[0]


def gradients(model, keys):
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss, grads = jax.jit(jax.value_and_grad(lambda trained: loss_of(graph, trained, frozen, keys)))(trained)
    return loss, dict(nnx.to_flat_state(grads))


def paths_of(model):
    return sorted({path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}, key=str)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_loss_and_gradients_are_those_of_the_two_matmuls(dropout):
    apart, joined = (make_model(fuses=fuses, dropout=dropout) for fuses in (False, True))
    paths = paths_of(apart) if dropout else []
    keys = {path: jax.random.split(jax.random.key(number), (2, len(TOKENS))) for number, path in enumerate(paths)}
    (loss, expected), (found_loss, found) = gradients(apart, keys), gradients(joined, keys)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for path, leaf in expected.items():
        assert np.abs(leaf[...]).max() > 0, path
        error = np.linalg.norm(found[path][...] - leaf[...]) / np.linalg.norm(leaf[...])
        assert error < 5e-5, path


def random_arrays(*shapes):
    return [
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(jax.random.key(0), len(shapes)), shapes, strict=True)
    ]


def assert_same_gradients(ours, theirs, *given):
    """Of a random combination of what they return."""

    def combined(function, *given):
        results = jax.tree.leaves(function(*given))
        return sum(
            (weights * result).sum()
            for weights, result in zip(random_arrays(*(each.shape for each in results)), results, strict=True)
        )

    for function in (combined, jax.grad(combined, argnums=range(1, 1 + len(given)))):
        for found, expected in zip(*(jax.tree.leaves(function(each, *given)) for each in (ours, theirs)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_joined_sum_has_the_gradients_of_the_sum():
    assert_same_gradients(
        fused_lora_matmul, lambda x, u, w, b: x @ w + u @ b, *random_arrays((2, 5, 8), (2, 5, 3), (8, 16), (3, 16))
    )


def traced(model):
    graph, state = nnx.split(model)
    return str(jax.make_jaxpr(lambda state: nnx.merge(graph, state).hidden(*INPUTS))(state))


def count_joined(model):
    return traced(model).count("name=fused_lora_matmul")


def test_only_what_is_wider_than_its_input_is_joined():
    """In two kinds of layers: q, gate and up of each, or q alone."""
    assert count_joined(make_model(fuses=True)) == 6
    assert count_joined(make_model(fuses=True, variant=replace(VARIANT, ffn=16))) == 2
    assert count_joined(make_model(fuses=False)) == 0


def test_a_bfloat16_base_with_float32_adapters_is_not_joined():
    """Joined, the base would be made float32, which takes its memory twice again."""
    assert count_joined(make_model(fuses=True, dtype=jnp.bfloat16)) == 0


def test_what_a_makes_has_the_name_by_which_remat_keeps_it():
    for fuses in (False, True):
        model = make_model(fuses=fuses)
        assert traced(model).count("name=lora") == len(paths_of(model))
