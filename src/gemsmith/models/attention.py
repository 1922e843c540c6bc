"""Causal attention inside the documents of packed rows, in dense blocks of queries; and its heads, QK-norm and RoPE.

B batch, L length, H heads, K kv heads, G = H/K heads of one, D head dim; Q queries, M keys of a block, n blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gemsmith.recipe.backends import ATTENDED, MAX_IMAGE_TOKENS, attention_loops, query_block

Rope = tuple[jax.Array, jax.Array]


def inverse_frequencies(head_dim: int, theta: float, fraction: float) -> np.ndarray:
    """theta^(-2i/D) for the first `fraction` of a head's D/2 pairs, 0 (no rotation) for the others, fp32.

    The exponent is over the whole head, not over the part that rotates: HF calls this "proportional". Each step rounds
    to fp32 as transformers does: the last bit of a frequency, times a position of 700, moves tiny logits by 1e-4.
    """
    rotated = int(fraction * head_dim // 2)
    exponents = np.arange(0, 2 * rotated, 2, dtype=np.float32) / np.float32(head_dim)  # (rotated,)
    frequencies = np.float32(1) / np.float32(theta) ** exponents  # (rotated,)
    return np.concatenate([frequencies, np.zeros(head_dim // 2 - rotated, np.float32)])  # (D/2,)


def rope(positions: jax.Array, frequencies: np.ndarray) -> Rope:
    """Cosine and sine of every position's angles: two of (B, L, D/2), fp32."""
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies  # (B, L, D/2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: Rope) -> jax.Array:
    """The x of (..., D) with pair (i, i + D/2) turned by the i-th angle; fp32 inside."""
    cosine, sine = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # (..., D/2) each
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)  # (..., D)
    return turned.astype(x.dtype)


def rms_norm(x: jax.Array, eps: float) -> jax.Array:
    """Over the last axis, x / sqrt(mean(x²) + eps), in fp32.

    The mean stands behind an optimization barrier: fused with what it divides, XLA on CPU rounds it by the number of
    rows, and a row's gradient with others beside it differed by up to 6e-5 from its gradient alone.
    """
    x = x.astype(jnp.float32)
    mean = jax.lax.optimization_barrier(jnp.mean(jnp.square(x), axis=-1, keepdims=True))  # (..., 1)
    return x * jax.lax.rsqrt(mean + eps)


def make_heads(x: jax.Array, head_dim: int, *, weight: jax.Array | None, angles: Rope | None, eps: float) -> jax.Array:
    """The x of (B, L, H·D) as heads (B, L, H, D), RMS-normed; weight (D,) and angles (RoPE) may be None."""
    heads = x.reshape(*x.shape[:-1], -1, head_dim)  # (B, L, H, D)
    normed = rms_norm(heads, eps)  # (B, L, H, D)
    if weight is not None:
        normed *= weight.astype(jnp.float32)
    normed = normed.astype(x.dtype)
    return normed if angles is None else rotate(normed, (angles[0][:, :, None], angles[1][:, :, None]))


@dataclass(frozen=True, kw_only=True)
class DenseAttention:
    """The layers' attention in dense blocks, on any device; heads are (B, L, H, D).

    A token sees those of its own segment up to itself and, with a window, less than `window` positions back:

        segments   1 1 2 2 0          1 . . . .
        positions  0 1 0 1 0          1 1 . . .
                              sees    . . 1 . .
                                      . . 1 1 .
                                      . . . . 1

    With `image_blocks` (B, L), tokens also see those after them that are of the same segment and block, other than 0; a
    block is the soft tokens of one image, up to `max_image_tokens` in a row. The window holds for these, too: it is as
    wide backwards, and has no end forwards. Scores are not scaled: Gemma 4 norms q and k instead. Within a segment,
    positions must count up by one: each block of queries reads only the keys that can lie in its reach. The platform,
    such as "tpu", decides how many queries a block has; default: what JAX runs on.
    """

    angles: Rope
    positions: jax.Array
    segments: jax.Array
    window: int | None
    image_blocks: jax.Array | None = None
    max_image_tokens: int = MAX_IMAGE_TOKENS
    platform: str | None = None

    def heads(
        self, x: jax.Array, head_dim: int, *, eps: float, weight: jax.Array | None = None, rotated: bool = True
    ) -> jax.Array:
        """A projection (B, L, H·D) as heads (B, L, H, D), with QK-norm's weight and RoPE where they apply."""
        return make_heads(x, head_dim, weight=weight, angles=self.angles if rotated else None, eps=eps)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """The attended values, (B, L, H·D), of query (B, L, H, D) over key and value (B, L, K, D)."""
        length, images = query.shape[1], self.image_blocks
        block = min(query_block(self.platform or jax.default_backend()), length)
        most = 1 if images is None else self.max_image_tokens
        reach = _Reach(block=block, window=self.window, max_image_tokens=most)
        tokens = (self.positions, self.segments) if images is None else (self.positions, self.segments, images)

        def pad(x: jax.Array) -> jax.Array:
            return jnp.pad(x, [(0, 0), (0, -length % block), *[(0, 0)] * (x.ndim - 2)])

        attended = _attend(reach, *jax.tree.map(pad, (query, key, value, tokens)))[:, :length]  # (B, L, H, D)
        return attended.reshape(*attended.shape[:2], -1)  # (B, L, H·D)


@dataclass(frozen=True, kw_only=True)
class _Reach:
    """Which keys a block of `block` queries can see, as far as that is known before the rows are."""

    block: int
    window: int | None
    max_image_tokens: int

    def loops(self, length: int) -> Iterator[tuple[range, int]]:
        """The numbers of the blocks of each loop, and how many keys each of them reads."""
        return attention_loops(length, block=self.block, window=self.window, ahead=self.max_image_tokens - 1)

    def keys_of(self, number: jax.Array, keys: int, length: int) -> jax.Array:
        """The place of the first of so many keys that the block of that number reads."""
        blocks_ahead = -(-(self.max_image_tokens - 1) // self.block)
        end = (number + 1) * self.block + blocks_ahead * self.block
        return jnp.clip(end - keys, 0, length - keys)

    def sees(self, number: jax.Array, first_key: jax.Array, keys: int, tokens: tuple[jax.Array, ...]) -> jax.Array:
        """Which keys each query of a block sees, (B, Q, M)."""
        queries = (jax.lax.dynamic_slice_in_dim(x, number * self.block, self.block, axis=1)[:, :, None] for x in tokens)
        others = (jax.lax.dynamic_slice_in_dim(x, first_key, keys, axis=1)[:, None, :] for x in tokens)
        (position, segment, *image), (key_position, key_segment, *key_image) = queries, others  # (B, Q, 1), (B, 1, M)
        distance = position - key_position  # (B, Q, M)
        seen = distance >= 0  # (B, Q, M)
        if image:
            seen |= (image[0] == key_image[0]) & (image[0] != 0)
        if self.window is not None:
            seen &= distance < self.window
        return seen & (segment == key_segment)  # (B, Q, M)


# A derivative of our own: the one that JAX makes saves every block's scores, or recomputes each block to get them, and
# transposes the products with scores into layouts that XLA then copies. On CPU that took 705 ms where this takes 149.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    reach: _Reach, query: jax.Array, key: jax.Array, value: jax.Array, tokens: tuple[jax.Array, ...]
) -> jax.Array:
    return _forward(reach, query, key, value, tokens)[0]


def _forward(
    reach: _Reach, query: jax.Array, key: jax.Array, value: jax.Array, tokens: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The attended values, and what the backward pass needs."""
    length, kv_heads = key.shape[1:3]
    queries = _in_blocks(query, kv_heads, reach.block)  # (n, B, K, G·Q, D)
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)  # (B, K, L, D)
    pieces = []
    for numbers, keys in reach.loops(length):

        def block(of_block: tuple[jax.Array, jax.Array], keys: int = keys) -> tuple[jax.Array, jax.Array]:
            number, query = of_block
            first = reach.keys_of(number, keys, length)  # ()
            key_block, value_block = (jax.lax.dynamic_slice_in_dim(x, first, keys, axis=2) for x in (key, value))
            scores = _scores(query, key_block, reach.sees(number, first, keys, tokens))  # (B, K, G·Q, M)
            highest = scores.max(axis=-1, keepdims=True)  # (B, K, G·Q, 1)
            weights = jnp.exp(scores - highest)  # (B, K, G·Q, M)
            total = weights.sum(axis=-1, keepdims=True)  # (B, K, G·Q, 1)
            attended = _product("bkqm,bkmd->bkqd", weights.astype(value.dtype), value_block) / total  # (B, K, G·Q, D)
            return attended.astype(query.dtype), (highest + jnp.log(total))[..., 0]  # (B, K, G·Q, D), (B, K, G·Q)

        of_loop = (jnp.arange(numbers.start, numbers.stop), queries[numbers.start : numbers.stop])
        pieces.append(jax.lax.map(block, of_loop))
    attended, log_total = (jnp.concatenate(piece) for piece in zip(*pieces, strict=True))
    attended = checkpoint_name(_in_rows(attended, query.shape), ATTENDED)  # (B, L, H, D)
    return attended, (queries, key, value, tokens, attended, checkpoint_name(log_total, ATTENDED))


def _backward(reach: _Reach, saved: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    """With weights P = exp(S - log total), dV = Pᵀ dO and dS = P · (dO Vᵀ - rowsum(dO · O))."""
    queries, key, value, tokens, attended, log_total = saved
    shape, kv_heads, length = gradient.shape, key.shape[1], key.shape[2]
    dots = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1, keepdims=True)  # (B, L, H, 1)
    per_block = (queries, log_total[..., None], *(_in_blocks(x, kv_heads, reach.block) for x in (gradient, dots)))
    # (B, K, D, L): so the products' left sides, which XLA on CPU transposes, are the small ones.
    sums = tuple(jnp.zeros((*x.shape[:2], x.shape[3], length), jnp.float32) for x in (key, value))
    pieces = []
    for numbers, keys in reach.loops(length):

        def block(sums: Any, of_block: tuple[jax.Array, ...], keys: int = keys) -> tuple[Any, jax.Array]:
            number, query, log_total, gradient, dots = of_block
            first = reach.keys_of(number, keys, length)  # ()
            key_block, value_block = (jax.lax.dynamic_slice_in_dim(x, first, keys, axis=2) for x in (key, value))
            weights = jnp.exp(_scores(query, key_block, reach.sees(number, first, keys, tokens)) - log_total)
            of_scores = (weights * (_product("bkqd,bkmd->bkqm", gradient, value_block) - dots)).astype(query.dtype)
            of_key = _product("bkqd,bkqm->bkdm", query, of_scores)  # (B, K, D, M)
            of_value = _product("bkqd,bkqm->bkdm", gradient, weights.astype(value.dtype))  # (B, K, D, M)
            sums = tuple(_add_at(first, x, more) for x, more in zip(sums, (of_key, of_value), strict=True))
            return sums, _product("bkqm,bkmd->bkqd", of_scores, key_block).astype(query.dtype)  # (B, K, G·Q, D)

        of_loop = (jnp.arange(numbers.start, numbers.stop), *(x[numbers.start : numbers.stop] for x in per_block))
        sums, of_query = jax.lax.scan(block, sums, of_loop)  # (B, K, D, L), (blocks, B, K, G·Q, D)
        pieces.append(of_query)
    of_key, of_value = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in sums)  # (B, L, K, D)
    return _in_rows(jnp.concatenate(pieces), shape), of_key, of_value, None  # (B, L, H, D), (B, L, K, D) twice


_attend.defvjp(_forward, _backward)


def _scores(query: jax.Array, key: jax.Array, seen: jax.Array) -> jax.Array:
    """Scores (B, K, G·Q, M) of queries (B, K, G·Q, D) over keys (B, K, M, D), fp32; the least number where unseen."""
    scores = _product("bkqd,bkmd->bkqm", query, key)  # (B, K, G·Q, M)
    by_head = scores.reshape(*scores.shape[:2], -1, *seen.shape[1:])  # (B, K, G, Q, M)
    return jnp.where(seen[:, None, None], by_head, jnp.finfo(jnp.float32).min).reshape(scores.shape)


# The G heads of one kv head are rows of one matrix, so that each product is of two matrices, whose layouts XLA need not
# change.
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _add_at(place: jax.Array, x: jax.Array, more: jax.Array) -> jax.Array:
    there = jax.lax.dynamic_slice_in_dim(x, place, more.shape[-1], axis=-1)  # (B, K, D, M)
    return jax.lax.dynamic_update_slice_in_dim(x, there + more, place, axis=-1)  # (B, K, D, L)


def _in_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """(B, L, H, D) as (n, B, K, G·Q, D)."""
    batch, length, heads, head_dim = x.shape
    x = x.reshape(batch, length // block, block, kv_heads, heads // kv_heads, head_dim)  # (B, n, Q, K, G, D)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(length // block, batch, kv_heads, -1, head_dim)  # (n, B, K, G·Q, D)


def _in_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(n, B, K, G·Q, D) as the shape (B, L, H, D)."""
    (blocks, batch, kv_heads, _, _), (_, length, heads, head_dim) = x.shape, shape
    x = x.reshape(blocks, batch, kv_heads, heads // kv_heads, length // blocks, head_dim)  # (n, B, K, G, Q, D)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(shape)  # (B, n, Q, K, G, D), and so (B, L, H, D)
