import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gemsmith.recipe.schema import Optimizer
from gemsmith.train.jax.step import clip_as_torch, make_optimizer

SHAPES = {"a": (7, 3), "b": (3, 5)}


def make_tree(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {name: (scale * random.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 10.0])
def test_clipping_is_torchs(scale):
    grads = make_tree(0, scale)
    weights = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for name, weight in weights.items():
        weight.grad = torch.tensor(grads[name])
    torch.nn.utils.clip_grad_norm_(weights.values(), 1e-6 if scale < 1e-6 else 0.5)
    clipped, _ = clip_as_torch(1e-6 if scale < 1e-6 else 0.5).update(jax.tree.map(jnp.asarray, grads), None)
    for name, weight in weights.items():
        np.testing.assert_allclose(clipped[name], weight.grad.numpy(), rtol=1e-6)


def test_the_1e_6_of_torchs_clipping_is_kept():
    """At a norm of 1e-6 it halves the gradient, where Optax's clip would leave it."""
    clipped, _ = clip_as_torch(1e-6).update({"a": jnp.array([1e-6])}, None)
    assert clipped["a"][0] == pytest.approx(0.5e-6, rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.7])
def test_thirty_updates_are_torchs_adamw(max_grad_norm):
    settings = Optimizer(weight_decay=0.1, max_grad_norm=max_grad_norm, beta1=0.9, beta2=0.999, epsilon=1e-8)
    weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in make_tree(1, 1e-3).items()}
    torch_optimizer = torch.optim.AdamW(weights.values(), lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    params, transformation = jax.tree.map(jnp.asarray, make_tree(1, 1e-3)), make_optimizer(settings)
    state = transformation.init(params)
    for step in range(30):
        rate, grads = 1e-2 * step / 30, make_tree(100 + step)
        for name, weight in weights.items():
            weight.grad = torch.tensor(grads[name])
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(weights.values(), max_grad_norm)
        torch_optimizer.param_groups[0]["lr"] = rate
        torch_optimizer.step()
        updates, state = transformation.update(jax.tree.map(jnp.asarray, grads), state, params, learning_rate=rate)
        params = jax.tree.map(jnp.add, params, updates)
    for name, weight in weights.items():
        moved = weight.detach().numpy() - make_tree(1, 1e-3)[name]
        assert np.linalg.norm(params[name] - weight.detach().numpy()) < 2e-6 * np.linalg.norm(moved)
