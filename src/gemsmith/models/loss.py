"""The training loss, its gradient and token accuracy, without ever holding the logits of a whole row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gemsmith.models.gemma4 import Gemma4
from gemsmith.models.sharding import BATCH, WEIGHTS, Axes, axis_size, constrain
from gemsmith.recipe.backends import LOGIT_TOKENS, splits_vocabulary

_ROWS, _VOCABULARY = (*BATCH, "sequence"), ("tp", *WEIGHTS)


def token_nll(
    model: Gemma4, hidden: jax.Array, tokens: jax.Array, loss_mask: jax.Array, *, chunk: int = LOGIT_TOKENS
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of -log p(target | what is before it), the number of targets, how many have the highest logit; fp32.

        tokens     2 105  7   9 106        hidden at 7 predicts 9, at 9 predicts 106
        loss_mask  0   0  0   1   1        2 targets

    The mean over several batches is exact if their sums are divided by the sum of their counts. A device holds at most
    as many logits as `chunk` tokens have, or its share of the vocabulary for so many tokens of each device.
    """
    mesh, embedding = model.execution.mesh, model.embed_tokens.embedding[...].astype(hidden.dtype)  # (V, E)
    optimizations = model.execution.optimizations
    head = _Head(
        softcap=model.variant.softcap,
        mesh=mesh,
        splits_vocabulary=optimizations.splits_vocabulary and _splits_vocabulary(embedding, hidden, mesh),
        isolates_matmuls=optimizations.isolates_matmuls,
    )
    targets, weights = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (tokens, loss_mask.astype(jnp.float32)))  # (B, L)
    # Laid out once, not for every chunk; by its first axis, after which XLA need not copy it.
    matrix = constrain(embedding.T, mesh, None, _VOCABULARY if head.splits_vocabulary else "tp")  # (E, V)
    pieces = tuple(_in_chunks(x, mesh, chunk) for x in (hidden, targets, weights))  # (chunks, B·S, C, …)
    nll, correct = _nll(head, matrix, *pieces)
    return nll, weights.sum(), correct


@dataclass(frozen=True, kw_only=True)
class _Head:
    """How logits are made."""

    softcap: float
    mesh: Mesh | None
    splits_vocabulary: bool
    """Whether each device makes those of its part of the vocabulary for all rows, instead of all for its own rows."""
    isolates_matmuls: bool

    def lay_out(self, x: jax.Array, *axes: Axes) -> jax.Array:
        """The array, laid out so where the vocabulary is split; else it lies as its rows do."""
        return constrain(x, self.mesh, *axes) if self.splits_vocabulary else x


def _splits_vocabulary(embedding: jax.Array, hidden: jax.Array, mesh: Mesh | None) -> bool:
    return mesh is not None and splits_vocabulary(
        tokens=hidden.shape[0] * hidden.shape[1] // axis_size(mesh, "replica"),
        vocabulary=embedding.shape[0],
        dtype_bytes=hidden.dtype.itemsize,
        shards=axis_size(mesh, WEIGHTS),
        tp=axis_size(mesh, "tp"),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(head: _Head, matrix: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """(2,): the weighted nll and the weight of the targets that have the highest logit.

    Of hidden (chunks, B, C, E), targets and weights (chunks, B, C); `matrix` (E, V) is the head.
    """

    def add_chunk(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + _chunk_nll(head, matrix, *piece)[0], None

    return jax.lax.scan(add_chunk, jnp.zeros(2, jnp.float32), (hidden, targets, weights))[0]


def _nll_and_gradient(head: _Head, *inputs: Any) -> tuple[Any, Any]:
    """The nll and its gradients, which need no later slope: made from the logits at hand, they are only scaled by that.

    That of the matrix, float32, is made where it is trained.
    """
    matrix, *pieces = (each.value for each in inputs)

    def add_chunk(total: Any, piece: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        sums, logits, log_total = _chunk_nll(head, matrix, *piece)
        some_hidden, some_targets, some_weights = (head.lay_out(x, "replica") for x in piece)
        surplus = jnp.exp(logits - log_total[..., None]) - _is_target(logits, some_targets)  # (B, C, V)
        slope = surplus * some_weights[..., None]  # (B, C, V)
        if head.softcap:
            slope *= 1 - jnp.square(logits / head.softcap)
        slope = slope.astype(matrix.dtype)
        if head.isolates_matmuls:  # fused into the matmul, it would be recomputed for each tile on TPU (docs/log)
            slope = jax.lax.optimization_barrier(slope)
        # Summed over devices before it is rounded.
        gradient = jnp.einsum("bcv,ev->bce", slope, matrix, preferred_element_type=jnp.float32)
        (total, of_matrix), gradient = total, head.lay_out(gradient, _ROWS).astype(matrix.dtype)
        if of_matrix is not None:
            some = jnp.einsum("bce,bcv->ev", some_hidden, slope, preferred_element_type=jnp.float32)
            of_matrix = of_matrix + lay_out(some)
        return (total + sums, of_matrix), gradient

    def lay_out(gradient: jax.Array) -> jax.Array:
        return constrain(gradient, head.mesh, None, _VOCABULARY if head.splits_vocabulary else "tp")  # (E, V)

    zeros = lay_out(jnp.zeros(matrix.shape, jnp.float32)) if inputs[0].perturbed else None
    (total, of_matrix), gradient = jax.lax.scan(add_chunk, (jnp.zeros(2, jnp.float32), zeros), tuple(pieces))
    return total, (of_matrix, gradient)


def _scale_gradient(head: _Head, made: tuple[Any, jax.Array], slope: jax.Array) -> tuple[Any, ...]:  # noqa: ARG001 - as custom_vjp calls it
    of_matrix, gradient = made
    scaled = (gradient * slope[0]).astype(gradient.dtype)
    return None if of_matrix is None else (of_matrix * slope[0]).astype(gradient.dtype), scaled, None, None


_nll.defvjp(_nll_and_gradient, _scale_gradient, symbolic_zeros=True)


def _chunk_nll(
    head: _Head, matrix: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    hidden, targets, weights = (head.lay_out(x, "replica") for x in (hidden, targets, weights))
    logits = jnp.einsum("bce,ev->bcv", hidden, matrix, preferred_element_type=jnp.float32)  # (B, C, V)
    logits = head.lay_out(logits, "replica", None, _VOCABULARY)
    if head.softcap:
        logits = head.softcap * jnp.tanh(logits / head.softcap)
    log_total = jax.nn.logsumexp(logits, axis=-1)  # (B, C)
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)  # (B, C)
    # XLA has the maximum from logsumexp; two sums in one array cross devices as one.
    is_highest = chosen >= jnp.max(logits, axis=-1)
    sums = jnp.sum(jnp.stack([log_total - chosen, is_highest.astype(jnp.float32)]) * weights, axis=(1, 2))  # (2,)
    return sums, logits, log_total


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    tokens = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)  # (B, C, V)
    return tokens == targets[..., None]  # (B, C, V)


def _in_chunks(x: jax.Array, mesh: Mesh | None, chunk: int) -> jax.Array:
    """The x of (B, L, …) as (chunks, B · S, C, …), S the devices that a row is split over; zeros fill the last one."""
    batch, length = x.shape[:2]
    shards = 1 if mesh is None else axis_size(mesh, "sequence")
    rows = batch if mesh is None else max(1, batch // axis_size(mesh, BATCH))
    x = x.reshape(batch * shards, length // shards, *x.shape[2:])  # (B·S, L/S, …)
    size = max(1, min(chunk // rows, x.shape[1]))
    chunks = -(-x.shape[1] // size)
    padded = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])  # (B·S, chunks·C, …)
    pieces = jnp.moveaxis(padded.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)  # (chunks, B·S, C, …)
    return constrain(pieces, mesh, None, _ROWS)
