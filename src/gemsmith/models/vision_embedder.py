"""The 12B's embedding of patches, which has no tower, and the projection of features into a text model's width.

Axes: N images, P patches, C values of a patch, W the features' width, E the text model's.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from gemsmith.models.heads import rms_norm
from gemsmith.models.layer import linear
from gemsmith.zoo import PatchProjection, Vision


class PatchProjector(nnx.Module):
    """Each patch normed, projected, normed, given an embedding of its column and one of its row, and normed again."""

    def __init__(self, vision: PatchProjection, *, dtype: jnp.dtype) -> None:
        self.patch_ln1 = LayerNorm(vision.patch_dim, dtype=dtype)
        self.patch_dense = nnx.Linear(
            vision.patch_dim,
            vision.embed_dim,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=nnx.initializers.zeros,
            rngs=nnx.Rngs(0),
        )
        self.patch_ln2 = LayerNorm(vision.embed_dim, dtype=dtype)
        self.pos_embedding = nnx.Param(jnp.zeros((vision.positions, 2, vision.embed_dim), dtype))
        self.pos_norm = LayerNorm(vision.embed_dim, dtype=dtype)

    def __call__(self, patches: jax.Array, positions: jax.Array) -> jax.Array:
        """Features (N, P, W) of patches (N, P, C), whose values stay in 0 to 1, at positions (N, P, 2)."""
        table, places = self.pos_embedding[...], jnp.maximum(positions, 0)
        by_axis = jnp.stack([table[places[..., axis], axis] for axis in range(2)], axis=-2)  # (N, P, 2, W)
        embeddings = jnp.where(positions[..., None] != -1, by_axis, 0).sum(axis=-2)
        projected = self.patch_dense(self.patch_ln1(patches.astype(table.dtype))).astype(table.dtype)  # (N, P, W)
        return self.pos_norm(self.patch_ln2(projected) + embeddings)


class FeatureProjector(nnx.Module):
    """Features, RMS-normed without a weight, in the text model's width."""

    def __init__(self, vision: Vision, embed_dim: int, *, dtype: jnp.dtype) -> None:
        self.eps = vision.rms_eps
        self.embedding_projection = linear(vision.embed_dim, embed_dim, dtype=dtype)

    def __call__(self, features: jax.Array) -> jax.Array:
        """(N, S, W) as (N, S, E), which is not multiplied by sqrt(E) as tokens' embeddings are."""
        return self.embedding_projection(rms_norm(features, self.eps).astype(features.dtype)).astype(features.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias, in fp32 inside."""

    eps = 1e-5  # torch's own: the published config's is that of RMS norms

    def __init__(self, width: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        fine = x.astype(jnp.float32)
        centred = fine - fine.mean(axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + self.eps)
        weight, bias = (y[...].astype(jnp.float32) for y in (self.weight, self.bias))
        return (normed * weight + bias).astype(x.dtype)
