"""A projection's output as attention takes it: split into heads, with QK-norm and RoPE.

Axes: B batch, L length, H heads, D head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

Rope = tuple[jax.Array, jax.Array]


def inverse_frequencies(head_dim: int, theta: float, fraction: float) -> np.ndarray:
    """theta^(-2i/D) for the first `fraction` of a head's D/2 pairs, 0 (no rotation) for the others, fp32.

    The exponent is over the whole head, not over the part that rotates: HF calls this "proportional". Each step rounds
    to fp32 as transformers does: the last bit of a frequency, times a position of 700, moves a tiny model's logits by
    1e-4.
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
