"""One rule that makes RGB of an image's bytes, at reading, so that training and serving see the same pixels.

Turned as EXIF says; of several frames the first; what is transparent, on white (as vLLM puts it); of 16 bits the upper
eight (as Pillow does where there are three channels); CMYK, palettes and greys by Pillow's conversion; color profiles
are not read. Images that came as bytes are kept in files that have their SHA-256 for a name.
"""

import hashlib
import os
import warnings
from collections.abc import Collection
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gemsmith.errors import MachineError

Reason = Literal["missing", "empty", "not an image", "damaged", "too large", "wrong mode", "too thin"]

# Those that decode in this process and run no other program, as EPS would; JPEG includes what phones save as MPO.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# From here on Pillow takes an image for a decompression bomb: a quarter of a gigabyte of RGB.
MAX_PIXELS = 89_478_485
MAX_FILE_BYTES = 256 * 2**20
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
_CONVERTED = (*_TRANSPARENT, "1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")


class InvalidImageError(Exception):
    """An image that cannot be used: its kind of fault, and one line that says more."""

    def __init__(self, reason: Reason, line: str) -> None:
        super().__init__(reason, line)  # both, for pickle makes the same again of them
        self.reason: Reason = reason
        self.line = line


def read_bytes(path: str) -> bytes:
    """What the file holds. Raises InvalidImageError where it does not exist, cannot be read, or is huge."""
    file = Path(path)
    try:
        if not file.is_file():
            raise InvalidImageError("missing", "does not exist, or not a file")
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise InvalidImageError("too large", f"has {size:,} bytes; allowed are {MAX_FILE_BYTES:,}")
        return file.read_bytes()
    except (OSError, ValueError) as error:  # the second: a path with a NUL
        raise InvalidImageError("missing", f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def make_rgb(data: bytes) -> Image.Image:
    """The image in mode RGB, with nothing but its pixels. Raises InvalidImageError."""
    if not data:
        raise InvalidImageError("empty", "holds no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is huge, a line below; of odd metadata, nothing to do
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size  # from the header, before anything is decoded
                if not width * height:
                    raise InvalidImageError("empty", f"has no pixels: {width} × {height}")
                if width * height > MAX_PIXELS:
                    raise InvalidImageError("too large", f"has {width} × {height} pixels; allowed are {MAX_PIXELS:,}")
                rgb = _convert(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise InvalidImageError("not an image", f"is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise InvalidImageError("too large", f"has more than {MAX_PIXELS:,} pixels") from None
    except (InvalidImageError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a decoder raises anything on damaged bytes
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise InvalidImageError("damaged", f"cannot be decoded ({why})") from None
    rgb.info.clear()
    return rgb


def png_bytes(rgb: Image.Image) -> bytes:
    """The same pixels as a PNG: what is sent to a server, so that it can make nothing else of the file."""
    stream = BytesIO()
    rgb.save(stream, "PNG")
    return stream.getvalue()


def is_animated(data: bytes) -> bool:
    """Whether there is a second frame, of which make_rgb takes none; the data are such that it makes RGB of them."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            # A phone's image may hold a depth map as its second image.
            return opened.format != "MPO" and bool(getattr(opened, "is_animated", False))
    except Exception:  # noqa: BLE001 - what comes after the first frame is not looked at
        return False


def _convert(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        grey = (values >> 8).astype(np.uint8)
        if isinstance(clear := image.info.get("transparency"), int):
            grey[values == clear] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode not in _CONVERTED:
        raise InvalidImageError("wrong mode", f"has pixels of mode {image.mode}; save it with 8 bits a channel")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGB", layer.size, (255, 255, 255))
        white.paste(layer, mask=layer.getchannel("A"))
        return white
    return image.convert("RGB")


def keep_bytes(folder: Path, data: bytes) -> str:
    """The path of the file that holds these bytes in the folder. Raises MachineError where it cannot be written."""
    file = folder / hashlib.sha256(data).hexdigest()
    try:
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.{os.getpid()}")
            beside.write_bytes(data)
            beside.replace(file)
    except OSError as error:
        raise MachineError(f"{folder}: an image cannot be written there ({error.strerror or error})") from None
    return str(file.absolute())


def prune_cache(folder: Path, names: Collection[str]) -> None:
    """Deletes the files in the folder that have none of these names, and the folder where none is left."""
    if not folder.is_dir():
        return
    for file in [*folder.iterdir()]:
        if file.name not in names:
            file.unlink()
    if not names:
        folder.rmdir()
