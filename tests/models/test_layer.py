"""What a layer is made of, each part against numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gemsmith.arch import find_variant
from gemsmith.models.layers import MLP, RMSNorm, Router

VARIANT = replace(find_variant("tiny-26b-a4b"), embed_dim=16, experts=6, experts_per_token=2)
X = np.random.default_rng(0).standard_normal((1, 5, 16)).astype(np.float32)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.fixture
def router():
    router = Router(VARIANT, dtype=jnp.float32)
    router.proj.kernel.set_value(jnp.asarray(random(16, 6)))
    return router


def test_the_router_takes_the_top_experts_and_their_weights_add_up_to_1(router):
    weights, experts = jax.jit(router)(X)
    normed = X / np.sqrt(np.square(X).mean(axis=-1, keepdims=True) + VARIANT.rms_eps) / 4  # sqrt(16)
    expected = np.argsort(-(normed @ np.asarray(router.proj.kernel[...])), axis=-1)[..., :2]
    assert experts.tolist() == expected.tolist()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)


def test_each_experts_own_factor_comes_after_that(router):
    before, experts = jax.jit(router)(X)
    factors = np.arange(1, 7, dtype=np.float32)
    router.per_expert_scale.set_value(jnp.asarray(factors))
    after, same = router(jnp.asarray(X))  # not compiled: jax.jit(router) would give what it gave before
    assert experts.tolist() == same.tolist()
    np.testing.assert_allclose(after, before * factors[np.asarray(experts)], rtol=1e-6)


@pytest.mark.parametrize("isolates_matmuls", [True, False])
def test_the_mlp_is_down_of_gelu_of_gate_times_up(isolates_matmuls):
    mlp = MLP(16, 24, dtype=jnp.float32, isolates_matmuls=isolates_matmuls)
    gate, up, down = random(16, 24), random(24, 16).T, random(24, 16)
    for name, kernel in {"gate": gate, "up": up, "down": down}.items():
        getattr(mlp, f"{name}_proj").kernel.set_value(jnp.asarray(kernel))
    expected = gelu(X @ gate) * (X @ up) @ down
    np.testing.assert_allclose(jax.jit(mlp)(X), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_gives_the_dtype_that_it_was_given():
    norm = RMSNorm(16, eps=VARIANT.rms_eps, dtype=jnp.bfloat16)
    norm.weight.set_value(jnp.asarray(np.full(16, 2, jnp.bfloat16)))
    normed = jax.jit(norm)(X.astype(jnp.bfloat16))
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.sqrt(np.square(np.asarray(normed, np.float32)).mean(axis=-1)), 2, rtol=1e-2)
