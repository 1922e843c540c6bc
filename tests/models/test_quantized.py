"""A base of codes and scales: what it stores, that training on it is training on the matrices it stands for, and how it
lies on a mesh."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from gemsmith.arch import LORA_KINDS, find_variant
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.models import Execution, abstract_model, load_model, token_nll
from gemsmith.models.quantization import LEVELS, Quantized, dequantize, dequantize_state, holds_quantized, quantize
from gemsmith.models.sharding import AXES
from gemsmith.recipe.schema import Lora
from gemsmith.train.jax.lora import add_adapters


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_nf4_is_that_of_qwix():
    weight = normal(3, 128, 40)
    ours = quantize(weight, "nf4")
    theirs = qwix.quantize(weight, "nf4", channelwise_axes=(0, 2), tiled_axes={1: 64})
    packed = theirs.qvalue.astype(jnp.uint8).reshape(3, 2, 2, 32, 40)
    np.testing.assert_array_equal(ours.qvalue, (packed[:, :, 0] | packed[:, :, 1] << 4).reshape(3, 64, 40))
    np.testing.assert_array_equal(ours.scale, theirs.scale)
    np.testing.assert_array_equal(dequantize(ours), qwix.dequantize(theirs))


def test_nf4_is_that_of_bitsandbytes():
    """Blocks of 64 in a row of HF's [out, in], each by its largest magnitude, every value on the nearest of the 16
    levels."""
    weight = normal(128, 24)
    turned = np.asarray(weight).T.reshape(-1, 64)
    scale = np.abs(turned).max(axis=1, keepdims=True)
    suggest = np.abs(turned[..., None] / scale[..., None] - np.array(LEVELS)).argmin(-1)
    expected = (np.array(LEVELS, np.float32)[suggest] * scale).reshape(24, 128).T
    np.testing.assert_array_equal(dequantize(quantize(weight, "nf4")), expected)


@pytest.mark.parametrize(("kind", "low", "high"), [("nf4", 0.088, 0.094), ("int8", 0.005, 0.009)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_trip_of_normal_weights_has_the_known_error(kind, low, high, dtype):
    """QLoRA's NF4 leaves 9 % of a normal weight's norm, absmax int8 over 1024 values 1/127 * 3.2 sigma / sqrt(12) = 0.7
    %."""
    weight = normal(1024, 256, dtype=dtype)
    back = dequantize(quantize(weight, kind))
    assert back.dtype == weight.dtype
    error = np.linalg.norm(np.asarray(back - weight, np.float32)) / np.linalg.norm(np.asarray(weight, np.float32))
    assert low < error < high


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_zeros_stay_zeros_and_largest_values_stay(kind):
    weight = jnp.zeros((64, 3), jnp.bfloat16).at[5, 1].set(-0.75)
    np.testing.assert_allclose(dequantize(quantize(weight, kind)), weight, rtol=4e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_what_is_back_from_codes_gives_the_same_codes(kind):
    once = quantize(normal(128, 8, dtype=jnp.bfloat16), kind)
    again = quantize(dequantize(once), kind)
    np.testing.assert_array_equal(once.qvalue, again.qvalue)
    np.testing.assert_array_equal(once.scale, again.scale)


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(graph, trained, frozen):
    """Of rows with two documents, with respect to the adapters."""
    random = np.random.default_rng(2)
    tokens, mask = jnp.asarray(random.integers(108, 256, (2, 24))), jnp.asarray(random.random((2, 24)) < 0.5)
    segments = jnp.asarray(np.repeat([[1, 2], [1, 1]], 12, axis=1))
    positions = jnp.broadcast_to(jnp.arange(24) % 12, (2, 24))

    def loss(trained):
        model = nnx.merge(graph, trained, frozen)
        return token_nll(model, model.hidden(tokens, positions, segments), tokens, mask)[0]

    return jax.value_and_grad(loss)(trained)


def make_leaf(path, shape):
    if path[-1] == "kernel_lora_b":
        return normal(*shape) * 0.1
    if len(shape) > 2 or "embed" in str(path[0]):
        return normal(*shape) / np.sqrt(shape[-1])
    # Queries of norm 1 make attention so sharp that float32's own noise is above 1e-5.
    return (0.25 if "q_norm" in path else 0.9) + 0.1 * normal(*shape)


SMALL = {"layers": 2, "embed_dim": 32, "ffn": 64, "heads": 2, "vocabulary": 256}
VARIANTS = {
    "dense": replace(
        find_variant("tiny-31b"),
        **SMALL,
        kv_heads=2,
        global_kv_heads=1,
        head_dim=16,
        global_head_dim=32,
        global_every=2,
    ),
    "experts": replace(find_variant("tiny-26b-a4b"), **SMALL, global_every=2),
    "shared kv": replace(find_variant("tiny-e2b"), **SMALL | {"layers": 4}, global_every=2, kv_shared_layers=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "remat", "targets"),
    [
        ("dense", "nf4", "layer", LORA_KINDS),
        ("dense", "nf4", "none", ("q", "down")),
        ("dense", "int8", ("gate", "up"), ("q", "down")),
        ("experts", "nf4", "layer", ("k", "up")),
        ("shared kv", "nf4", "layer", ("k", "o")),
    ],
)
def test_gradients_are_those_over_the_matrices_that_the_codes_stand_for(name, kind, remat, targets):
    variant = VARIANTS[name]
    model = add_adapters(
        abstract_model(variant, dtype="float32", execution=Execution(remat=remat)),
        variant,
        Lora(rank=4, targets=targets),
        seed=0,
    )
    graph, state = nnx.split(model)
    state = [(path, leaf.replace(make_leaf(path, leaf.shape))) for path, leaf in nnx.to_flat_state(state)]
    trained, exact = nnx.split_state(nnx.from_flat_state(state), nnx.LoRAParam, ...)
    like = nnx.to_flat_state(nnx.state(abstract_model(variant, dtype="float32", quantized=kind)))
    held = {path for path, leaf in like if isinstance(leaf.get_value(), Quantized)}
    codes = nnx.from_flat_state(
        [
            (path, leaf.replace(quantize(leaf[...], kind)) if path in held else leaf)
            for path, leaf in nnx.to_flat_state(exact)
        ]
    )
    assert holds_quantized(codes) and not holds_quantized(dequantize_state(codes))
    loss, gradients = loss_and_gradients(graph, trained, codes)
    expected_loss, expected = loss_and_gradients(graph, trained, dequantize_state(codes))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for (path, found), (_, wanted) in zip(nnx.to_flat_state(gradients), nnx.to_flat_state(expected), strict=True):
        difference = np.linalg.norm(found[...] - wanted[...])
        assert difference <= 1e-5 * np.linalg.norm(wanted[...]), path
    moved, _ = loss_and_gradients(graph, trained, exact)
    assert abs(float(moved) - float(loss)) > 1e-5 * float(loss), "quantizing changed nothing"


@pytest.mark.parametrize(("remat", "kept"), [("none", True), pytest.param("layer", False, marks=pytest.mark.slow)])
def test_no_plain_weight_waits_for_the_backward_pass(remat, kept):
    """Loops hand to the backward pass what they keep of each layer: with remat none a gelu's (B, L, F), but never the
    MLP's (E, F)."""
    variant = find_variant("tiny-31b")
    base = abstract_model(variant, dtype=jnp.float32, quantized="nf4", execution=Execution(remat=remat))
    model = add_adapters(base, variant, Lora(rank=4, targets=("q",)), seed=0)
    graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)
    inputs = jax.ShapeDtypeStruct((2, 80), jnp.int32)

    def loss(trained, frozen, tokens):
        return nnx.merge(graph, trained, frozen).hidden(tokens, tokens, tokens).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(trained, frozen, inputs))
    repeats = len(variant.stacks[0])
    assert repeats > 1 and variant.embed_dim != 80
    assert (f"f32[{repeats},2,80,{variant.ffn}]" in text) == kept
    assert f"f32[{repeats},{variant.embed_dim},{variant.ffn}]" not in text


MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def arrays_of(model, name):
    return next(leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model)) if name in path)


@pytest.mark.slow
def test_big_matrices_take_four_or_eight_bits_and_the_rest_stays(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint("tiny-26b-a4b", "bfloat16")))
    for kind, codes in (("nf4", jnp.uint8), ("int8", jnp.int8)):
        model = load_model(checkpoint, abstract_model(checkpoint.variant, dtype="bfloat16", quantized=kind))
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            value = leaf.get_value()
            held = isinstance(value, Quantized)
            assert held == any(name in MATRICES for name in path), path
            if held:
                assert value.qvalue.dtype == codes and value.scale.dtype == value.dtype == jnp.bfloat16
                inputs = value.shape[-2]
                size = math.prod(value.shape)
                assert value.qvalue.nbytes == size * (0.5 if kind == "nf4" else 1), path
                assert value.scale.size * (math.gcd(64, inputs) if kind == "nf4" else inputs) == size, path
            else:
                assert value.dtype == jnp.bfloat16
        up = checkpoint.read("model.language_model.layers.0.mlp.up_proj.weight").astype(np.float32).T
        error = np.asarray(dequantize(arrays_of(model, "up_proj")), np.float32)[0] - up
        assert np.linalg.norm(error) < (0.1 if kind == "nf4" else 0.012) * np.linalg.norm(up)


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [
        # up: E 5376 inputs, 84 blocks: over 4 devices, but not over 8, which then all hold the scales.
        ((1, 4, 1, 1), PartitionSpec(None, ("fsdp", "sequence"), "tp")),
        ((1, 8, 1, 1), PartitionSpec(None, None, ("tp", "fsdp", "sequence"))),
        ((1, 2, 1, 4), PartitionSpec(None, ("fsdp", "sequence"), "tp")),
    ],
)
def test_codes_and_scales_are_split_like_the_matrices(sizes, scale):
    variant = replace(find_variant("gemma4-31b"), layers=6)
    model = abstract_model(
        variant, dtype=jnp.bfloat16, quantized="nf4", execution=Execution(mesh=AbstractMesh(sizes, AXES))
    )
    up = arrays_of(model, "up_proj")
    assert up.qvalue.sharding.spec == PartitionSpec(None, ("fsdp", "sequence"), "tp")
    assert up.scale.sharding.spec == scale
    assert up.shape == (1, 5376, 21504) and up.qvalue.shape == (1, 2688, 21504) and up.scale.shape == (1, 84, 21504)
