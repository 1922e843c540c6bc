"""The images that tests use are what they say, and the same each time."""

import numpy as np

from gemsmith.images.decode import make_rgb
from support.images import image_bytes, image_values, unusable_images, usable_images


def test_a_image_has_the_colors_of_its_seed():
    assert np.array_equal(np.asarray(make_rgb(image_bytes(5, 3, seed=1))), image_values(5, 3, seed=1))
    assert image_bytes(seed=1) == image_bytes(seed=1) != image_bytes(seed=2)


def test_every_one_is_small():
    everything = {**usable_images(), **unusable_images()}
    assert len(everything) > 25 and max(len(data) for data, _ in everything.values()) < 20_000
