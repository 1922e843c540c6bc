"""What stands between a product and a sum on CPU changes no value, and is nothing on TPU."""

import jax
import jax.numpy as jnp
import numpy as np

from gemsmith.models.rounding import rounded

VALUES = np.array([1.5, -0.0, 3e38, 1e-45, np.inf, -np.inf, np.nan], np.float32)


def test_values_and_gradients_stay_as_they_are():
    for way in (rounded, jax.jit(rounded), jax.vmap(rounded), jax.checkpoint(rounded)):
        np.testing.assert_array_equal(np.asarray(way(VALUES)).view(np.int32), VALUES.view(np.int32))
    assert rounded(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    gradient = jax.jit(lambda slope: jax.vjp(rounded, VALUES)[1](slope)[0])(VALUES)
    np.testing.assert_array_equal(np.asarray(gradient).view(np.int32), VALUES.view(np.int32))


def test_it_is_an_operation_on_cpu_alone():
    traced = jax.jit(rounded).trace(VALUES)
    assert "stablehlo.compare" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in ("tpu", "cuda"):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo." not in lowered and "call" not in lowered


def test_a_product_is_rounded_before_it_is_added_to():
    """(1 + e)² - 1 - 2e is e², of which nothing is left once the square is rounded; XLA alone rounds the sum only."""
    small = np.full(64, 2.0**-13, np.float32)

    def rest(guard):
        step = jax.jit(lambda small: guard((1 + small) * (1 + small)) - (1 + 2 * small))
        return np.asarray(step.lower(small).compile(compiler_options={"xla_backend_optimization_level": 3})(small))

    assert not np.any(rest(rounded))
    assert np.all(rest(lambda square: square) == 2.0**-26)
