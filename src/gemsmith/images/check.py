"""An image looked at once before training, then cut up in it and sent to servers: by the same bytes, or not at all.

A server decodes, turns and resizes by rules of its own: vLLM's image processor resizes with torchvision, whose values
differ from Pillow's. So it gets a PNG of RGB that was made here, in a data: URL, already of the size that the processor
would make it, where it leaves that size alone.
"""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from gemsmith.errors import DataError
from gemsmith.images.decode import InvalidImageError, is_animated, make_rgb, png_bytes, read_bytes
from gemsmith.images.patches import PatchConfig, count_soft_tokens, cut, fitted_size, longest_line, resize

_REMEDY = "put it back as it was, or give another image"
THUMBNAIL_SIDE, _THUMBNAIL_QUALITY = 96, 80


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """A file that holds an image, and what was found when it was looked at."""

    path: str  # empty where the bytes came without a file
    sha256: str
    width: int
    height: int
    soft_tokens: int
    animated: bool = False  # whether it has further frames, which are not read


def validate_image(source: str | bytes, patching: PatchConfig) -> ImageInfo:
    """The image of a file, by its path, or of bytes, once it was decoded. Raises InvalidImageError."""
    data = read_bytes(source) if isinstance(source, str) else source
    rgb = make_rgb(data)
    line = longest_line(*rgb.size, patching)
    if patching.positions is not None and line > patching.positions:
        what = f"has {line} patches in a line, and the model positions for {patching.positions}"
        raise InvalidImageError("too thin", what)
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


def to_data_url(source: str | bytes, patching: PatchConfig | None, *, sha256: str | None = None) -> str:
    """The data: URL of an image, in its own size without `patching`. Raises DataError for a bad or changed one."""
    rgb = read_rgb(source, sha256, remedy=_REMEDY)
    return "data:image/png;base64," + base64.b64encode(png_bytes(sent_rgb(rgb, patching))).decode()


def sent_rgb(rgb: Image.Image, patching: PatchConfig | None) -> Image.Image:
    """The image as it is sent: resized as in training, or as it is where the server would resize that again."""
    return resize(rgb, patching) if patching is not None and keeps_size(*rgb.size, patching) else rgb


def keeps_size(width: int, height: int, patching: PatchConfig) -> bool:
    """Whether an image that was resized for the model would not be resized again.

    Rounding down to whole soft tokens can leave room for one more row of them: for 12 by 5 where 11 by 5 came out.

    >>> keeps_size(640, 480, PatchConfig()), keeps_size(800, 400, PatchConfig())
    (True, False)
    """
    size = fitted_size(width, height, patching)
    return fitted_size(*size, patching) == size


def count_resized_again(images: Iterable[ImageInfo], patching: PatchConfig) -> int:
    """How many of the images a server resizes itself, so that its pixels differ a little from the trained ones."""
    return sum(not keeps_size(image.width, image.height, patching) for image in images)


def thumbnail_url(source: str | bytes) -> str:
    """A small JPEG of an image for a page, about 3 KB. Raises DataError as to_data_url."""
    small = read_rgb(source, None, remedy=_REMEDY)
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    stream = BytesIO()
    small.save(stream, "JPEG", quality=_THUMBNAIL_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
