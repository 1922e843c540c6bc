"""The kernel that cuts, norms and rotates heads, interpreted on CPU, against the plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gemsmith.models.attention import inverse_frequencies, make_heads, rope
from gemsmith.models.splash import make_heads_first

LENGTH, EPS = 256, 1e-6


def make_case(heads, head_dim, dtype, *, weighted, rotated):
    random = np.random.default_rng(heads)
    x, slope = (
        jnp.asarray(random.standard_normal(shape), dtype)
        for shape in ((2, LENGTH, heads * head_dim), (2, LENGTH, heads, head_dim))
    )
    positions = jnp.asarray(random.integers(0, 5000, (2, LENGTH)))
    weight = jnp.asarray(random.standard_normal(head_dim), dtype) if weighted else None
    return (
        x,
        slope,
        {"weight": weight, "angles": rope(positions, inverse_frequencies(head_dim, 1e4, 0.5)) if rotated else None},
    )


def relative_error(actual, expected):
    difference, expected = (jnp.linalg.norm(x.astype(jnp.float32)) for x in (actual - expected, expected))
    return float(difference / expected)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(jnp.float32, 3e-7), pytest.param(jnp.bfloat16, 1e-4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("heads", "head_dim", "weighted", "rotated"),
    [
        (heads, head_dim, weighted, rotated)
        if (head_dim == 8) == (not rotated)
        else pytest.param(heads, head_dim, weighted, rotated, marks=pytest.mark.slow)
        for weighted, rotated in ((True, True), (True, False), (False, False))
        for heads, head_dim in ((4, 8), (6, 256), (2, 512))
    ],
)
def test_heads_and_their_gradients_are_those_of_the_plain_functions(heads, head_dim, dtype, bound, weighted, rotated):
    x, slope, how = make_case(heads, head_dim, dtype, weighted=weighted, rotated=rotated)
    plain = jax.jit(lambda x: make_heads(x, head_dim, eps=EPS, **how))
    kernel = jax.jit(lambda x: jnp.swapaxes(make_heads_first(x, head_dim, eps=EPS, interpret=True, **how), 1, 2))
    (expected, pull_expected), (actual, pull_actual) = jax.vjp(plain, x), jax.vjp(kernel, x)
    assert relative_error(actual, expected) < bound
    assert relative_error(pull_actual(slope)[0], pull_expected(slope)[0]) < bound


def test_rows_that_are_no_multiple_of_a_block_are_cut_in_smaller_ones():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((1, 640, 16)), jnp.float32)
    expected = make_heads(x, 8, weight=None, angles=None, eps=EPS)
    actual = jnp.swapaxes(make_heads_first(x, 8, weight=None, angles=None, eps=EPS, interpret=True), 1, 2)
    assert relative_error(actual, expected) < 3e-7
