"""Fashion-MNIST as folders of images by class: 28 by 28 pixels each, of ten kinds of clothing (arXiv 1708.07747).

OUT/train/ankle_boot/00000.png, OUT/held_out/ankle_boot/00000.png, OUT/LICENSE.txt. They are the first images of the
published training and test files, whose order is a random one; a name is an image's number in its file.
"""

import gzip
import math
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np

from gemsmith.data.dataset import source_sha256
from gemsmith.data.image_folder import FORMAT
from gemsmith.data.prepare import PreparedRecord
from gemsmith.errors import DataError
from gemsmith.images.decode import make_rgb, png_bytes
from gemsmith.system.files import atomic_replace_dir, regular_file, sha256_file

CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle_boot")
"""The folders' names, by the published number of each class."""
PARTS = {"train": "train", "held_out": "t10k"}  # a folder, and how the files are called whose images it gets
_MOST_BYTES = 2**28
_MAGIC = {1: 0x801, 3: 0x803}
_WHERE = "give the folder with the four files of Fashion-MNIST, such as /usr/share/datasets/fashion-mnist, where "
_WHERE += "Debian's package dataset-fashion-mnist puts them"
_LICENSE = Path(__file__).with_name("fashion_mnist_license.txt")


def prepare_fashion_mnist(folder: Path, out: Path, *, train: int, held_out: int) -> PreparedRecord:
    """Writes that many images of each part to the new folder `out`, and returns what was read and written.

    Raises DataError for files that cannot be read, too few images in them, and where `out` already exists.
    """
    if out.exists():
        raise DataError(f"--out {out}: already exists; name a new folder")
    wanted = {"train": train, "held_out": held_out}
    images = {part: read_images(folder, part) for part in PARTS}
    for part, count in wanted.items():
        if count > (there := len(images[part][0])):
            option = part.replace("_", "-")
            raise DataError(f"--{option}: {count} images were asked for; {folder} has {there:,}; ask for fewer")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace_dir(out) as beside:
        for part, count in wanted.items():
            pixels, labels = (values[:count] for values in images[part])
            for number, (grey, label) in enumerate(zip(pixels, labels, strict=True)):
                file = beside / part / CLASSES[label] / f"{number:05d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                pgm = b"P5 %d %d 255\n" % grey.shape[::-1] + grey.tobytes()
                file.write_bytes(png_bytes(make_rgb(pgm)))
        shutil.copyfile(_LICENSE, beside / "LICENSE.txt")
    return PreparedRecord(
        source=str(folder),
        source_sha256=sha256_file(_file(folder, "train", "images")),
        out=str(out),
        out_sha256=source_sha256(str(out / "train"), FORMAT),
        rows_read=sum(len(labels) for _, labels in images.values()),
        rows_written=train + held_out,
    )


def read_images(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """A part's images, uint8 of (N, 28, 28), 255 is white; and their classes' numbers, uint8 of (N,)."""
    images, labels = _read_idx(_file(folder, part, "images"), 3), _read_idx(_file(folder, part, "labels"), 1)
    if len(images) != len(labels) or labels.max(initial=0) >= len(CLASSES):
        raise DataError(f"{folder}: its {PARTS[part]} files do not go together; {_WHERE}")
    return images, labels


def _file(folder: Path, part: str, kind: str) -> Path:
    return folder / f"{PARTS[part]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte.gz"


def _read_idx(file: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file, in the shape that it says: a magic number and each axis's length, big-endian."""
    try:
        with gzip.open(regular_file(file)) as stream:
            data = stream.read(_MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(f"{file}: {reason}; {_WHERE}") from None
    begin = 4 * (axes + 1)
    magic, *shape = struct.unpack(f">{axes + 1}I", data[:begin].ljust(begin, b"\0"))
    if magic != _MAGIC[axes] or len(data) - begin != math.prod(shape):
        raise DataError(f"{file}: is no IDX file of bytes along {axes} axes, or not a whole one; {_WHERE}")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)
