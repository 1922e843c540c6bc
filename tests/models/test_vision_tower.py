from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.arch import VisionTower
from gemsmith.models.vision import ClippedLinear, Tower, attend, clip, pool, rotate_in_plane

TOWER = VisionTower(layers=2, embed_dim=16, ffn=24, heads=2, head_dim=8, clips=True, patch=2, positions=16)


def grid(columns, rows, *, length):
    """Positions (1, P, 2) of an image, row by row, and padding."""
    places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    return np.concatenate([places, np.full((length - len(places), 2), -1)])[None]


def make_tower(tower=TOWER):
    """A tower whose weights come from numpy, with bounds that clip some of what goes through."""
    random = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: Tower(tower, dtype=jnp.float32)))
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        value = random.normal(0.2, 0.3, leaf.get_value().shape)
        if path[-1].endswith(("_min", "_max")):
            value = np.full(leaf.get_value().shape, -1.0 if path[-1].endswith("_min") else 1.0)
        leaves.append((path, leaf.replace(jnp.asarray(value, jnp.float32))))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


@partial(jax.jit, static_argnums=0)
def run_graph(graph, state, patches, positions):
    return nnx.merge(graph, state)(patches, positions)


def features(tower, patches, positions):
    return np.asarray(run_graph(*nnx.split(tower), patches, positions))


@pytest.fixture(scope="module")
def image():
    """The 6 by 3 patches of an image of two soft tokens, unpadded."""
    return np.random.default_rng(1).random((1, 18, 12)).astype(np.float32), grid(6, 3, length=18)


def test_padding_and_other_images_change_nothing(image):
    patches, positions = image
    alone = features(make_tower(), patches, positions)
    beside = np.random.default_rng(2).random((1, 36, 12)).astype(np.float32)
    padded = np.concatenate([patches, np.full((1, 18, 12), 0.7, np.float32)], axis=1)  # what stands there is not seen
    both = features(
        make_tower(), np.concatenate([beside, padded]), np.concatenate([grid(3, 12, length=36), grid(6, 3, length=36)])
    )
    np.testing.assert_allclose(both[1, :2], alone[0], atol=1e-5)
    assert both.shape == (2, 4, 16) and np.isfinite(both).all()


def test_a_patch_counts_where_its_position_is_and_not_where_it_stands(image):
    patches, positions = image
    order = np.random.default_rng(3).permutation(18)
    moved = features(make_tower(), patches[:, order], positions[:, order])
    np.testing.assert_allclose(moved, features(make_tower(), patches, positions), atol=1e-5)
    swapped = features(make_tower(), patches[:, order], positions)
    assert np.abs(swapped - moved).max() > 1e-3


def test_standardised_features_are_shifted_and_then_scaled(image):
    plain, tower = replace(TOWER, clips=False), replace(TOWER, clips=False, standardizes=True)
    standardized = make_tower(tower)
    bias, scale = (x[...] for x in (standardized.std_bias, standardized.std_scale))
    same = nnx.merge(
        nnx.split(nnx.eval_shape(lambda: Tower(plain, dtype=jnp.float32)))[0],
        nnx.from_flat_state([x for x in nnx.to_flat_state(nnx.state(standardized)) if "std" not in x[0][0]]),
    )
    np.testing.assert_allclose(
        features(standardized, *image), (features(same, *image) - bias) * scale, rtol=1e-5, atol=1e-5
    )


def test_cells_are_pooled_row_by_row_whatever_the_width():
    """An image of 6 by 6 patches and one of 3 by 6: the value of a patch is the number of its cell."""
    positions = np.concatenate([grid(6, 6, length=36), grid(3, 6, length=36)])
    hidden = np.full((2, 36, 1), 99.0)
    hidden[0, :, 0] = positions[0, :, 0] // 3 + 2 * (positions[0, :, 1] // 3)
    hidden[1, :18, 0] = positions[1, :18, 1] // 3
    np.testing.assert_allclose(pool(hidden, positions, 3)[..., 0], [[0, 1, 2, 3], [0, 1, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("block", [4, 64])
def test_attention_in_blocks_of_queries_is_the_plain_sum(block):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 10, 2, 4)).astype(np.float32)
    real = np.arange(10) < np.array([[10], [7]])
    scores = np.where(real[:, None, None], np.einsum("nqhd,nmhd->nhqm", query, key), -np.inf)
    expected = np.einsum("nhqm,nmhd->nqhd", jax.nn.softmax(scores, axis=-1), value)
    np.testing.assert_allclose(attend(query, key, value, real, block), expected, atol=1e-5)


def test_the_first_half_of_a_head_turns_with_the_column_and_the_second_with_the_row():
    quarter = (np.zeros((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32))  # cosine and sine of a right angle
    still = (np.ones((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32))
    x = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4)
    assert rotate_in_plane(x, (quarter, still)).ravel().tolist() == [-2, 1, 3, 4]
    assert rotate_in_plane(x, (still, quarter)).ravel().tolist() == [1, 2, -4, 3]


def test_a_value_on_a_bound_has_the_gradient_that_pytorch_gives_it():
    gradient = jax.grad(lambda x: clip(x, jnp.float32(-1), jnp.float32(2)).sum())
    assert gradient(jnp.array([-1.5, -1, 0, 2, 3])).tolist() == [0, 1, 1, 1, 0]


def test_inputs_and_outputs_are_clipped_each_to_bounds_of_their_own():
    layer = ClippedLinear(1, 1, clips=True, dtype=jnp.float32)
    layer.linear.kernel[...] = jnp.full((1, 1), 10.0)
    for bound, value in {"input_min": -1, "input_max": 2, "output_min": -5, "output_max": 100}.items():
        getattr(layer, bound)[...] = jnp.asarray(value, jnp.float32)
    assert [layer(jnp.full((1, 1), x)).item() for x in (-3.0, 0.5, 3.0)] == [-5, 5, 20]
