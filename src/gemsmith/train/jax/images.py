"""The images of a run as arrays of each step, padded to its bucket, decoded in processes while earlier steps run.

Axes: B rows, N images of a row, P patches, C values of a patch, S soft tokens of an image, L positions of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.arch import Vision
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.data.batches import Batches, Buckets, BucketShape, find_buckets
from gemsmith.data.packing import Rows
from gemsmith.hardware.model import ImageWork
from gemsmith.images.patches import PatchConfig, Patches
from gemsmith.images.workers import count_processes
from gemsmith.models.vision import Images
from gemsmith.recipe.schema import Data, Lora
from gemsmith.runs.records import ImageBucket, TrainStep
from gemsmith.train.inputs import ImageFeed, check_patching


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What every row of a step has room for: N images of S soft tokens, each of P patches of C values."""

    images: int
    soft_tokens: int
    patches: int
    patch_dim: int


def bucket_shape(vision: Vision, bucket: BucketShape | ImageWork) -> ImageShape:
    """The shape of rows that have as much room."""
    patches = bucket.soft_tokens * vision.patches_per_token
    return ImageShape(images=bucket.images, soft_tokens=bucket.soft_tokens, patches=patches, patch_dim=vision.patch_dim)


def batch_images(
    tokens: np.ndarray, rows: Sequence[Sequence[Patches]], *, image_token: int, shape: ImageShape
) -> Images:
    """The images of rows (B, L), each row's in the order in which its soft tokens stand.

    tokens 2 9 9 3 9, its images of 2 and 1 soft tokens, S = 3  ->  places [[1 2 5] [4 5 5]]
    """
    (batch, length), slots = tokens.shape, (len(tokens), shape.images)
    patches = np.zeros((*slots, shape.patches, shape.patch_dim), np.float32)
    positions = np.full((*slots, shape.patches, 2), -1, np.int32)
    places = np.full((*slots, shape.soft_tokens), length, np.int32)
    assert len(rows) == batch, f"images of {len(rows)} rows for {batch}"
    for row, images in enumerate(rows):
        there, begin = np.flatnonzero(tokens[row] == image_token), 0
        count = sum(image.soft_tokens for image in images)
        assert count == len(there), f"row {row}: {len(there)} soft tokens for images of {count}"
        for number, image in enumerate(images):
            real = np.flatnonzero((image.positions != -1).any(axis=-1))
            patches[row, number, : len(real)] = image.values[real]
            positions[row, number, : len(real)] = image.positions[real]
            end = begin + image.soft_tokens
            places[row, number, : image.soft_tokens] = there[begin:end]
            begin = end
    return Images(patches=patches, positions=positions, places=places)  # type: ignore[arg-type]  # numpy, until placed


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ImageLayout:
    """How the images of a run become arrays: the shape of each step, how they are cut, and their token."""

    buckets: Buckets
    vision: Vision
    patching: PatchConfig
    image_token: int

    def shape(self, step: int) -> ImageShape:
        """What each row of the step, from 1, has room for."""
        return bucket_shape(self.vision, self.buckets.of(step))

    def feed(self, batches: Batches, *, rows: Sequence[int], first: int, ahead: int = 0) -> ImageFeed:
        processes = min(32, count_processes(len(rows) * self.buckets.buckets[-1].images))
        return ImageFeed(batches, self.patching, rows=rows, first=first, processes=processes, ahead=ahead)

    def arrays(self, step: int, batch: Rows, rows: Sequence[Sequence[Patches]]) -> Arrays:
        """What the step takes of some of its rows, and of the images of each."""
        images = batch_images(batch.tokens, rows, image_token=self.image_token, shape=self.shape(step))
        patches, positions, places = map(np.asarray, (images.patches, images.positions, images.places))
        return {**batch.arrays(), "patches": patches, "patch_positions": positions, "places": places}


def image_input(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> ImageLayout | None:
    """What the rows' images need; None where no row has any. Raises as check_patching."""
    patching, vision = check_patching(checkpoint, batches, data, lora), checkpoint.variant.vision
    if patching is None or vision is None:
        return None
    rows = [[image.soft_tokens for image in images] for images in batches.rows.images]
    places = {"total_rows": batches.total_rows, "global_batch_size": batches.global_batch_size}
    buckets = find_buckets(rows, batches.order, **places)
    image_token = checkpoint.config["image_token_id"]
    return ImageLayout(buckets=buckets, vision=vision, patching=patching, image_token=image_token)


def count_buckets(how: ImageLayout, steps: Sequence[TrainStep], global_batch_size: int) -> tuple[ImageBucket, ...]:
    """The buckets that these steps took, the smallest first, with what of them was padding."""
    counted = []
    for bucket in how.buckets.buckets:
        soft_tokens = [step.soft_tokens for step in steps if how.buckets.of(step.step) == bucket]
        if soft_tokens:
            padding = 1 - sum(soft_tokens) / (len(soft_tokens) * global_batch_size * bucket.size)
            counted.append(ImageBucket(**bucket._asdict(), steps=len(soft_tokens), padding_fraction=padding))
    return tuple(counted)
