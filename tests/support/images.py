"""Small images of every kind that people have, good and bad, as the bytes of files: for tests."""

import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from gemsmith.images.decode import Reason


def image_bytes(width: int = 12, height: int = 8, *, seed: int = 0, kind: str = "PNG", **options: Any) -> bytes:
    """An image of random colors, the same for the same seed; `options` are those of Pillow's `save`."""
    return _save(Image.fromarray(image_values(width, height, seed=seed)), kind, **options)


def image_values(width: int = 12, height: int = 8, *, seed: int = 0) -> np.ndarray:
    """The colors of that image: uint8 of shape (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def usable_images() -> Mapping[str, tuple[bytes, list[int]]]:
    """Images of each mode and format by name, and the RGB of their upper left pixel."""
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    palette = Image.new("P", (2, 2))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    turned = Image.new("RGB", (2, 1))
    turned.putpixel((1, 0), (7, 8, 9))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    frames = [Image.new("RGB", (2, 2), color) for color in ((255, 0, 0), (0, 0, 255))]
    deep = Image.fromarray(np.full((2, 2), 0x1234, np.uint16))
    return {
        "RGB": (_save(Image.new("RGB", (2, 2), (1, 2, 3)), "PNG"), [1, 2, 3]),
        "JPEG": (_save(Image.new("L", (2, 2), 9), "JPEG"), [9, 9, 9]),
        "clear": (_save(half, "PNG"), [255, 255, 255]),
        "clear palette": (_save(palette, "PNG", transparency=0), [255, 255, 255]),
        "palette": (_save(palette, "PNG"), [10, 20, 30]),
        "grey": (_save(Image.new("L", (2, 2), 77), "PNG"), [77, 77, 77]),
        "black and white": (_save(Image.new("1", (2, 2), 1), "PNG"), [255, 255, 255]),
        "grey and alpha": (_save(Image.new("LA", (2, 2), (0, 0)), "PNG"), [255, 255, 255]),
        "16 bits": (_save(deep, "PNG"), [0x12, 0x12, 0x12]),
        "16 bits in TIFF": (_save(deep, "TIFF"), [0x12, 0x12, 0x12]),
        "clear 16 bits": (_png(1, 1, 16, 0, b"\0\x12\x34", (b"tRNS", b"\x12\x34")), [255, 255, 255]),
        "three times 16 bits": (_png(1, 1, 16, 2, b"\0\x01\xff\x02\xff\x03\xff"), [1, 2, 3]),
        "CMYK": (_save(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF"), [255, 0, 0]),
        "turned": (_save(turned, "PNG", exif=exif), [7, 8, 9]),
        "animated": (_save(frames[0], "GIF", save_all=True, append_images=frames[1:]), [255, 0, 0]),
        "thin": (image_bytes(1, 500), image_values(1, 500)[0, 0].tolist()),
        "one pixel": (_save(Image.new("RGB", (1, 1), (4, 5, 6)), "BMP"), [4, 5, 6]),
    }


def unusable_images() -> Mapping[str, tuple[bytes, Reason]]:
    """Images of each fault by name, and the reason that make_rgb gives."""
    whole, jpeg = image_bytes(64, 64), image_bytes(64, 64, kind="JPEG")
    return {
        "no bytes": (b"", "empty"),
        "no pixels": (_png(0, 5, 8, 2, b""), "not an image"),
        "text": (b"\x89PNG is a fine name", "not an image"),
        "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        "cut off": (whole[:200], "damaged"),
        "cut off JPEG": (jpeg[: len(jpeg) // 2], "damaged"),
        "scrambled": (whole[:60] + bytes(40) + whole[100:], "damaged"),
        "bomb": (_png(60_000, 60_000, 8, 2, b"\0"), "too large"),
        "large": (_png(10_000, 9_000, 1, 0, b"\0"), "too large"),
        "32 bits": (_save(Image.new("I", (2, 2)), "TIFF"), "wrong mode"),
        "fractions": (_save(Image.new("F", (2, 2)), "TIFF"), "wrong mode"),
    }


def _save(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def _png(width: int, height: int, bits: int, colors: int, raw: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG with a header of one's own: Pillow writes no broken ones."""
    header = struct.pack(">IIBBBBB", width, height, bits, colors, 0, 0, 0)
    chunks = ((b"IHDR", header), *more, (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
