import numpy as np
import pytest

from gemsmith.arch import find_variant
from gemsmith.data.batches import join, room_for
from gemsmith.images.patches import Patches
from gemsmith.train.jax.images import ImageShape, batch_images, bucket_shape

SHAPE = ImageShape(images=2, soft_tokens=3, patches=4, patch_dim=2)


def make_image(value, *, patches, soft_tokens):
    positions = np.stack([np.arange(patches), np.zeros(patches)], axis=-1)
    return Patches(values=np.full((patches, 2), value), positions=positions, soft_tokens=soft_tokens)


def test_images_have_the_places_of_their_soft_tokens_in_order():
    tokens = np.array([[2, 9, 9, 3, 9], [2, 3, 4, 5, 6]])
    images = [make_image(0.25, patches=4, soft_tokens=2), make_image(0.75, patches=1, soft_tokens=1)]
    batch = batch_images(tokens, [images, []], image_token=9, shape=SHAPE)
    assert batch.places.tolist() == [[[1, 2, 5], [4, 5, 5]], [[5] * 3] * 2]
    assert batch.patches[0, :, :, 0].tolist() == [[0.25] * 4, [0.75, 0, 0, 0]]
    assert batch.positions[0, 1].tolist() == [[0, 0], [-1, -1], [-1, -1], [-1, -1]]
    assert (batch.positions[1] == -1).all()


def test_padding_that_a_processor_has_added_is_left_out():
    image = make_image(0.5, patches=6, soft_tokens=1)
    image.positions[2:] = -1
    batch = batch_images(np.array([[9]]), [[image]], image_token=9, shape=SHAPE)
    assert batch.patches[0, 0, :, 0].tolist() == [0.5, 0.5, 0, 0]


def test_a_row_whose_soft_tokens_are_not_its_images_is_our_own_mistake():
    with pytest.raises(AssertionError, match="row 0: 2 soft tokens for images of 3"):
        batch_images(np.array([[9, 9]]), [[make_image(0, patches=1, soft_tokens=3)]], image_token=9, shape=SHAPE)


def test_one_shape_has_room_for_every_row():
    rows = [[256, 266], [121], []]
    shape = bucket_shape(find_variant("gemma4-31b").vision, join([room_for(row) for row in rows]))
    assert shape == ImageShape(images=2, soft_tokens=288, patches=2592, patch_dim=768)
