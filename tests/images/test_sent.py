"""What a server is sent of an image: the pixels that training saw."""

import base64
import hashlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from gemsmith.errors import DataError
from gemsmith.images.check import (
    THUMBNAIL_SIDE,
    count_resized_again,
    keeps_size,
    patchify,
    sent_rgb,
    thumbnail_url,
    to_data_url,
    validate_image,
)
from gemsmith.images.decode import make_rgb
from gemsmith.images.patches import BUDGETS, PatchConfig, cut, fitted_size
from support.cases import each
from support.images import image_bytes, usable_images

PATCHING = PatchConfig(budget=70, patch=4)
USABLE = usable_images()


def received(url: str) -> np.ndarray:
    """What a server that knows nothing of our rule decodes."""
    return np.asarray(Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))


@each("name", USABLE)
def test_what_a_server_decodes_is_the_rgb_that_training_made(name):
    data, upper_left = USABLE[name]
    pixels = received(to_data_url(data, None))
    assert (pixels == np.asarray(make_rgb(data))).all() and pixels[0, 0].tolist() == upper_left


@pytest.mark.parametrize(("width", "height"), [(96, 96), (400, 300), (30, 45), (5, 500)])
def test_a_image_arrives_in_the_pixels_that_training_cut_up(width, height, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(image_bytes(width, height))
    image = validate_image(str(file), PATCHING)
    pixels = received(to_data_url(str(file), PATCHING, sha256=image.sha256))
    assert keeps_size(width, height, PATCHING)
    assert pixels.shape[1::-1] == fitted_size(width, height, PATCHING)
    # What is cut of it is not resized: it has its size already.
    assert (cut(Image.fromarray(pixels), PATCHING) == patchify(image, PATCHING)).all()


def test_a_image_that_the_server_would_resize_again_is_sent_as_it_is_and_counted():
    rgb = make_rgb(image_bytes(200, 100))
    assert fitted_size(*fitted_size(200, 100, PATCHING), PATCHING) != fitted_size(200, 100, PATCHING)
    assert sent_rgb(rgb, PATCHING).size == (200, 100)
    seen = [validate_image(image_bytes(*size), PATCHING) for size in ((200, 100), (96, 96))]
    assert count_resized_again(seen, PATCHING) == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_common_shapes_keep_their_size(budget):
    shapes = [(1000, 1000), (1200, 1600), (1600, 1200), (1500, 1000), (640, 427)]
    assert all(keeps_size(*shape, PatchConfig(budget=budget)) for shape in shapes)


def test_a_file_that_was_changed_or_is_gone_is_a_line(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(image_bytes())
    with pytest.raises(DataError, match=r"a.png: has changed since its row was read"):
        to_data_url(str(file), None, sha256=hashlib.sha256(b"other").hexdigest())
    with pytest.raises(DataError, match=r"^/nowhere/a.png: does not exist"):
        to_data_url("/nowhere/a.png", None)


def test_a_thumbnail_is_small_whatever_the_image():
    url = thumbnail_url(image_bytes(2000, 1000))
    assert url.startswith("data:image/jpeg;base64,") and len(url) < 10_000
    assert received(url).shape == (THUMBNAIL_SIDE // 2, THUMBNAIL_SIDE, 3)
