"""The pictures of a run as arrays of each step, decoded in processes of their own while earlier steps run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.checkpoint import Checkpoint
from gemsmith.data import Batches
from gemsmith.data.pictures import decode_batches
from gemsmith.errors import InputError
from gemsmith.pictures.patches import Patching
from gemsmith.pictures.workers import count_processes
from gemsmith.recipe import Data, Lora
from gemsmith.train.pictures import check_patching
from gemsmith.train.tunix.images import ImageShape, batch_images, image_shape

_MOST_PROCESSES = 32
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PictureInput:
    """How the pictures of a run become arrays: the shape that all steps share, how they are cut, and their token."""

    shape: ImageShape
    patching: Patching
    image_token: int


def picture_input(checkpoint: Checkpoint, batches: Batches, data: Data, lora: Lora) -> PictureInput | None:
    """What the rows' pictures need; None where no row has any.

    Raises as train.pictures.check_patching.
    """
    patching, vision = check_patching(checkpoint, batches, data, lora), checkpoint.variant.vision
    if patching is None or vision is None:
        return None
    rows = [[picture.soft_tokens for picture in pictures] for pictures in batches.rows.pictures]
    image_token = checkpoint.config["image_token_id"]
    return PictureInput(shape=image_shape(vision, rows), patching=patching, image_token=image_token)


class PictureFeed:
    """The arrays of one step after the other, from step `first` on: of this host's rows, with their pictures.

    `fault`: why the batch after those that are ready could not be made, such as a picture that is gone. It is known
    `ahead` steps before that batch is asked for.
    """

    def __init__(self, batches: Batches, how: PictureInput, *, rows: Sequence[int], first: int, ahead: int = 0) -> None:
        self.fault: InputError | None = None
        self._how, self._ahead = how, ahead
        self._ready: deque[Arrays] = deque()
        processes = min(_MOST_PROCESSES, count_processes(len(rows) * how.shape.images))
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
            how = self._how
            images = batch_images(batch.tokens, pictures, image_token=how.image_token, shape=how.shape)
            self._ready.append(
                {
                    **batch.arrays(),
                    "patches": np.asarray(images.patches),
                    "patch_positions": np.asarray(images.positions),
                    "places": np.asarray(images.places),
                }
            )
