"""JAX's splash kernel, interpreted on CPU, against attention in dense blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gemsmith.models.attention import DenseAttention
from gemsmith.models.splash import SplashAttention, _mask, make_kernel

LENGTH = 256


def make_case(heads, kv_heads, head_dim=8):
    random = np.random.default_rng(heads)
    query, key, value, slope = (
        random.standard_normal((2, LENGTH, count, head_dim)).astype(np.float32)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    # The first row: three documents; the second: one, and padding.
    sizes = ((100, 30, 126), (200,))
    segments, positions = np.zeros((2, LENGTH), np.int32), np.zeros((2, LENGTH), np.int32)
    for row, documents in enumerate(sizes):
        start = 0
        for number, size in enumerate(documents, start=1):
            segments[row, start : start + size], positions[row, start : start + size] = number, np.arange(size)
            start += size
    return (query, key, value), slope * (segments > 0)[:, :, None, None], positions, segments


def relative_error(actual, expected):
    return np.linalg.norm(np.asarray(actual) - np.asarray(expected)) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [(4, 2, 64), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 4, None), (2, 1, 40), (4, 1, None)))],
)
def test_the_kernel_attends_as_dense_blocks_do_forward_and_back(heads, kv_heads, window):
    arrays, slope, positions, segments = make_case(heads, kv_heads)

    def dense(*arrays):
        how = DenseAttention(angles=None, positions=positions, segments=segments, window=window)
        return how.attend(*arrays).reshape(slope.shape)

    def splash(*arrays):
        heads_first = (jnp.swapaxes(x, 1, 2) for x in arrays)
        kernel = make_kernel(LENGTH, heads=heads, window=window, interpret=True)
        how = SplashAttention(angles=None, segments=segments, kernel=kernel)
        return how.attend(*heads_first).reshape(slope.shape)

    (expected, pull_expected), (actual, pull_actual) = (jax.vjp(jax.jit(how), *arrays) for how in (dense, splash))
    real = (segments > 0)[:, :, None, None]
    assert relative_error(actual * real, expected * real) < 1e-5
    for ours, theirs in zip(pull_actual(slope), pull_expected(slope), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("window", [None, 5, 8, 20])
def test_masks_know_whole_blocks_as_if_they_had_compared_positions(window):
    mask = _mask(32, window, 1).masks[0]
    distance = np.arange(32)[:, None] - np.arange(32)
    seen = (distance >= 0) & (distance < (window or 32))
    for row, column in np.ndindex(4, 4):
        block = slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8)
        np.testing.assert_array_equal(mask[block], seen[block])
