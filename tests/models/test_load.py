from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gemsmith.arch import find_variant, text_tensors
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.models import Execution, abstract_model, load_model
from tiny_checkpoints import make_checkpoint, with_vision


def test_every_tensor_is_read_once_and_lands_turned_and_cast(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-26b-a4b", "bfloat16")))
    read = []

    class Counting:
        folder, variant = checkpoint.folder, checkpoint.variant

        def read(self, name):
            read.append(name)
            return checkpoint.read(name)

    model = load_model(
        Counting(), abstract_model(checkpoint.variant, dtype="float32", execution=Execution(remat="layer"))
    )
    assert sorted(read) == sorted(tensor.name for tensor in text_tensors(checkpoint.variant))
    assert model.execution.remat == "layer"
    stem = "model.language_model.layers.1."
    number, repeat = next(
        (number, list(layers).index(1)) for number, layers in enumerate(checkpoint.variant.stacks) if 1 in layers
    )
    layer = model.layers[number]
    key, experts = (
        checkpoint.read(stem + name).astype(np.float32) for name in ("self_attn.k_proj.weight", "experts.down_proj")
    )
    np.testing.assert_array_equal(layer.self_attn.k_proj.kernel[repeat], key.T)
    np.testing.assert_array_equal(layer.experts.down_proj[repeat], experts.swapaxes(1, 2))
    np.testing.assert_array_equal(
        model.embed_tokens.embedding[...],
        checkpoint.read("model.language_model.embed_tokens.weight").astype(np.float32),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}


def test_a_checkpoint_of_other_shapes_is_refused(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    wider = replace(checkpoint, variant=replace(checkpoint.variant, ffn=checkpoint.variant.ffn * 2))
    with pytest.raises(
        CheckpointError, match=r"layers.0.mlp.down_proj.weight is \[64, 128\], tiny-12b needs \[64, 256\]"
    ):
        load_model(wider, abstract_model(wider.variant, dtype="float32"))


def test_a_tensor_that_the_checkpoint_lacks_is_named(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-12b")))
    deeper = replace(checkpoint, variant=replace(checkpoint.variant, layers=6))
    with pytest.raises(CheckpointError, match=r"has no tensor model.language_model.layers.4"):
        load_model(deeper, abstract_model(deeper.variant, dtype="float32"))


@pytest.mark.slow
def test_vision_is_read_where_it_is_asked_for(tmp_path):
    checkpoint = open_checkpoint(str(make_checkpoint(with_vision(find_variant("tiny-e2b")), tmp_path / "base")))
    model = load_model(checkpoint, abstract_model(checkpoint.variant, dtype="float32", vision=True))
    stem = "model.vision_tower.encoder.layers.2.mlp.up_proj."
    layer = model.vision_tower.encoder.layers.mlp.up_proj
    weight, bound = (checkpoint.read(stem + name).astype(np.float32) for name in ("linear.weight", "output_max"))
    np.testing.assert_array_equal(layer.linear.kernel[2], weight.T)
    assert layer.output_max[2] == bound > 2
    text = load_model(checkpoint, abstract_model(checkpoint.variant, dtype="float32"))
    assert not hasattr(text, "vision_tower")
