"""Attention by JAX's splash kernel for TPU: no scores in HBM, blocks outside of the mask skipped, segments told apart.

Source: jax.experimental.pallas.ops.tpu.splash_attention, arXiv 2205.14135. Axes as in gemsmith.models.attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.models.attention import Rope, make_heads
from gemsmith.models.sharding import BATCH, axis_size, constrain
from gemsmith.recipe.backends import ATTENDED, LANES

# Positions, and columns of the projection, of one block: 1 MB in bf16. It fits with result and gradient, each twice.
BLOCK_LENGTH, BLOCK_COLUMNS = 512, 1024


def make_heads_first(
    x: jax.Array, head_dim: int, *, weight: jax.Array | None, angles: Rope | None, eps: float, interpret: bool = False
) -> jax.Array:
    """The x of (B, L, H·D) as (B, H, L, D), each head as `make_heads` makes it, by one kernel; L a multiple of 128.

    The weight is frozen: it gets no gradient. XLA takes a dozen passes over fp32 copies of q, k and v for the same,
    forward and back, with relayouts between them (benchmarks/tpu_compile.py); the kernel reads and writes each once.
    """
    weight = jnp.ones((head_dim,), jnp.float32) if weight is None else jax.lax.stop_gradient(weight).astype(jnp.float32)
    return _make(head_dim, eps, interpret, x, weight[None], angles)  # (B, H, L, D), weight (1, D)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _make(
    head_dim: int, eps: float, interpret: bool, x: jax.Array, weight: jax.Array, angles: Rope | None
) -> jax.Array:
    shape = (x.shape[0], x.shape[2] // head_dim, x.shape[1], head_dim)  # (B, H, L, D)
    body = partial(_forward_block, head_dim, eps)
    return _over_blocks(body, "heads_forward", head_dim, interpret, (x,), (weight, angles), shape)


def _backward(head_dim: int, eps: float, interpret: bool, saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, weight, angles = saved
    body = partial(_backward_block, head_dim, eps)
    of_x = _over_blocks(body, "heads_backward", head_dim, interpret, (x, gradient), (weight, angles), x.shape)
    return of_x, None, None


_make.defvjp(lambda *given: (_make(*given), given[3:]), _backward)


def _forward_block(head_dim: int, eps: float, x: Any, weight: Any, angles: Any, out: Any) -> None:
    for head in range(out.shape[1]):
        part = x[0, :, pl.ds(head * head_dim, head_dim)].astype(jnp.float32)  # (rows, D)
        normed = (part * _inverse_rms(part, eps) * weight[...]).astype(out.dtype)  # (rows, D)
        out[0, head] = _rotated(normed.astype(jnp.float32), angles, 1).astype(out.dtype)


def _backward_block(head_dim: int, eps: float, x: Any, gradient: Any, weight: Any, angles: Any, out: Any) -> None:
    """With n = x / rms(x), dx = (dn - n mean(dn · n)) / rms(x); dn: the gradient rotated back, times the weight."""
    for head in range(gradient.shape[1]):
        columns = pl.ds(head * head_dim, head_dim)
        part = x[0, :, columns].astype(jnp.float32)  # (rows, D)
        inverse = _inverse_rms(part, eps)  # (rows, 1)
        normed = part * inverse
        turned_back = _rotated(gradient[0, head].astype(jnp.float32), angles, -1).astype(out.dtype)
        of_normed = turned_back.astype(jnp.float32) * weight[...]
        along = jnp.mean(of_normed * normed, axis=-1, keepdims=True)  # (rows, 1)
        out[0, :, columns] = (inverse * (of_normed - normed * along)).astype(out.dtype)


def _inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _rotated(x: jax.Array, angles: Any, sign: int) -> jax.Array:
    if angles is None:
        return x
    cosine, sine = angles[0][0], sign * angles[1][0]  # (rows, D/2) each
    half = x.shape[-1] // 2
    first, second = x[:, :half], x[:, half:]  # (rows, D/2) each
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)  # (rows, D)


def _over_blocks(
    body: Callable[..., None],
    name: str,
    head_dim: int,
    interpret: bool,
    arrays: tuple[jax.Array, ...],
    small: tuple[jax.Array, Rope | None],
    shape: tuple[int, ...],
) -> jax.Array:
    """The body over blocks of some positions of some heads; arrays and result are (B, L, H·D) or (B, H, L, D)."""
    batch, length, columns = arrays[0].shape
    heads = columns // head_dim
    of_block = next(count for count in range(max(1, BLOCK_COLUMNS // head_dim), 0, -1) if heads % count == 0)
    rows = next(size for size in range(min(BLOCK_LENGTH, length), 0, -128) if length % size == 0)
    flat = pl.BlockSpec((1, rows, of_block * head_dim), lambda row, at, head: (row, at, head))
    by_head = pl.BlockSpec((1, of_block, rows, head_dim), lambda row, at, head: (row, head, at, 0))
    angle = pl.BlockSpec((1, rows, head_dim // 2), lambda row, at, _: (row, at, 0))
    weight, angles = small
    of_small = (pl.BlockSpec((1, head_dim), lambda *_: (0, 0)), None if angles is None else (angle, angle))
    moved = sum(x.size * x.dtype.itemsize for x in (*arrays, arrays[0]))
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(shape, arrays[0].dtype),
        grid=(batch, length // rows, heads // of_block),
        in_specs=[*(flat if x.ndim == 3 else by_head for x in arrays), *of_small],
        out_specs=flat if len(shape) == 3 else by_head,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=name,
    )
    result: jax.Array = call(*arrays, weight, angles)
    return result


HEADS = ("tp", "sequence")


@dataclass(frozen=True, kw_only=True)
class SplashAttention:
    """The layers' attention by the kernel; heads are (B, H, L, D), L a multiple of 128 on each device."""

    angles: Rope
    segments: jax.Array
    kernel: kernels.SplashAttentionKernel
    """For all layers that attend alike: a mask of 131,072 positions takes seconds to make."""
    mesh: Mesh | None = None
    interpret: bool = False
    heads_kernel: bool = True

    def heads(
        self, x: jax.Array, head_dim: int, *, eps: float, weight: jax.Array | None = None, rotated: bool = True
    ) -> jax.Array:
        """A projection (B, L, H·D) as heads (B, H, L, D), with QK-norm's weight and RoPE where they apply."""
        angles = self.angles if rotated else None
        if not self.heads_kernel:
            heads = make_heads(x, head_dim, weight=weight, angles=angles, eps=eps)  # (B, L, H, D)
            return jnp.swapaxes(heads, 1, 2)  # (B, H, L, D)

        def make(x: jax.Array, weight: jax.Array | None, angles: Rope | None) -> jax.Array:
            return make_heads_first(x, head_dim, weight=weight, angles=angles, eps=eps, interpret=self.interpret)

        if self.mesh is None:
            return make(x, weight, angles)
        over_tp = "tp" if (x.shape[-1] // head_dim) % axis_size(self.mesh, "tp") == 0 else None
        specs = (PartitionSpec(BATCH, "sequence", over_tp), PartitionSpec(), PartitionSpec(BATCH, "sequence", None))
        by_head = PartitionSpec(BATCH, over_tp, "sequence", None)
        make_own = jax.shard_map(make, mesh=self.mesh, in_specs=specs, out_specs=by_head, check_vma=False)
        return make_own(x, weight, angles)  # (B, H, L, D)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """The attended values, (B, L, H·D), of query (B, H, L, D) over key and value (B, K, L, D): as DenseAttention's.

        On a mesh, rows are split over replica and fsdp, and heads over tp and sequence: where a row's positions lie on
        several devices, an all-to-all makes heads of them and back (sequence parallelism as in DeepSpeed-Ulysses,
        https://arxiv.org/abs/2309.14509). So all devices of a row do the same work, unlike with parts of a causal mask.
        """
        mesh = self.mesh
        shards = 1 if mesh is None else axis_size(mesh, HEADS)
        if key.shape[1] % shards:
            # Each repeated where its positions lie: XLA would else gather all heads of all positions on every device.
            repeated = (jnp.repeat(x, shards // key.shape[1], axis=1) for x in (key, value))
            key, value = (constrain(x, mesh, BATCH, "tp", "sequence", None) for x in repeated)  # (B, shards, L, D)

        def attend(kernel: kernels.SplashAttentionKernel, *arrays: jax.Array) -> jax.Array:
            query, key, value, segments = arrays
            attended: Any = jax.vmap(kernel)(query, key, value, kernels.SegmentIds(segments, segments))  # (B, H, L, D)
            return attended

        arrays = (self.kernel, query, key, value, self.segments)
        if mesh is None:
            attended = attend(*arrays)
        else:
            by_heads = PartitionSpec(BATCH, HEADS, None, None)
            kernel_spec = self.kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(HEADS, None)))
            specs = (kernel_spec, by_heads, by_heads, by_heads, PartitionSpec(BATCH, None))
            # check_vma: the kernel does not say over which axes its results vary (docs/upstream.md).
            sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=by_heads, check_vma=False)
            attended = constrain(sharded(*arrays), mesh, BATCH, "tp", "sequence", None)
        return jnp.swapaxes(attended, 1, 2).reshape(query.shape[0], query.shape[2], -1)  # (B, L, H·D)


def make_kernel(
    length: int, *, heads: int, window: int | None, mesh: Mesh | None = None, interpret: bool = False
) -> kernels.SplashAttentionKernel:
    """The kernel for so many heads and rows of `length`, a multiple of 128; `interpret` runs it on CPU, slowly."""
    shards = 1 if mesh is None else axis_size(mesh, HEADS)
    assert length % LANES == 0 and heads % shards == 0, f"rows of {length}, {heads} heads over {shards} devices"
    # Blocks of 1024 do not fit on the chip with a head of 512 (v5p: 17.9 of 16 MB).
    block = next(size for size in range(512, 0, -LANES) if length % size == 0)
    return kernels.make_splash_mha(
        _mask(length, window, heads),
        block_sizes=kernels.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
        ),
        head_shards=shards,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )


class _ByBlocks:
    """Knows of a block whose every pair is seen, or none, without comparing positions: minutes of it at 131,072."""

    reach: int

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        least, most = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        shape = (queries.stop - queries.start, keys.stop - keys.start)  # (Q, M)
        if least >= 0 and most < self.reach:
            return _all(shape, value=True)
        if most < 0 or least >= self.reach:
            return _all(shape, value=False)
        seen: np.ndarray = super().__getitem__(block)  # type: ignore[misc]
        return seen


class _Causal(_ByBlocks, masks.CausalMask):
    pass


class _Local(_ByBlocks, masks.LocalMask):
    pass


@cache
def _all(shape: tuple[int, int], *, value: bool) -> np.ndarray:
    return np.broadcast_to(np.bool_(value), shape)


def _mask(length: int, window: int | None, heads: int) -> masks.MultiHeadMask:
    shape = (length, length)  # (L, L)
    one = _Causal(shape) if window is None else _Local(shape, window_size=(window - 1, 0), offset=0)
    one.reach = length if window is None else window
    return masks.MultiHeadMask([one] * heads)
