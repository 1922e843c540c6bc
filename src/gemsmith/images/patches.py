"""RGB to patches, their positions and the number of soft tokens: exactly what Gemma 4's image processor makes.

The source is transformers' image_processing_pil_gemma4.py and, for the patches of `gemma4_unified`,
image_processing_gemma4_unified.py. The latter resizes with torchvision, whose values differ from Pillow's by up to 2 of
255; here Pillow resizes for both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens of an image at most, that the processor allows


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """How a model cuts images up; the defaults are those of every published Gemma 4."""

    budget: int = 280  # soft tokens of an image at most
    patch: int = 16  # pixels of a patch's side
    pooling: int = 3  # patches of a soft token's side
    merged: bool = False
    """Whether the model takes the patches of a soft token as one (`gemma4_unified`, which has no tower)."""
    positions: int | None = None
    """Of the model's patches in a line, that it has embeddings of; None: as many as any image needs."""

    @property
    def side(self) -> int:
        """Pixels of the side of one of the model's patches: 16, or 48 where they are merged."""
        return self.patch * (self.pooling if self.merged else 1)

    @property
    def dimension(self) -> int:
        """Numbers of one of the model's patches: 768, or 6,912 where they are merged."""
        return 3 * self.side**2

    @property
    def per_token(self) -> int:
        """The model's patches of a soft token: 9, or 1 where they are merged."""
        return 1 if self.merged else self.pooling**2


@dataclass(frozen=True, kw_only=True, eq=False)
class Patches:
    """An image as the model takes it; P of its patches, without padding.

    Positions are x and y, in patches; padding of the processor's has values of 0 and the position (-1, -1).
    """

    values: np.ndarray
    """float32 of shape (P, patching.dimension), from 0 to 1: row, column and channel of a patch, row by row."""
    positions: np.ndarray  # int32 of shape (P, 2)
    soft_tokens: int


def read_patching(config: Mapping[str, Any], budget: int) -> PatchConfig:
    """How the model of a config.json cuts images up."""
    vision = config.get("vision_config") or {}
    return PatchConfig(
        budget=budget,
        patch=vision.get("patch_size", PatchConfig.patch),
        pooling=vision.get("pooling_kernel_size", PatchConfig.pooling),
        merged=config.get("model_type") == "gemma4_unified",
        positions=vision.get("position_embedding_size", vision.get("mm_posemb_size")),
    )


def fitted_size(width: int, height: int, patching: PatchConfig) -> tuple[int, int]:
    """Width and height that the image is resized to: whole soft tokens, as many as the budget and its shape allow.

    >>> fitted_size(640, 480, PatchConfig()), fitted_size(1, 5000, PatchConfig(budget=70))
    ((912, 672), (48, 3360))
    """
    token = patching.patch * patching.pooling
    # The order of these operations is the processor's: another would round otherwise, and now and then count otherwise.
    factor = math.sqrt(patching.budget * token**2 / (height * width))
    tall, wide = (math.floor(factor * side / token) * token for side in (height, width))
    if not tall:
        tall, wide = token, min(width // height, patching.budget) * token
    elif not wide:
        tall, wide = min(height // width, patching.budget) * token, token
    assert 0 < tall * wide <= patching.budget * token**2, (width, height)
    return wide, tall


def count_soft_tokens(width: int, height: int, patching: PatchConfig) -> int:
    """Soft tokens of an image of so many pixels.

    >>> [count_soft_tokens(300, 400, PatchConfig(budget=budget)) for budget in BUDGETS]
    [63, 130, 266, 540, 1064]
    """
    wide, tall = fitted_size(width, height, patching)
    return wide * tall // (patching.patch * patching.pooling) ** 2


def longest_line(width: int, height: int, patching: PatchConfig) -> int:
    """The model's patches along the longer side of an image of so many pixels.

    >>> longest_line(640, 480, PatchConfig()), longest_line(1, 5000, PatchConfig(budget=70))
    (57, 210)
    """
    return max(fitted_size(width, height, patching)) // patching.side


def resize(rgb: Image.Image, patching: PatchConfig) -> Image.Image:
    """The image in the size that the model takes it in."""
    size = fitted_size(*rgb.size, patching)
    return rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)


def cut(rgb: Image.Image, patching: PatchConfig) -> np.ndarray:
    """The resized image as uint8 of shape (rows, columns, dimension): the values of Patches, not yet scaled."""
    pixels = np.asarray(resize(rgb, patching))
    side = patching.side
    rows, columns = len(pixels) // side, pixels.shape[1] // side
    parts = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4)
    return parts.reshape(rows, columns, patching.dimension)


def scale(parts: np.ndarray, patching: PatchConfig) -> Patches:
    """What `cut` gave, as the model takes it."""
    rows, columns, dimension = parts.shape
    values = parts.reshape(-1, dimension).astype(np.float32)
    # One processor multiplies by 1/255 in float64 and rounds, which for each of 0 … 255 is the float32 quotient; the
    # other multiplies in float32. A table of 256 takes six times as long.
    if patching.merged:
        values *= np.float32(1 / 255)
    else:
        values /= np.float32(255)
    y, x = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(columns))
    return Patches(values=values, positions=np.stack([x, y], axis=1), soft_tokens=rows * columns // patching.per_token)


def make_patches(rgb: Image.Image, patching: PatchConfig) -> Patches:
    """The image as the model takes it."""
    return scale(cut(rgb, patching), patching)
