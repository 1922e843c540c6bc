import hashlib
from dataclasses import replace

import numpy as np
import pytest

from gemsmith.errors import DataError
from gemsmith.images.check import check_picture, cut_picture
from gemsmith.images.decode import BadPicture, make_rgb
from gemsmith.images.patches import Patching, cut
from support.images import picture_bytes, unusable_pictures, usable_pictures

PATCHING = Patching(budget=70)


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(picture_bytes())
    return check_picture(str(file), PATCHING)


def test_a_picture_is_described_by_its_file_and_by_its_bytes(picture):
    data = picture_bytes()
    assert (picture.width, picture.height, picture.soft_tokens, picture.animated) == (12, 8, 60, False)
    assert picture.sha256 == hashlib.sha256(data).hexdigest() == check_picture(data, PATCHING).sha256
    assert check_picture(usable_pictures()["animated"][0], PATCHING).animated


def test_the_size_is_that_of_the_turned_picture(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    found = check_picture(picture_bytes(12, 8, exif=exif), PATCHING)
    assert (found.width, found.height) == (8, 12)


def test_every_fault_is_found_when_a_picture_is_looked_at():
    for data, reason in unusable_pictures().values():
        with pytest.raises(BadPicture) as error:
            check_picture(data, PATCHING)
        assert error.value.reason == reason


def test_a_picture_with_more_patches_in_a_line_than_positions_is_too_thin():
    """70 soft tokens in a line, of 3 patches each; those of a unified model are as large as a soft token."""
    thin = picture_bytes(1, 5000)
    assert check_picture(thin, replace(PATCHING, positions=210)).soft_tokens == 70
    with pytest.raises(BadPicture) as error:
        check_picture(thin, replace(PATCHING, positions=209))
    assert (error.value.reason, error.value.line) == (
        "too thin",
        "has 210 patches in a line, and the model positions for 209",
    )
    assert check_picture(thin, replace(PATCHING, positions=70, merged=True)).soft_tokens == 70


def test_the_same_bytes_are_cut_as_they_were_looked_at(picture):
    assert np.array_equal(cut_picture(picture, PATCHING), cut(make_rgb(picture_bytes()), PATCHING))


def test_a_file_that_changed_since_is_one_line(picture, tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes(seed=1))
    with pytest.raises(DataError, match=r"a.png: has changed since its row was read; .* gemsmith data RUN --force"):
        cut_picture(picture, PATCHING)


def test_a_file_that_is_gone_since_is_one_line(picture, tmp_path):
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"a.png: is not there, or not a file; put it back"):
        cut_picture(picture, PATCHING)
