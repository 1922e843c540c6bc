"""The pictures of a run as arrays of each step, decoded in processes of their own while earlier steps run."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gemsmith.checkpoint import Checkpoint
from gemsmith.checkpoint.folder import read_config
from gemsmith.data import Batches
from gemsmith.data.pictures import decode_batches
from gemsmith.errors import CheckpointError, InputError, RecipeError
from gemsmith.pictures.check import Picture
from gemsmith.pictures.patches import Patching, fitted_size, read_patching
from gemsmith.pictures.workers import count_processes
from gemsmith.recipe import Data, Lora
from gemsmith.train.tunix.images import ImageShape, batch_images, image_shape
from gemsmith.zoo import VISION, Vision

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

    Raises RecipeError for adapters on what no row would train, CheckpointError for a checkpoint that takes none, or has
    fewer positions than a picture has patches.
    """
    if not batches.rows.pictures:
        if VISION in lora.targets:
            raise RecipeError(
                f"lora.targets: {VISION} adapts what embeds pictures, and no row of data.train has one; take it out"
            )
        return None
    config, vision = read_config(checkpoint.folder), checkpoint.variant.vision
    patching = read_patching(config, data.image_tokens)
    if vision is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its config.json has no vision_config, and rows of data.train have "
            "pictures; give one that takes pictures"
        )
    rows = []
    for pictures in batches.rows.pictures:
        _check_positions(checkpoint, pictures, patching, vision)
        rows.append([picture.soft_tokens for picture in pictures])
    return PictureInput(shape=image_shape(vision, rows), patching=patching, image_token=config["image_token_id"])


def _check_positions(checkpoint: Checkpoint, pictures: Iterable[Picture], patching: Patching, vision: Vision) -> None:
    for picture in pictures:
        longest = max(fitted_size(picture.width, picture.height, patching)) // patching.side
        if longest > vision.positions:
            raise CheckpointError(
                f"{picture.path}: has {longest} patches in a line, and checkpoint {checkpoint.source} positions for "
                f"{vision.positions}; lower data.image_tokens, or take the picture out"
            )


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
