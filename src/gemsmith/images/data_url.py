"""An image as a server is sent it: the pixels that training saw, in a data: URL.

A server decodes, turns and resizes by rules of its own: vLLM's image processor resizes with torchvision, whose values
differ from Pillow's. So it gets a PNG of RGB that was made here, already of the size that the processor would make it,
where it leaves that size alone.
"""

import base64
from collections.abc import Iterable
from io import BytesIO

from PIL import Image

from gemsmith.images.check import ImageInfo, read_rgb
from gemsmith.images.decode import png_bytes
from gemsmith.images.patches import PatchConfig, fitted_size, resize

_SCHEME = "data:image/png;base64,"
_REMEDY = "put it back as it was, or give another image"
THUMBNAIL_SIDE, _THUMBNAIL_QUALITY = 96, 80


def to_data_url(source: str | bytes, patching: PatchConfig | None, *, sha256: str | None = None) -> str:
    """The data: URL of a file's image, or of that in bytes; without `patching` of its own size.

    Raises DataError where it cannot be read, or has not that SHA-256 any more.
    """
    rgb = read_rgb(source, sha256, remedy=_REMEDY)
    return _SCHEME + base64.b64encode(png_bytes(sent_rgb(rgb, patching))).decode()


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
