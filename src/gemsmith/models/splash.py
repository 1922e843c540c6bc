"""Attention by JAX's splash kernel for TPU: no scores in HBM, blocks outside of the mask skipped, segments told apart.

Source of the kernel: jax.experimental.pallas.ops.tpu.splash_attention, https://arxiv.org/abs/2205.14135 for the method.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.execution import ATTENDED, LANES
from gemsmith.models.heads import Rope, make_heads
from gemsmith.models.heads_kernel import make_heads_first
from gemsmith.models.sharding import BATCH, axis_size, constrain

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
    """Whether `heads` is one kernel, or left to XLA."""

    def heads(
        self, x: jax.Array, head_dim: int, *, eps: float, weight: jax.Array | None = None, rotated: bool = True
    ) -> jax.Array:
        """A projection (B, L, H·D) as heads (B, H, L, D), with QK-norm's weight and RoPE where they apply."""
        angles = self.angles if rotated else None
        if not self.heads_kernel:
            heads = make_heads(x, head_dim, weight=weight, angles=angles, eps=eps)  # (B, L, H, D)
            return jnp.swapaxes(heads, 1, 2)  # (B, H, L, D)
        make = partial(make_heads_first, head_dim=head_dim, eps=eps, interpret=self.interpret)
        if self.mesh is None:
            return make(x, weight=weight, angles=angles)
        over_tp = "tp" if (x.shape[-1] // head_dim) % axis_size(self.mesh, "tp") == 0 else None
        specs = (PartitionSpec(BATCH, "sequence", over_tp), PartitionSpec(), PartitionSpec(BATCH, "sequence", None))
        make_own = jax.shard_map(
            lambda x, weight, angles: make(x, weight=weight, angles=angles),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(BATCH, over_tp, "sequence", None),
            check_vma=False,
        )
        return make_own(x, weight, angles)  # (B, H, L, D)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """The attended values, (B, L, H·D)."""
        attended = splash_attention(self.kernel, query, key, value, segments=self.segments, mesh=self.mesh)
        return jnp.swapaxes(attended, 1, 2).reshape(query.shape[0], query.shape[2], -1)  # (B, L, H·D)


def make_kernel(
    length: int, *, heads: int, window: int | None, mesh: Mesh | None = None, interpret: bool = False
) -> kernels.SplashAttentionKernel:
    """The kernel for so many heads and rows of `length`, a multiple of 128; `interpret` runs it on CPU, slowly."""
    shards = 1 if mesh is None else axis_size(mesh, HEADS)
    assert length % LANES == 0 and heads % shards == 0, (
        f"rows of {length} positions, {heads} heads over {shards} devices"
    )
    return kernels.make_splash_mha(
        _mask(length, window, heads),
        block_sizes=_block_sizes(length),
        head_shards=shards,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )


def splash_attention(
    kernel: kernels.SplashAttentionKernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segments: jax.Array,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The attended values, (B, H, L, D), of query (B, H, L, D) over key and value (B, K, L, D): what `attention` gives.

    On a mesh, rows are split over replica and fsdp, and heads over tp and sequence: where a row's positions lie on
    several devices, an all-to-all makes heads of them and back (sequence parallelism as in DeepSpeed-Ulysses,
    https://arxiv.org/abs/2309.14509). So all devices of a row do the same work, which they would not if each held its
    part of a causal mask.
    """
    shards = 1 if mesh is None else axis_size(mesh, HEADS)
    key, value = (_enough_heads(x, shards, mesh) for x in (key, value))  # (B, K or more, L, D)

    def attend(kernel: kernels.SplashAttentionKernel, *arrays: jax.Array) -> jax.Array:
        query, key, value, segments = arrays
        attended: Any = jax.vmap(kernel)(query, key, value, kernels.SegmentIds(segments, segments))  # (B, H, L, D)
        return attended

    if mesh is None:
        return attend(kernel, query, key, value, segments)
    by_heads = PartitionSpec(BATCH, HEADS, None, None)
    specs = (by_heads, by_heads, by_heads, PartitionSpec(BATCH, None))
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(HEADS, None)))
    # check_vma: the kernel does not say over which axes its results vary (gemsmith.models.upstream).
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(kernel_spec, *specs), out_specs=by_heads, check_vma=False)
    return constrain(sharded(kernel, query, key, value, segments), mesh, BATCH, "tp", "sequence", None)


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


def _block_sizes(length: int) -> kernels.BlockSizes:
    # Blocks of 1024 do not fit on the chip with a head of 512 (v5p: 17.9 of 16 MB).
    block = _divisor(length, 512)
    return kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )


def _divisor(length: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides the length."""
    return next(size for size in range(most, 0, -LANES) if length % size == 0)


def _enough_heads(x: jax.Array, shards: int, mesh: Mesh | None) -> jax.Array:
    """Keys or values (B, K, L, D), each head repeated where devices outnumber heads, so that each has the one it needs.

    Repeated where their positions lie: XLA would else gather all heads of all positions on every device, and repeat
    those.
    """
    heads = x.shape[1]
    if heads % shards == 0:
        return x
    return constrain(jnp.repeat(x, shards // heads, axis=1), mesh, BATCH, "tp", "sequence", None)  # (B, shards, L, D)
