import gzip
import shutil
import struct

import numpy as np
import pytest
from PIL import Image

from gemsmith.data.prepare.fashion_mnist import CLASSES, prepare_fashion_mnist, read_images
from gemsmith.errors import DataError


def write_idx(folder, stem, images, labels):
    for name, magic, values in (("images-idx3", 0x803, images), ("labels-idx1", 0x801, labels)):
        header = struct.pack(f">{values.ndim + 1}I", magic, *values.shape)
        (folder / f"{stem}-{name}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture
def published(tmp_path):
    """The four files, of 12 and 5 images; class n % 10 for the image of number n."""
    folder, random = tmp_path / "published", np.random.default_rng(0)
    folder.mkdir()
    for stem, count in (("train", 12), ("t10k", 5)):
        images = random.integers(0, 256, (count, 28, 28), np.uint8)
        write_idx(folder, stem, images, (np.arange(count) % 10).astype(np.uint8))
    return folder


def test_the_first_images_of_each_part_become_folders_by_class(published, tmp_path):
    out = tmp_path / "new" / "fashion"
    record = prepare_fashion_mnist(published, out, train=11, held_out=3)
    names = {file.relative_to(out).as_posix() for file in out.rglob("*.png")}
    assert names == {f"train/{CLASSES[n % 10]}/{n:05d}.png" for n in range(11)} | {
        f"held_out/{CLASSES[n]}/{n:05d}.png" for n in range(3)
    }
    pixels = np.asarray(Image.open(out / "train" / "t-shirt" / "00010.png"))
    np.testing.assert_array_equal(pixels[..., 1], read_images(published, "train")[0][10])
    assert "Copyright © 2017 Zalando SE" in (out / "LICENSE.txt").read_text()
    assert (record.rows_read, record.rows_written) == (17, 14)


def test_the_same_images_have_the_same_hash(published, tmp_path):
    first, second, other = (
        prepare_fashion_mnist(published, tmp_path / name, train=count, held_out=1).out_sha256
        for name, count in (("a", 4), ("b", 4), ("c", 5))
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "t10k-labels-idx1-ubyte.gz").unlink(), "ubyte.gz: does not exist; give the folder"),
        (lambda folder: (folder / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip"), "cannot be read (Not a gz"),
        (
            lambda folder: (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03")),
            "is no IDX file of bytes along 3 axes, or not a whole one",
        ),
        (
            lambda folder: shutil.copy(folder / "t10k-labels-idx1-ubyte.gz", folder / "train-labels-idx1-ubyte.gz"),
            "its train files do not go together",
        ),
        (lambda folder: (folder.parent / "fashion").mkdir(), "fashion: already exists; name a new folder"),
    ],
    ids=["gone", "no gzip", "cut off", "mixed", "there already"],
)
def test_what_cannot_be_read_or_would_be_overwritten_is_one_line(published, tmp_path, damage, expected):
    damage(published)
    with pytest.raises(DataError) as caught:
        prepare_fashion_mnist(published, tmp_path / "fashion", train=1, held_out=1)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.png"))


def test_more_images_than_there_are_is_one_line(published, tmp_path):
    with pytest.raises(DataError, match=r"--held-out: 6 images were asked for; .* has 5; ask for fewer"):
        prepare_fashion_mnist(published, tmp_path / "fashion", train=12, held_out=6)
