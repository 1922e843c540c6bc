"""Images as a model takes them, the vision tower that makes features of their patches, and the 12B's embedding instead.

Axes: B rows, L positions of a row, M its soft tokens at most, N images (of a row, where B stands before), P patches, C
values of a patch, S soft tokens of an image at most, W the features' width, E the text model's, H heads, D head dim; in
attention Q and M are queries and keys of one block. Matmuls run in the tower's dtype; all else in fp32.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from gemsmith.arch import PatchProjection, Vision, VisionTower
from gemsmith.arch.tensors import CLIP_BOUNDS
from gemsmith.models.attention import Rope, inverse_frequencies, rms_norm, rope, rotate
from gemsmith.models.layers import RMSNorm, linear, stacked
from gemsmith.models.sharding import LayerSpecs, gathered, platform_of
from gemsmith.recipe.backends import MAX_IMAGE_TOKENS, query_block


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Images:
    """The images of rows: N for each row, of which those beyond its own are padding.

    `patches` (B, N, P, C) in fp32, as the image processor scales and orders them; `positions` (B, N, P, 2), column and
    row of each patch, -1 and -1 for padding; `places` (B, N, S), where in the row the soft tokens of an image stand, in
    order; L or more for those that it does not have.
    """

    patches: jax.Array
    positions: jax.Array
    places: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SoftTokens:
    """The soft tokens of images: what stands in a row in place of its images' tokens.

    `embeddings` (B, M, E) replace those of the tokens at `places` (B, M), counted along the row; a place of L or more
    is unused. `blocks` (B, L): the tokens of one image have the same number, others 0; in the sliding layers of
    variants with `bidirectional_images` the tokens of a block attend to each other in both directions. No block has
    more tokens than `longest`.
    """

    embeddings: jax.Array
    places: jax.Array
    blocks: jax.Array
    longest: int = field(default=MAX_IMAGE_TOKENS, metadata={"static": True})


def blocks_of(places: jax.Array, length: int) -> jax.Array:
    """Which image each position of a row belongs to, (B, L), from 1; 0 where it is text.

        places  [[1 2] [4 9]]  ->  blocks  0 1 1 0 2 0 0 0

    L is 8 here, and the second image has one soft token.
    """
    rows, images, tokens = places.shape
    numbers = jnp.broadcast_to(jnp.arange(1, images + 1)[:, None], (rows, images, tokens))
    row = jnp.arange(rows)[:, None, None]
    return jnp.zeros((rows, length), jnp.int32).at[row, places].set(numbers, mode="drop")


class PatchProjector(nnx.Module):
    """Each patch normed, projected, normed, given an embedding of its column and one of its row, and normed again."""

    def __init__(self, vision: PatchProjection, *, dtype: jnp.dtype) -> None:
        self.patch_ln1 = LayerNorm(vision.patch_dim, dtype=dtype)
        self.patch_dense = linear(vision.patch_dim, vision.embed_dim, dtype=dtype, use_bias=True)
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
        centered = fine - fine.mean(axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + self.eps)
        weight, bias = (y[...].astype(jnp.float32) for y in (self.weight, self.bias))
        return (normed * weight + bias).astype(x.dtype)


class Tower(nnx.Module):
    """Features from images' patches. Its layers are held as one, whose arrays have a first axis of the layers."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        self.tower = tower
        self.patch_embedder = PatchEmbedder(tower, dtype=dtype)
        self.encoder = Encoder(tower, dtype=dtype)
        if tower.standardizes:
            self.std_bias = nnx.Param(jnp.zeros((tower.embed_dim,), dtype))
            self.std_scale = nnx.Param(jnp.ones((tower.embed_dim,), dtype))

    def __call__(self, patches: jax.Array, positions: jax.Array, *, mesh: Mesh | None = None) -> jax.Array:
        """Features (N, S, W) of patches (N, P, C) at positions (N, P, 2): column and row, -1 for what is padding.

        S = P / 9: the features of an image's cells of 3 by 3 patches, row by row, then those of padding.
        """
        hidden = self.encoder(self.patch_embedder(patches, positions), positions, mesh=mesh)  # (N, P, W)
        pooled = pool(hidden, positions, self.tower.pooling).astype(hidden.dtype)  # (N, S, W)
        features = pooled.astype(jnp.float32) * self.tower.embed_dim**0.5
        if self.tower.standardizes:
            bias, scale = (x[...].astype(jnp.float32) for x in (self.std_bias, self.std_scale))
            features = (features - bias) * scale
        return features.astype(hidden.dtype)


class PatchEmbedder(nnx.Module):
    """A projection of each patch, plus an embedding of its column and one of its row."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        self.input_proj = linear(tower.patch_dim, tower.embed_dim, dtype=dtype)
        self.position_embedding_table = nnx.Param(jnp.zeros((2, tower.positions, tower.embed_dim), dtype))

    def __call__(self, patches: jax.Array, positions: jax.Array) -> jax.Array:
        table, places = self.position_embedding_table[...], jnp.maximum(positions, 0)
        embeddings = table[0, places[..., 0]] + table[1, places[..., 1]]  # (N, P, W)
        scaled = (2 * (patches.astype(jnp.float32) - 0.5)).astype(table.dtype)  # values of 0 to 1 as -1 to 1
        return self.input_proj(scaled) + jnp.where(is_patch(positions)[..., None], embeddings, 0)


class Encoder(nnx.Module):
    """The tower's layers, one after the other. What a gradient needs of them is recomputed, layer by layer."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        self.tower = tower
        self.layers = stacked(TowerLayer(tower, dtype=dtype), tower.layers)

    def __call__(self, hidden: jax.Array, positions: jax.Array, *, mesh: Mesh | None) -> jax.Array:
        graph, states = nnx.split(self.layers)
        matrices = (path for path, leaf in nnx.to_flat_state(states) if leaf[...].ndim == 3)
        whole: LayerSpecs = dict.fromkeys(matrices, (PartitionSpec(None, None), None))
        angles, real, block = plane_rope(positions, self.tower), is_patch(positions), query_block(platform_of(mesh))

        @jax.checkpoint
        def run(hidden: jax.Array, state: Any) -> tuple[jax.Array, None]:
            layer = nnx.merge(graph, gathered(state, whole, mesh))
            return layer(hidden, angles=angles, real=real, block=block), None

        return jax.lax.scan(run, hidden, states)[0]


class TowerLayer(nnx.Module):
    """One layer: attention over all patches of the image, then the MLP, with norms on both sides of each."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        norm = partial(RMSNorm, tower.embed_dim, eps=tower.rms_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = TowerAttention(tower, dtype=dtype)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.mlp = TowerMLP(tower, dtype=dtype)

    def __call__(self, hidden: jax.Array, *, angles: tuple[Rope, Rope], real: jax.Array, block: int) -> jax.Array:
        attended = self.self_attn(self.input_layernorm(hidden), angles=angles, real=real, block=block)  # (N, P, W)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))  # (N, P, W)
        return hidden + self.post_feedforward_layernorm(fed)


class TowerAttention(nnx.Module):
    """Self-attention with QK-norm and RoPE by column and row; values are normed, too."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        self.head_dim, self.eps = tower.head_dim, tower.rms_eps
        heads, make = tower.heads * tower.head_dim, partial(ClippedLinear, clips=tower.clips, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj = (make(tower.embed_dim, heads) for _ in range(3))
        self.o_proj = make(heads, tower.embed_dim)
        self.q_norm, self.k_norm = (RMSNorm(tower.head_dim, eps=tower.rms_eps, dtype=dtype) for _ in range(2))

    def __call__(self, x: jax.Array, *, angles: tuple[Rope, Rope], real: jax.Array, block: int) -> jax.Array:
        query, key, value = (
            project(x).reshape(*x.shape[:2], -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (N, P, H, D)
        query, key = (rotate_in_plane(norm(y), angles) for norm, y in ((self.q_norm, query), (self.k_norm, key)))
        attended = attend(query, key, rms_norm(value, self.eps).astype(x.dtype), real, block)
        return self.o_proj(attended.reshape(*x.shape[:2], -1))


class TowerMLP(nnx.Module):
    """down(gelu(gate(x)) · up(x))."""

    def __init__(self, tower: VisionTower, *, dtype: jnp.dtype) -> None:
        make = partial(ClippedLinear, clips=tower.clips, dtype=dtype)
        self.gate_proj, self.up_proj = (make(tower.embed_dim, tower.ffn) for _ in range(2))
        self.down_proj = make(tower.ffn, tower.embed_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x))


class ClippedLinear(nnx.Module):
    """A projection whose input and output are clipped to bounds of its own, in towers that `clips` says so of."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool, dtype: jnp.dtype) -> None:
        self.clips = clips
        self.linear = linear(inputs, outputs, dtype=dtype)
        if clips:
            bounds = (nnx.Param(jnp.zeros((), dtype)) for _ in CLIP_BOUNDS)
            self.input_min, self.input_max, self.output_min, self.output_max = bounds

    def __call__(self, x: jax.Array) -> jax.Array:
        """In x's dtype, which adapters in float32 do not change."""
        if not self.clips:
            return self.linear(x).astype(x.dtype)
        product = self.linear(clip(x, self.input_min[...], self.input_max[...])).astype(x.dtype)
        return clip(product, self.output_min[...], self.output_max[...])


def clip(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """X (...) between bounds, where many bf16 values lie; torch.clamp's gradient on one is 1, jnp.clip's a half."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def is_patch(positions: jax.Array) -> jax.Array:
    """Which positions (N, P, 2) are a patch's, (N, P): padding has -1 and -1."""
    return jnp.any(positions != -1, axis=-1)


def plane_rope(positions: jax.Array, tower: VisionTower) -> tuple[Rope, Rope]:
    """The angles by column, for the first half of a head, and by row, for the second, each 2 x (N, P, D/4)."""
    frequencies = inverse_frequencies(tower.head_dim // 2, tower.rope_theta, 1.0)
    return rope(positions[..., 0], frequencies), rope(positions[..., 1], frequencies)


def rotate_in_plane(x: jax.Array, angles: tuple[Rope, Rope]) -> jax.Array:
    """The x of (N, P, H, D) with each half of its heads turned by angles of its own."""
    halves = jnp.split(x, 2, axis=-1)
    by_head = ((cosine[:, :, None], sine[:, :, None]) for cosine, sine in angles)
    return jnp.concatenate(list(map(rotate, halves, by_head)), axis=-1)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, real: jax.Array, block: int) -> jax.Array:
    """The attended values, (N, P, H, D): each query over all keys that are `real` (N, P), `block` queries at a time.

    Scores are not scaled, since q and k are normed.
    """
    images, patches, heads, head_dim = query.shape
    block = min(block, patches)
    blocks = -(-patches // block)
    padded = jnp.pad(query, ((0, 0), (0, blocks * block - patches), (0, 0), (0, 0)))
    queries = jnp.swapaxes(padded.reshape(images, blocks, block, heads, head_dim), 0, 1)  # (blocks, N, Q, H, D)

    @jax.checkpoint
    def of_block(query: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqhd,nmhd->nhqm", query, key, preferred_element_type=jnp.float32)
        scores = jnp.where(real[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        attended = jnp.einsum("nhqm,nmhd->nqhd", weights, value, preferred_element_type=jnp.float32)
        return attended.astype(query.dtype)

    attended = jnp.swapaxes(jax.lax.map(of_block, queries), 0, 1)  # (N, blocks, Q, H, D)
    return attended.reshape(images, -1, heads, head_dim)[:, :patches]


def pool(hidden: jax.Array, positions: jax.Array, pooling: int) -> jax.Array:
    """The mean of each cell of patches, (N, S, W) in fp32, row by row; 0 for cells beyond the image's.

    An image of 6 by 3 patches, pooled by 3, has two cells: of columns 0 to 2, and of columns 3 to 5.
    """
    patches = hidden.shape[1]
    column, row = jnp.moveaxis(jnp.maximum(positions, 0), -1, 0)  # (N, P) each
    width = column.max(axis=1, keepdims=True) + 1
    cell = column // pooling + (width // pooling) * (row // pooling)
    share = jax.nn.one_hot(cell, patches // pooling**2, dtype=jnp.float32) / pooling**2  # (N, P, S)
    share = jnp.where(is_patch(positions)[..., None], share, 0)
    return jnp.einsum("nps,npw->nsw", share, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
