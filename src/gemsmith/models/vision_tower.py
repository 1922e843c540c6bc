"""The vision tower: a transformer over an image's patches, whose outputs are pooled to soft tokens.

Axes: N images, P patches, C values of a patch, H heads, D head dim, W the tower's width, F hidden, S soft tokens; Q and
M queries and keys of one block. Matmuls run in the tower's dtype; norms, RoPE, softmax and pooling in fp32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from gemsmith.execution import query_block
from gemsmith.models.heads import Rope, inverse_frequencies, rms_norm, rope, rotate
from gemsmith.models.layer import RMSNorm, linear, stacked
from gemsmith.models.sharding import gathered, platform_of
from gemsmith.zoo import VisionTower
from gemsmith.zoo.vision_tensors import CLIP_BOUNDS


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
        hidden = self.patch_embedder(patches, positions)  # (N, P, W)
        hidden = self.encoder(hidden, positions, mesh=mesh)
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
        whole = {path: PartitionSpec(None, None) for path, leaf in nnx.to_flat_state(states) if leaf[...].ndim == 3}
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
        heads = tower.heads * tower.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            ClippedLinear(tower.embed_dim, heads, clips=tower.clips, dtype=dtype) for _ in range(3)
        )
        self.o_proj = ClippedLinear(heads, tower.embed_dim, clips=tower.clips, dtype=dtype)
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
    """X (...) between the bounds, with torch.clamp's gradient: 1 on a bound, where jnp.clip's is a half.

    In bfloat16 many values lie on a bound.
    """
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
    turned = (
        rotate(half, (cosine[:, :, None], sine[:, :, None]))
        for half, (cosine, sine) in zip(halves, angles, strict=True)
    )
    return jnp.concatenate(list(turned), axis=-1)


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
