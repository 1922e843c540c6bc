import itertools
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from gemsmith.models import attention as module
from gemsmith.models.attention import DenseAttention
from gemsmith.recipe.backends import ATTENDED, QUERY_BLOCKS

LENGTH = 37


def attention(query, key, value, **how):
    return DenseAttention(angles=None, **how).attend(query, key, value).reshape(query.shape)


def make_inputs(dtype=np.float32):
    """Two rows: documents of 20 and 9 then padding, and one document of the whole length."""
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, LENGTH, heads, 8)).astype(dtype) for heads in (4, 2, 2))
    positions = np.stack([np.r_[0:20, 0:9, [0] * 8], np.arange(LENGTH)])
    segments = np.stack([np.repeat([1, 2, 0], [20, 9, 8]), np.ones(LENGTH, int)])
    return query, key, value, positions, segments


def make_spans():
    """In the first row an image of 13 tokens, and another with the same number in the next document; in the second two
    side by side."""
    spans = np.zeros((2, LENGTH), int)
    spans[0, 4:17], spans[0, 20:24] = 1, 1
    spans[1, 8:21], spans[1, 21:34] = 1, 2
    return spans


def plain_mask(positions, segments, window, spans=None):
    """Which keys each token sees, (B, L, L), one pair at a time."""
    seen = np.zeros((2, LENGTH, LENGTH), bool)
    for row, here, there in np.ndindex(seen.shape):
        gap = positions[row, here] - positions[row, there]
        of_one_image = spans is not None and spans[row, here] == spans[row, there] != 0
        seen[row, here, there] = (
            segments[row, here] == segments[row, there]
            and gap < (window or LENGTH)
            and (gap >= 0 or bool(of_one_image))
        )
    return seen


def plain_attention(query, key, value, seen):
    """All scores at once, (B, H, L, L)."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.where(seen[:, None], jnp.einsum("blhd,bmhd->bhlm", query, key), -jnp.inf)
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, axis=-1), value)


def in_blocks(monkeypatch, block):
    monkeypatch.setitem(QUERY_BLOCKS, "cpu", block)


# Of 2 queries, blocks share loops; of 8, the last is padded; one of 64 holds the whole row.
@pytest.mark.parametrize(
    ("with_spans", "window", "block"),
    [
        *itertools.product((False, True), (None, 6), (8,)),
        (True, 6, 64),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((False, True), (None, 6), (2,))),
        *(pytest.param(*case, 64, marks=pytest.mark.slow) for case in ((False, None), (False, 6), (True, None))),
    ],
)
def test_attention_and_its_gradients_are_those_of_the_plain_sum(monkeypatch, block, window, with_spans):
    in_blocks(monkeypatch, block)
    *tensors, positions, segments = make_inputs()
    spans = make_spans() if with_spans else None
    seen = plain_mask(positions, segments, window, spans)
    weights = np.random.default_rng(1).standard_normal(tensors[0].shape) * (segments > 0)[..., None, None]
    marks = {
        "positions": positions,
        "segments": segments,
        "window": window,
        "image_blocks": spans,
        "max_image_tokens": 13,
    }

    @partial(jax.jit, static_argnums=0)
    def value_and_gradients(attend, *tensors):
        attended, backward = jax.vjp(attend, *tensors)
        return attended, backward(jnp.asarray(weights, attended.dtype))

    attended, gradients = value_and_gradients(partial(attention, **marks), *tensors)
    expected, expected_gradients = value_and_gradients(partial(plain_attention, seen=seen), *tensors)
    assert np.isfinite(attended).all()
    assert np.abs(attended - expected)[segments > 0].max() < 1e-5
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert np.abs(gradient - reference).max() < 1e-5
        assert np.abs(reference).max() > 0.1


def test_a_image_of_the_most_tokens_is_seen_whole_by_its_first_token_and_by_its_last_as_far_as_the_window():
    length, place = 3000, 700
    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.standard_normal((1, length, 1, 4)), jnp.float32) for _ in range(3))
    spans = np.zeros((1, length), int)
    spans[0, place : place + module.MAX_IMAGE_TOKENS] = 1
    inputs = {
        "positions": np.arange(length)[None],
        "segments": np.ones((1, length), int),
        "window": 16,
        "image_blocks": spans,
    }
    attended = jax.jit(partial(attention, **inputs))(query, key, value)
    image = np.arange(place, place + module.MAX_IMAGE_TOKENS)
    for here, seen in ((place, np.r_[place - 15 : place, image]), (image[-1], image[-16:])):
        weights = jax.nn.softmax(key[0, seen, 0] @ query[0, here, 0])
        assert np.abs(attended[0, here, 0] - weights @ value[0, seen, 0]).max() < 1e-5


def test_bfloat16_is_close_to_float32(monkeypatch):
    in_blocks(monkeypatch, 8)
    *tensors, positions, segments = make_inputs()

    def gradients(dtype):
        def total(query, key, value):
            attended = attention(query, key, value, positions=positions, segments=segments, window=6)
            return jnp.sum(jnp.sin(attended.astype(jnp.float32)) * (segments > 0)[..., None, None])

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*(jnp.asarray(x, dtype) for x in tensors))

    for coarse, fine in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        assert coarse.dtype == jnp.bfloat16
        assert np.linalg.norm(coarse.astype(jnp.float32) - fine) < 0.01 * np.linalg.norm(fine)


def test_a_backward_pass_that_kept_what_was_attended_does_not_attend_again(monkeypatch):
    in_blocks(monkeypatch, 8)
    *tensors, positions, segments = make_inputs()

    def exponentials(policy):
        def total(query, key, value):
            return attention(query * 2, key, value, positions=positions, segments=segments, window=None).sum()

        kept = jax.checkpoint(total, policy=policy)
        return str(jax.make_jaxpr(jax.grad(kept))(*tensors)).count("= exp ")

    policies = jax.checkpoint_policies
    assert exponentials(policies.save_only_these_names(ATTENDED)) < exponentials(policies.nothing_saveable)


def test_scores_of_all_queries_at_once_never_exist(monkeypatch):
    in_blocks(monkeypatch, 8)
    *tensors, positions, segments = make_inputs()
    whole = 2 * 4 * LENGTH * LENGTH

    def total(*tensors):
        return attention(*tensors, positions=positions, segments=segments, window=None).sum()

    assert largest_size(jax.make_jaxpr(jax.grad(total))(*tensors).jaxpr) < whole


def largest_size(jaxpr):
    """The most elements that any value has, those inside loops and checkpoints too."""
    sizes = [variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars]
    return max([*sizes, *(largest_size(inner) for inner in jax.extend.core.subjaxprs(jaxpr))], default=0)


@pytest.mark.parametrize(
    ("platform", "blocks"), [(None, "16,1,1,128,4"), ("cpu", "16,1,1,128,4"), ("tpu", "2,1,1,1024,4")]
)
def test_blocks_of_queries_are_those_of_the_platform_that_the_step_is_for(platform, blocks):
    """A plan compiles for TPUs where there are none: 1,024 positions, 2 heads of 4 numbers, 1 kv head."""
    query, key = jnp.ones((1, 1024, 2, 4)), jnp.ones((1, 1024, 1, 4))
    tokens = jnp.arange(1024)[None], jnp.ones((1, 1024), jnp.int32)
    attend = partial(attention, positions=tokens[0], segments=tokens[1], window=None, platform=platform)
    assert f"f32[{blocks}]" in str(jax.make_jaxpr(attend)(query, key, key))
