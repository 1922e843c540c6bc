"""Images of a run's rows as transformers takes them: decoded ahead, padded, and which soft token is of which.

Axes: B rows, L length, N images of all rows, P patches of the largest, C values of a patch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from gemsmith.data.packing import Rows
from gemsmith.errors import DataError
from gemsmith.images.patches import Patches

Images = list[list[Patches]]  # those of each row, in the order of their soft tokens


def number_images(tokens: np.ndarray, rows: Sequence[Sequence[Patches]], image_token: int) -> np.ndarray:
    """From 1 the number of the image in its row that each token is a soft token of, 0 where it is text: int32 (B, L).

        tokens  2 9 9 3 9 9 4, images of 2 and 2 soft tokens, image_token 9  →  0 1 1 0 2 2 0

    Raises DataError where a row has other soft tokens than its images: transformers would take the place of one that
    has none for padding, and images too many for those of the next row.
    """
    numbers = np.zeros(tokens.shape, np.int32)
    for row, images in enumerate(rows):
        there, counts = np.flatnonzero(tokens[row] == image_token), [image.soft_tokens for image in images]
        if len(there) != sum(counts):
            raise DataError(
                f"a packed row has {len(there):,} soft tokens, and images of {sum(counts):,}; write the rows again "
                "with: gemsmith data RUN --force"
            )
        numbers[row, there] = np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)
    return numbers


def pad_images(rows: Sequence[Sequence[Patches]]) -> dict[str, torch.Tensor]:
    """pixel_values (N, P, C), float32, and image_position_ids (N, P, 2), of which (-1, -1) is padding.

    In the order in which the rows have their soft tokens; nothing where they have none.
    """
    images = [image for row in rows for image in row]
    if not images:
        return {}
    values = [torch.from_numpy(image.values) for image in images]
    positions = [torch.from_numpy(image.positions) for image in images]
    return {
        "pixel_values": pad_sequence(values, batch_first=True),
        "image_position_ids": pad_sequence(positions, batch_first=True, padding_value=-1).long(),
    }


def count_patches(batch: Rows, parts: int) -> np.ndarray:
    """Two numbers that are to each other as the patches of a step's images are to what these are padded to.

    Rows are embedded in so many parts, each padded to its largest image. Images of 2, 3, 3 soft tokens in one: 8, 9.
    """
    counts = np.zeros(2, np.int64)
    for rows in np.array_split(np.arange(len(batch.images)), parts):
        images = [image.soft_tokens for row in rows for image in batch.images[row]]
        counts += sum(images), len(images) * max(images, default=0)
    return counts
