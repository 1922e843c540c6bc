"""An image looked at once before training, and cut up in it: by the same bytes, or not at all."""

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from gemsmith.errors import DataError
from gemsmith.images.decode import InvalidImageError, is_animated, make_rgb, read_bytes
from gemsmith.images.patches import PatchConfig, count_soft_tokens, cut, longest_line


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """A file that holds an image, and what was found when it was looked at."""

    path: str
    """Empty where the bytes came without a file."""
    sha256: str
    width: int
    height: int
    soft_tokens: int
    animated: bool = False
    """Whether it has further frames, which are not read."""


def validate_image(source: str | bytes, patching: PatchConfig) -> ImageInfo:
    """The image of a file, by its path, or of bytes, once it was decoded. Raises InvalidImageError."""
    data = read_bytes(source) if isinstance(source, str) else source
    rgb = make_rgb(data)
    line = longest_line(*rgb.size, patching)
    if patching.positions is not None and line > patching.positions:
        raise InvalidImageError(
            "too thin", f"has {line} patches in a line, and the model positions for {patching.positions}"
        )
    return ImageInfo(
        path=source if isinstance(source, str) else "",
        sha256=hashlib.sha256(data).hexdigest(),
        width=rgb.width,
        height=rgb.height,
        soft_tokens=count_soft_tokens(*rgb.size, patching),
        animated=is_animated(data),
    )


def patchify(image: ImageInfo, patching: PatchConfig) -> np.ndarray:
    """What `patches.cut` makes of the file. Raises DataError where it is gone, or has changed since validate_image."""
    remedy = "put it back as it was, or read the rows again with: gemsmith data RUN --force"
    return cut(read_rgb(image.path, image.sha256, remedy=remedy), patching)


def read_rgb(source: str | bytes, sha256: str | None, *, remedy: str) -> Image.Image:
    """The image of a file or of bytes. Raises DataError where it cannot be read, or has not that SHA-256 any more."""
    name = source if isinstance(source, str) else "an image"
    try:
        data = read_bytes(source) if isinstance(source, str) else source
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise DataError(f"{name}: has changed since its row was read; {remedy}")
        return make_rgb(data)
    except InvalidImageError as bad:
        raise DataError(f"{name}: {bad.line}; {remedy}") from None
