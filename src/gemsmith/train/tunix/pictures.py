"""The pictures of a run as arrays of each step, decoded in processes of their own while earlier steps run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.checkpoint import Checkpoint
from gemsmith.data import Batches
from gemsmith.data.buckets import Buckets, find_buckets
from gemsmith.data.pictures import decode_batches
from gemsmith.errors import InputError
from gemsmith.pictures.patches import Patching
from gemsmith.pictures.workers import count_processes
from gemsmith.recipe import Data, Lora
from gemsmith.records import PictureBucket, TrainStep
from gemsmith.train.pictures import check_patching
from gemsmith.train.tunix.images import ImageShape, batch_images, bucket_shape
from gemsmith.zoo import Vision

_MOST_PROCESSES = 32
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PictureInput:
    """How the pictures of a run become arrays: the shape of each step, how they are cut, and their token."""

    buckets: Buckets
    vision: Vision
    patching: Patching
    image_token: int

    def shape(self, step: int) -> ImageShape:
        """What each row of the step, from 1, has room for."""
        return bucket_shape(self.vision, self.buckets.of(step))


def picture_input(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> PictureInput | None:
    """What the rows' pictures need; None where no row has any.

    Raises as train.pictures.check_patching.
    """
    patching, vision = check_patching(checkpoint, batches, data, lora), checkpoint.variant.vision
    if patching is None or vision is None:
        return None
    rows = [[picture.soft_tokens for picture in pictures] for pictures in batches.rows.pictures]
    places = {"total_rows": batches.total_rows, "rows_per_step": batches.rows_per_step}
    buckets = find_buckets(rows, batches.order, **places)
    image_token = checkpoint.config["image_token_id"]
    return PictureInput(buckets=buckets, vision=vision, patching=patching, image_token=image_token)


def count_buckets(how: PictureInput, steps: Sequence[TrainStep], rows_per_step: int) -> tuple[PictureBucket, ...]:
    """The buckets that these steps took, the smallest first, with what of them was padding."""
    counted = []
    for bucket in how.buckets.buckets:
        soft_tokens = [step.soft_tokens for step in steps if how.buckets.of(step.step) == bucket]
        if soft_tokens:
            padding = 1 - sum(soft_tokens) / (len(soft_tokens) * rows_per_step * bucket.size)
            counted.append(PictureBucket(**bucket._asdict(), steps=len(soft_tokens), padded_patches=padding))
    return tuple(counted)


def padded_share(buckets: Sequence[PictureBucket]) -> float:
    """Of the patches of all steps, the share that is padding.

    >>> padded_share([PictureBucket(images=2, soft_tokens=64, steps=3, padded_patches=0.375)])
    0.375
    """
    sizes = [bucket.images * bucket.soft_tokens * bucket.steps for bucket in buckets]
    padded = sum(size * (bucket.padded_patches or 0) for size, bucket in zip(sizes, buckets, strict=True))
    return padded / sum(sizes)


class PictureFeed:
    """The arrays of one step after the other, from step `first` on: of this host's rows, with their pictures.

    `fault`: why the batch after those that are ready could not be made, such as a picture that is gone. It is known
    `ahead` steps before that batch is asked for, and `step` is that batch's.
    """

    def __init__(self, batches: Batches, how: PictureInput, *, rows: Sequence[int], first: int, ahead: int = 0) -> None:
        self.fault: InputError | None = None
        self._how, self._ahead, self.step = how, ahead, first
        self._ready: deque[Arrays] = deque()
        processes = min(_MOST_PROCESSES, count_processes(len(rows) * how.buckets.buckets[-1].images))
        steps = range(first, batches.steps + 1)
        self._decoded = decode_batches(batches, steps, how.patching, processes=processes, rows=rows)
        self._fill(ahead + 1)

    def take(self) -> Arrays | None:
        """The next step's arrays; None after the last, or where they could not be made."""
        self._fill(self._ahead + 1)
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Ends the processes."""
        self._decoded.close()

    def _fill(self, count: int) -> None:
        while len(self._ready) < count:
            try:
                batch, pictures = next(self._decoded)
            except StopIteration:
                return
            except InputError as error:
                self.fault = error
                return
            how, shape = self._how, self._how.shape(self.step)
            self.step += 1
            images = batch_images(batch.tokens, pictures, image_token=how.image_token, shape=shape)
            self._ready.append(
                {
                    **batch.arrays(),
                    "patches": np.asarray(images.patches),
                    "patch_positions": np.asarray(images.positions),
                    "places": np.asarray(images.places),
                }
            )
