import hashlib
from dataclasses import replace

import numpy as np
import pytest

from gemsmith.errors import DataError
from gemsmith.images.check import patchify, validate_image
from gemsmith.images.decode import InvalidImageError, make_rgb
from gemsmith.images.patches import PatchConfig, cut
from support.images import image_bytes, unusable_images, usable_images

PATCHING = PatchConfig(budget=70)


@pytest.fixture
def image(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(image_bytes())
    return validate_image(str(file), PATCHING)


def test_a_image_is_described_by_its_file_and_by_its_bytes(image):
    data = image_bytes()
    assert (image.width, image.height, image.soft_tokens, image.animated) == (12, 8, 60, False)
    assert image.sha256 == hashlib.sha256(data).hexdigest() == validate_image(data, PATCHING).sha256
    assert validate_image(usable_images()["animated"][0], PATCHING).animated


def test_the_size_is_that_of_the_turned_image(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    found = validate_image(image_bytes(12, 8, exif=exif), PATCHING)
    assert (found.width, found.height) == (8, 12)


def test_every_fault_is_found_when_a_image_is_looked_at():
    for data, reason in unusable_images().values():
        with pytest.raises(InvalidImageError) as error:
            validate_image(data, PATCHING)
        assert error.value.reason == reason


def test_a_image_with_more_patches_in_a_line_than_positions_is_too_thin():
    """70 soft tokens in a line, of 3 patches each; those of a unified model are as large as a soft token."""
    thin = image_bytes(1, 5000)
    assert validate_image(thin, replace(PATCHING, positions=210)).soft_tokens == 70
    with pytest.raises(InvalidImageError) as error:
        validate_image(thin, replace(PATCHING, positions=209))
    assert (error.value.reason, error.value.line) == (
        "too thin",
        "has 210 patches in a line, and the model positions for 209",
    )
    assert validate_image(thin, replace(PATCHING, positions=70, merged=True)).soft_tokens == 70


def test_the_same_bytes_are_cut_as_they_were_looked_at(image):
    assert np.array_equal(patchify(image, PATCHING), cut(make_rgb(image_bytes()), PATCHING))


def test_a_file_that_changed_since_is_one_line(image, tmp_path):
    (tmp_path / "a.png").write_bytes(image_bytes(seed=1))
    with pytest.raises(DataError, match=r"a.png: has changed since its row was read; .* gemsmith data RUN --force"):
        patchify(image, PATCHING)


def test_a_file_that_is_gone_since_is_one_line(image, tmp_path):
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a.png: does not exist, or not a file; put it back"):
        patchify(image, PATCHING)
