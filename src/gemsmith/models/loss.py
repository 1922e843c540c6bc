"""The training loss, without ever holding the logits of a whole row."""

import jax
import jax.numpy as jnp

from gemsmith.models.gemma4 import Gemma4

# Logits of 256 positions of a row are 0.27 GB in fp32 at 262,144 words; of 4096 they would be 4.3 GB, and as much again for the gradient.
POSITIONS_PER_CHUNK = 256


def token_nll(
    model: Gemma4, hidden: jax.Array, tokens: jax.Array, loss_mask: jax.Array, *, chunk: int = POSITIONS_PER_CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The sum over all targets of -log p(target | what is before it), and the number of targets, both fp32 scalars.

        tokens     2 105  7   9 106        hidden at 7 predicts 9, at 9 predicts 106
        loss_mask  0   0  0   1   1        2 targets

    The mean over several batches is exact if their sums are divided by the sum of their counts.
    """
    targets, weights = tokens[:, 1:], loss_mask[:, 1:].astype(jnp.float32)
    pieces = tuple(_cut_length(x, chunk) for x in (hidden[:, :-1], targets, weights))

    # Checkpointed, so that the backward pass computes each chunk's logits again instead of keeping them.
    @jax.checkpoint
    def add_chunk(total: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        some_hidden, some_targets, some_weights = piece
        logits = model.logits(some_hidden)
        chosen = jnp.take_along_axis(logits, some_targets[..., None], axis=-1)[..., 0]
        nll = jax.nn.logsumexp(logits, axis=-1) - chosen
        return total + jnp.sum(nll * some_weights), None

    total, _ = jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), pieces)
    return total, weights.sum()


def _cut_length(x: jax.Array, chunk: int) -> jax.Array:
    """The x of (B, L, …) as (chunks, B, chunk, …), padded with zeros at the end."""
    batch, length = x.shape[:2]
    chunks = -(-length // chunk)
    padded = jnp.pad(x, [(0, 0), (0, chunks * chunk - length), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(padded.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)
