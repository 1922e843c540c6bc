"""Rotary positions, and causal attention inside the documents of packed rows.

Axes: B batch, L length, H heads, K kv heads, G = H/K heads of one kv head, D head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

# Scores of one block of queries are B x H x 512 x L in fp32: 0.27 GB for a row of 4096 in the 31B, where all of L x L would be 2.1 GB.
QUERY_BLOCK = 512

Rope = tuple[jax.Array, jax.Array]


def inverse_frequencies(head_dim: int, theta: float, fraction: float) -> np.ndarray:
    """theta^(-2i/D) for the first `fraction` of a head's D/2 pairs, 0 (no rotation) for the others, fp32.

    The exponent is over the whole head, not over the part that rotates: HF calls this "proportional". Each step rounds to fp32 as
    transformers does: the last bit of a frequency, times a position of 700, moves a tiny model's logits by 1e-4.
    """
    rotated = int(fraction * head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    return np.concatenate([frequencies, np.zeros(head_dim // 2 - rotated, np.float32)])


def rope(positions: jax.Array, frequencies: np.ndarray) -> Rope:
    """Cosine and sine of every position's angles: two of (B, L, 1, D/2), fp32."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: Rope) -> jax.Array:
    """The x of (B, L, heads, D) with pair (i, i + D/2) turned by the i-th angle; fp32 inside."""
    cosine, sine = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, positions: jax.Array, segments: jax.Array, window: int | None
) -> jax.Array:
    """The attended values, (B, L, H, D), of query (B, L, H, D) over key and value (B, L, K, D).

    A token sees those of its own segment that are not after it and, with a window, less than `window` positions before it:

        segments   1 1 2 2 0          1 . . . .
        positions  0 1 0 1 0          1 1 . . .
                              sees    . . 1 . .
                                      . . 1 1 .
                                      . . . . 1

    Scores are not scaled: Gemma 4 norms q and k instead. Within a segment, positions must count up by one: with a window, each
    block of queries reads only the keys that lie so many places before it.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    if length <= QUERY_BLOCK:
        return _attend((query, positions, segments), (key, value, positions, segments), window).reshape(batch, length, heads, head_dim)

    blocks = -(-length // QUERY_BLOCK)
    pad = partial(_pad_length, length=blocks * QUERY_BLOCK)
    queries, keys = jax.tree.map(pad, ((query, positions, segments), (key, value, positions, segments)))
    span = blocks * QUERY_BLOCK if window is None else min(QUERY_BLOCK + window, blocks * QUERY_BLOCK)

    # Checkpointed, so that the backward pass holds one block's scores, never all of them.
    @jax.checkpoint
    def block(number: jax.Array) -> jax.Array:
        start = number * QUERY_BLOCK
        some_queries = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, QUERY_BLOCK, axis=1), queries)
        first_key = jnp.maximum(start + QUERY_BLOCK - span, 0)
        some_keys = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first_key, span, axis=1), keys)
        return _attend(some_queries, some_keys, window)

    attended = jnp.moveaxis(jax.lax.map(block, jnp.arange(blocks)), 0, 1)
    return attended.reshape(batch, blocks * QUERY_BLOCK, heads, head_dim)[:, :length]


def _attend(queries: tuple[jax.Array, ...], keys: tuple[jax.Array, ...], window: int | None) -> jax.Array:
    query, query_positions, query_segments = queries
    key, value, key_positions, key_segments = keys
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = (query_segments[:, :, None] == key_segments[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = jnp.einsum("bqkgd,bmkd->bkgqm", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqm,bmkd->bqkgd", weights, value)


def _pad_length(x: jax.Array, *, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths)
