import jax.numpy as jnp
import numpy as np
from flax import nnx

from gemsmith.arch import PatchProjection
from gemsmith.models.vision import FeatureProjector, LayerNorm, PatchProjector

VISION = PatchProjection(embed_dim=8, patch=1, pooling=2, positions=6)


def make_projector():
    random = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: PatchProjector(VISION, dtype=jnp.float32)))
    leaves = [
        (path, leaf.replace(jnp.asarray(random.normal(0.2, 0.5, leaf.get_value().shape), jnp.float32)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def test_a_patch_is_embedded_by_its_column_its_row_and_nothing_beside_it():
    projector, patches = make_projector(), np.random.default_rng(1).random((1, 3, 12)).astype(np.float32)
    positions = np.array([[[1, 4], [4, 1], [-1, -1]]])
    features = np.asarray(projector(patches, positions))
    np.testing.assert_allclose(projector(patches[:, :1], positions[:, :1]), features[:, :1], atol=1e-6)
    turned = np.asarray(projector(patches, positions[..., ::-1]))
    assert np.abs(turned - features)[0, :2].max(axis=-1).min() > 1e-2
    np.testing.assert_array_equal(turned[0, 2], features[0, 2])


def test_a_layer_norm_has_torchs_epsilon_and_adds_its_bias():
    norm = LayerNorm(2, dtype=jnp.float32)
    norm.bias[...] = jnp.array([1.0, 2.0])
    x = np.array([[3e-3, -3e-3]], np.float32)
    expected = x / np.sqrt(9e-6 + 1e-5) + np.array([1.0, 2.0])
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_features_are_normed_before_they_are_projected():
    projector = FeatureProjector(VISION, 4, dtype=jnp.float32)
    projector.embedding_projection.kernel[...] = jnp.ones((8, 4))
    x = np.random.default_rng(2).standard_normal((1, 1, 8)).astype(np.float32)
    np.testing.assert_allclose(projector(x), projector(1000 * x), rtol=1e-5)
