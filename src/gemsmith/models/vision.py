"""Images as a model takes them: patches with their positions, and the places of their soft tokens in the rows.

Axes: B rows, N images of a row, P patches, C values of a patch, S soft tokens of an image at most, L positions of a
row, E the text model's width, M soft tokens of a row at most.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from gemsmith.execution import MAX_IMAGE_TOKENS
from gemsmith.zoo import Vision


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
class ImageTokens:
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


def patches_of(vision: Vision, soft_tokens: int) -> int:
    """Patches of an image with so many soft tokens."""
    return soft_tokens * vision.patches_per_token
