"""The pictures that tests use are what they say, and the same each time."""

import numpy as np

from gemsmith.images.decode import make_rgb
from support.images import picture_bytes, picture_values, unusable_pictures, usable_pictures


def test_a_picture_has_the_colours_of_its_seed():
    assert np.array_equal(np.asarray(make_rgb(picture_bytes(5, 3, seed=1))), picture_values(5, 3, seed=1))
    assert picture_bytes(seed=1) == picture_bytes(seed=1) != picture_bytes(seed=2)


def test_every_one_is_small():
    everything = {**usable_pictures(), **unusable_pictures()}
    assert len(everything) > 25 and max(len(data) for data, _ in everything.values()) < 20_000
