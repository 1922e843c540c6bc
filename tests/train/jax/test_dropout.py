import jax
import jax.numpy as jnp
import numpy as np

from gemsmith.train.jax.step import mask_keys

SHAPE = (4, 64, 96)


def draw(seed, number, rate=0.9):
    (key,) = mask_keys(jax.random.key(seed), jnp.array([number], jnp.uint32))
    return np.asarray(jax.random.bernoulli(key, rate, SHAPE))


def test_a_mask_keeps_its_share_along_every_axis():
    for rate in (0.95, 0.5):
        kept = draw(0, 7, rate)
        assert abs(kept.mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
        for axis in range(3):
            means = kept.mean(axis=tuple(other for other in range(3) if other != axis))
            assert np.abs(means - rate).max() < 6 * np.sqrt(rate * (1 - rate) / (kept.size / kept.shape[axis]))


def test_masks_of_other_modules_steps_and_places_are_independent():
    one = draw(0, 7, 0.5) - 0.5
    others = [draw(0, 8, 0.5), draw(1, 7, 0.5), draw(0, 2**31 + 7, 0.5)]
    shifted = [np.roll(one + 0.5, shift, axis) for shift, axis in ((1, 0), (1, 1), (1, 2), (2, 2), (32, 2))]
    for other in [*others, *shifted]:
        # 4 × the standard error of a correlation.
        assert abs((one * (other - 0.5)).mean() / 0.25) < 4 / np.sqrt(one.size)


def test_the_same_key_draws_the_same_mask():
    assert (draw(3, 5) == draw(3, 5)).all()
