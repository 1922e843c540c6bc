"""Heads: QK-norm and RoPE."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from gemsmith.arch import find_variant
from gemsmith.models.attention import inverse_frequencies, make_heads
from tiny_checkpoints import text_config


@pytest.mark.parametrize("name", ["gemma4-31b", "tiny-31b"])
def test_frequencies_are_those_of_transformers_to_the_last_bits(name):
    variant = find_variant(name)
    reference = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**text_config(variant)))
    glob = inverse_frequencies(variant.global_head_dim, variant.rope_theta_global, variant.rotary_fraction_global)
    local = inverse_frequencies(variant.head_dim, variant.rope_theta_local, 1.0)
    np.testing.assert_allclose(glob, reference.full_attention_inv_freq.numpy(), rtol=2.4e-7)
    np.testing.assert_allclose(local, reference.sliding_attention_inv_freq.numpy(), rtol=2.4e-7)
    assert np.count_nonzero(glob) == variant.global_head_dim // 8


def test_a_heads_norm_does_not_depend_on_the_rows_beside_it():
    """Bit for bit: attention on queries of norm 1 makes 6e-5 of a gradient of the last bit here."""
    x = np.random.default_rng(0).standard_normal((16, 128, 64)).astype(np.float32)
    heads = jax.jit(lambda x: make_heads(x, 16, weight=jnp.ones(16), angles=None, eps=1e-6))
    assert np.array_equal(heads(x)[:4], heads(x[:4]))
