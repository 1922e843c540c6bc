"""`make_heads` as one kernel for TPU, which gives the heads in the order that splash attention reads them.

XLA takes a dozen passes over fp32 copies of q, k and v for the same, forward and back, with relayouts between them
(benchmarks/tpu_compile.py). Here each element is read once and written once. Axes as in gemsmith.models.heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gemsmith.models.heads import Rope

# Positions, and columns of the projection, of one block: 1 MB in bf16. With its result and gradient, each twice, it
# fits on the chip.
BLOCK_LENGTH, BLOCK_COLUMNS = 512, 1024


def make_heads_first(
    x: jax.Array, head_dim: int, *, weight: jax.Array | None, angles: Rope | None, eps: float, interpret: bool = False
) -> jax.Array:
    """The x of (B, L, H·D) as (B, H, L, D), each head as `make_heads` makes it; L a multiple of 128.

    The weight is frozen: it gets no gradient.
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


def _forward(
    head_dim: int, eps: float, interpret: bool, x: jax.Array, weight: jax.Array, angles: Rope | None
) -> tuple[jax.Array, Any]:
    return _make(head_dim, eps, interpret, x, weight, angles), (x, weight, angles)


def _backward(head_dim: int, eps: float, interpret: bool, saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, weight, angles = saved
    body = partial(_backward_block, head_dim, eps)
    return (
        _over_blocks(body, "heads_backward", head_dim, interpret, (x, gradient), (weight, angles), x.shape),
        None,
        None,
    )


_make.defvjp(_forward, _backward)


def _forward_block(head_dim: int, eps: float, x: Any, weight: Any, angles: Any, out: Any) -> None:
    for head in range(out.shape[1]):
        part = x[0, :, pl.ds(head * head_dim, head_dim)].astype(jnp.float32)  # (rows, D)
        normed = (part * _inverse_rms(part, eps) * weight[...]).astype(out.dtype)  # (rows, D)
        out[0, head] = _rotated(normed.astype(jnp.float32), angles, 1).astype(out.dtype)


def _backward_block(head_dim: int, eps: float, x: Any, gradient: Any, weight: Any, angles: Any, out: Any) -> None:
    """The gradient of x: with n = x / rms(x), dx = (dn - n mean(dn · n)) / rms(x).

    There dn is the gradient rotated back, times the weight.
    """
    for head in range(gradient.shape[1]):
        columns = pl.ds(head * head_dim, head_dim)
        part = x[0, :, columns].astype(jnp.float32)  # (rows, D)
        inverse = _inverse_rms(part, eps)  # (rows, 1)
        normed = part * inverse
        of_normed = (
            _rotated(gradient[0, head].astype(jnp.float32), angles, -1).astype(out.dtype).astype(jnp.float32)
            * weight[...]
        )
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
