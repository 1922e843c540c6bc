"""Images of a batch as a step takes them: padded to the shape of the step's bucket, with the places of soft tokens.

Axes: B rows, N images of a row, P patches, C values of a patch, S soft tokens of an image, L positions of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.data.buckets import Bucket, join, room_for
from gemsmith.models.vision import Images, patches_of
from gemsmith.pictures.patches import Patches
from gemsmith.sizing import Pictures
from gemsmith.zoo import Vision


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What every row of a step has room for: N images of S soft tokens, each of P patches of C values."""

    images: int
    soft_tokens: int
    patches: int
    patch_dim: int

    @classmethod
    def of(cls, pictures: Pictures) -> "ImageShape":
        """That of the pictures that a plan reckons with."""
        return cls(
            images=pictures.images,
            soft_tokens=pictures.soft_tokens,
            patches=pictures.patches,
            patch_dim=pictures.vision.patch_dim,
        )


def image_shape(vision: Vision, rows: Sequence[Sequence[int]]) -> ImageShape:
    """The one shape for rows whose images have so many soft tokens each: room for the most images and the largest."""
    return bucket_shape(vision, join([room_for(row) for row in rows]))


def bucket_shape(vision: Vision, bucket: Bucket) -> ImageShape:
    """The shape of rows that have as much room."""
    patches = patches_of(vision, bucket.soft_tokens)
    return ImageShape(images=bucket.images, soft_tokens=bucket.soft_tokens, patches=patches, patch_dim=vision.patch_dim)


def batch_images(
    tokens: np.ndarray, rows: Sequence[Sequence[Patches]], *, image_token: int, shape: ImageShape
) -> Images:
    """The images of rows (B, L), each row's in the order in which its soft tokens stand.

    tokens 2 9 9 3 9, its pictures of 2 and 1 soft tokens, S = 3  ->  places [[1 2 5] [4 5 5]]
    """
    (batch, length), slots = tokens.shape, (len(tokens), shape.images)
    patches = np.zeros((*slots, shape.patches, shape.patch_dim), np.float32)
    positions = np.full((*slots, shape.patches, 2), -1, np.int32)
    places = np.full((*slots, shape.soft_tokens), length, np.int32)
    assert len(rows) == batch, f"pictures of {len(rows)} rows for {batch}"
    for row, pictures in enumerate(rows):
        there, begin = np.flatnonzero(tokens[row] == image_token), 0
        count = sum(picture.soft_tokens for picture in pictures)
        assert count == len(there), f"row {row}: {len(there)} soft tokens for pictures of {count}"
        for number, picture in enumerate(pictures):
            real = np.flatnonzero((picture.positions != -1).any(axis=-1))
            patches[row, number, : len(real)] = picture.values[real]
            positions[row, number, : len(real)] = picture.positions[real]
            end = begin + picture.soft_tokens
            places[row, number, : picture.soft_tokens] = there[begin:end]
            begin = end
    return Images(patches=patches, positions=positions, places=places)  # type: ignore[arg-type]  # numpy, until placed
