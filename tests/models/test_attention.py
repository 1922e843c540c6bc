from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from gemsmith.models import attention as module
from gemsmith.models.attention import attention, inverse_frequencies
from gemsmith.zoo import find_variant

LENGTH = 37


def make_inputs(dtype=np.float32):
    """Two rows: documents of 20 and 9 then padding, and one document of the whole length."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, LENGTH, heads, 8)).astype(dtype) for heads in (4, 2, 2))
    positions = np.stack([np.r_[0:20, 0:9, [0] * 8], np.arange(LENGTH)])
    segments = np.stack([np.repeat([1, 2, 0], [20, 9, 8]), np.ones(LENGTH, int)])
    return query, key, value, positions, segments


def plain_attention(query, key, value, positions, segments, window):
    """One query at a time, over a list of the keys that it may see."""
    attended = np.zeros_like(query)
    for row, here, head in np.ndindex(query.shape[:3]):
        gap = positions[row, here] - positions[row]
        seen = (segments[row] == segments[row, here]) & (gap >= 0) & (gap < (window or LENGTH))
        scores = key[row, seen, head // 2] @ query[row, here, head]
        weights = np.exp(scores - scores.max())
        attended[row, here, head] = weights @ value[row, seen, head // 2] / weights.sum()
    return attended


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("block", [8, 512])
def test_attention_equals_the_plain_sum_in_blocks_and_whole(monkeypatch, window, block):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    query, key, value, positions, segments = make_inputs()
    actual = jax.jit(partial(attention, positions=positions, segments=segments, window=window))(query, key, value)
    expected = plain_attention(query, key, value, positions, segments, window)
    real = segments > 0
    assert np.abs(actual - expected)[real].max() < 1e-5
    assert np.isfinite(actual).all()


@pytest.mark.parametrize("window", [None, 6])
def test_gradients_in_blocks_equal_those_of_the_whole(monkeypatch, window):
    *tensors, positions, segments = make_inputs()

    def gradients(block):
        monkeypatch.setattr(module, "QUERY_BLOCK", block)

        def total(query, key, value):
            attended = attention(query, key, value, positions=positions, segments=segments, window=window)
            return jnp.sum(jnp.sin(attended) * (segments > 0)[..., None, None])

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*tensors)

    for blocked, whole in zip(gradients(8), gradients(512), strict=True):
        assert np.abs(blocked - whole).max() < 1e-5
        assert np.abs(whole).max() > 0.1


def test_scores_of_all_queries_at_once_never_exist(monkeypatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", 8)
    *tensors, positions, segments = make_inputs()
    whole = 2 * 4 * LENGTH * LENGTH

    def total(*tensors):
        return attention(*tensors, positions=positions, segments=segments, window=None).sum()

    assert largest_size(jax.make_jaxpr(jax.grad(total))(*tensors).jaxpr) < whole


def largest_size(jaxpr):
    """The most elements that any value has, those inside loops and checkpoints too."""
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    return max([*sizes, *(largest_size(inner) for inner in jax.extend.core.subjaxprs(jaxpr))], default=0)


@pytest.mark.parametrize("name", ["gemma4-31b", "tiny-31b"])
def test_frequencies_are_those_of_transformers_to_the_last_bits(name):
    variant = find_variant(name)
    reference = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**variant.to_config()))
    glob = inverse_frequencies(variant.global_head_dim, variant.rope_theta_global, variant.rotary_fraction_global)
    local = inverse_frequencies(variant.head_dim, variant.rope_theta_local, 1.0)
    np.testing.assert_allclose(glob, reference.full_attention_inv_freq.numpy(), rtol=2.4e-7)
    np.testing.assert_allclose(local, reference.sliding_attention_inv_freq.numpy(), rtol=2.4e-7)
    assert np.count_nonzero(glob) == variant.global_head_dim // 8
