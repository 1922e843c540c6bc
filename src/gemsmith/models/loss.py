"""The training loss and its gradient, without ever holding the logits of a whole row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gemsmith.models.gemma4 import Gemma4
from gemsmith.models.sharding import BATCH, WEIGHTS, Axes, axis_size, constrain

# Logits of 1024 tokens are 1.07 GB in fp32 at 262,144 words, on each device.
TOKENS_PER_CHUNK = 1024
_ROWS, _WORDS = (*BATCH, "sequence"), ("tp", *WEIGHTS)


def token_nll(
    model: Gemma4, hidden: jax.Array, tokens: jax.Array, loss_mask: jax.Array, *, chunk: int = TOKENS_PER_CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The sum over all targets of -log p(target | what is before it), and the number of targets, both fp32 scalars.

        tokens     2 105  7   9 106        hidden at 7 predicts 9, at 9 predicts 106
        loss_mask  0   0  0   1   1        2 targets

    The mean over several batches is exact if their sums are divided by the sum of their counts. A device holds at most as many logits as
    `chunk` tokens have, or its share of the words for so many tokens of each device.
    """
    mesh, words = model.execution.mesh, model.embed_tokens.embedding[...]
    head = _Head(softcap=model.variant.softcap, mesh=mesh, splits_words=_splits_words(words, hidden, mesh))
    targets, weights = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (tokens, loss_mask.astype(jnp.float32)))
    # Laid out once, not for every chunk; by its first axis, after which XLA need not copy it.
    table = constrain(words.T, mesh, None, head.words)
    pieces = tuple(_in_chunks(x, mesh, chunk) for x in (hidden, targets, weights))
    return _nll(head, table, *pieces), weights.sum()


@dataclass(frozen=True, kw_only=True)
class _Head:
    """How logits are made, and whether each device makes those of some words for all rows, instead of those of its own rows."""

    softcap: float
    mesh: Mesh | None
    splits_words: bool

    @property
    def words(self) -> Axes:
        return _WORDS if self.splits_words else "tp"

    def lay_out(self, x: jax.Array, *axes: Axes) -> jax.Array:
        """The array, laid out so where words are split; else it lies as its rows do."""
        return constrain(x, self.mesh, *axes) if self.splits_words else x


def _splits_words(words: jax.Array, hidden: jax.Array, mesh: Mesh | None) -> bool:
    """Whether fewer bytes move if hidden states come to the words, and their float32 gradients go back, than if words come to them.

    Never in float32, where it would be seen that words are added up in another order: 1.2e-6 of a matrix' gradient.
    """
    if mesh is None or hidden.dtype == jnp.float32 or axis_size(mesh, WEIGHTS) == 1 or words.shape[0] % axis_size(mesh, _WORDS):
        return False
    tokens = hidden.shape[0] * hidden.shape[1] // axis_size(mesh, "replica")
    return tokens * (hidden.dtype.itemsize + 4) < words.shape[0] * words.dtype.itemsize


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(head: _Head, table: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted nll of hidden (chunks, B, C, E), targets and weights (chunks, B, C), with the table (E, V)."""

    def add_chunk(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + _chunk_nll(head, table, *piece)[0], None

    return jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), (hidden, targets, weights))[0]


def _nll_and_gradient(head: _Head, table: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[Any, Any]:
    """The sum is linear in what it is multiplied by, so its gradient is made here, from logits that are at hand, not made again."""

    def add_chunk(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        nll, logits, log_total = _chunk_nll(head, table, *piece)
        _, some_targets, some_weights = (head.lay_out(x, "replica") for x in piece)
        surplus = jnp.exp(logits - log_total[..., None]) - _is_target(logits, some_targets)
        slope = surplus * some_weights[..., None]
        if head.softcap:
            slope *= 1 - jnp.square(logits / head.softcap)
        # Made before the matmul, which on TPU would make it again for each of its tiles (docs/log.md).
        slope = jax.lax.optimization_barrier(slope.astype(table.dtype))
        gradient = jnp.einsum("bcv,ev->bce", slope, table, preferred_element_type=jnp.float32)  # summed over devices before it is rounded
        return total + nll, head.lay_out(gradient, _ROWS).astype(table.dtype)

    total, gradient = jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), (hidden, targets, weights))
    return total, gradient


def _scale_gradient(head: _Head, gradient: jax.Array, slope: jax.Array) -> tuple[Any, ...]:  # noqa: ARG001 - as custom_vjp calls it
    return None, (gradient * slope).astype(gradient.dtype), None, None


_nll.defvjp(_nll_and_gradient, _scale_gradient)


def _chunk_nll(
    head: _Head, table: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    hidden, targets, weights = (head.lay_out(x, "replica") for x in (hidden, targets, weights))
    logits = jnp.einsum("bce,ev->bcv", hidden, table, preferred_element_type=jnp.float32)
    logits = head.lay_out(logits, "replica", None, _WORDS)
    if head.softcap:
        logits = head.softcap * jnp.tanh(logits / head.softcap)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)
    return jnp.sum((log_total - chosen) * weights), logits, log_total


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    words = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return words == targets[..., None]


def _in_chunks(x: jax.Array, mesh: Mesh | None, chunk: int) -> jax.Array:
    """The x of (B, L, …) as (chunks, B · S, C, …), S the devices that a row is split over; filled up with zeros at the end."""
    batch, length = x.shape[:2]
    shards, rows = (1, batch) if mesh is None else (axis_size(mesh, "sequence"), max(1, batch // axis_size(mesh, BATCH)))
    x = x.reshape(batch * shards, length // shards, *x.shape[2:])
    size = max(1, min(chunk // rows, x.shape[1]))
    chunks = -(-x.shape[1] // size)
    padded = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
    pieces = jnp.moveaxis(padded.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)
    return constrain(pieces, mesh, None, _ROWS)
