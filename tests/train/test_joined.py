"""A projection and its adapter as one matmul give what they give apart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.models import Execution, abstract_model, token_nll
from gemsmith.recipe import Lora
from gemsmith.train.joined import joined_matmul
from gemsmith.train.lora import add_adapters
from gemsmith.train.upstream import set_dropout
from gemsmith.zoo import Variant

# q, gate and up are wider than their input, o and down narrower, k and v as wide or narrower.
VARIANT = Variant(
    name="odd", layers=4, global_every=2, hidden=16, ffn=32, heads=4, kv_heads=1, global_kv_heads=1, head_dim=8, global_head_dim=16,
    sliding_window=4, vocabulary=64,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
INPUTS = (TOKENS, np.broadcast_to(np.arange(12), (2, 12)), np.ones((2, 12), int))


def make_model(*, joins, dropout=0.0, dtype=jnp.float32, variant=VARIANT):
    execution = Execution(joins_adapters=joins, remat=("lora",))
    graph, state = nnx.split(abstract_model(variant, dtype=dtype, execution=execution))
    random = np.random.default_rng(0)
    base = nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(random.normal(0.1, 0.2, x.shape), x.dtype), state))
    model = add_adapters(base, variant, Lora(rank=2, alpha=3.0, dropout=dropout), seed=0)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype), nnx.state(model, nnx.LoRAParam)))
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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_loss_and_gradients_are_those_of_the_two_matmuls(dropout):
    apart, joined = (make_model(joins=joins, dropout=dropout) for joins in (False, True))
    paths = paths_of(apart) if dropout else []
    keys = {path: jax.random.split(jax.random.key(number), 2) for number, path in enumerate(paths)}
    (loss, expected), (found_loss, found) = gradients(apart, keys), gradients(joined, keys)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for path, leaf in expected.items():
        assert np.abs(leaf[...]).max() > 0, path
        error = np.linalg.norm(found[path][...] - leaf[...]) / np.linalg.norm(leaf[...])
        assert error < 5e-5, path


def test_every_gradient_is_that_of_the_sum():
    keys = jax.random.split(jax.random.key(0), 5)
    x, u, w, b = (jax.random.normal(key, shape) for key, shape in zip(keys, [(2, 5, 8), (2, 5, 3), (8, 16), (3, 16)], strict=False))
    weights = jax.random.normal(keys[4], (2, 5, 16))

    def joined(*given):
        return (weights * joined_matmul(*given)).sum()

    def apart(x, u, w, b):
        return (weights * (x @ w + u @ b)).sum()

    for ours, theirs in zip(*(jax.grad(each, argnums=(0, 1, 2, 3))(x, u, w, b) for each in (joined, apart)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def traced(model):
    graph, state = nnx.split(model)
    return str(jax.make_jaxpr(lambda state: nnx.merge(graph, state).hidden(*INPUTS))(state))


@pytest.mark.parametrize(("variant", "count"), [(VARIANT, 6), (replace(VARIANT, ffn=16), 2)])
def test_only_what_is_wider_than_its_input_is_joined(variant, count):
    """Two kinds of layers: q, gate and up of each, or q alone."""
    assert traced(make_model(joins=True, variant=variant)).count("name=joined_matmul") == count
    assert "name=joined_matmul" not in traced(make_model(joins=False, variant=variant))


def test_a_bfloat16_base_with_float32_adapters_is_not_joined():
    """Joined, the base would be made float32, which takes its memory twice again."""
    assert "name=joined_matmul" not in traced(make_model(joins=True, dtype=jnp.bfloat16))


def test_what_a_makes_has_the_name_by_which_remat_keeps_it():
    for joins in (False, True):
        model = make_model(joins=joins)
        assert traced(model).count("name=lora") == len(paths_of(model))
