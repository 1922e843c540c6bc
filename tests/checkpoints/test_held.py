"""What training held of a base, against what the backends compute."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from gemsmith.arch import text_tensors
from gemsmith.arch.lora_targets import LEVELS, is_quantized
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.quantized import as_trained, dequantized
from gemsmith.models.quantization import dequantize, quantize
from gemsmith.recipe.schema import Train

SIGNIFICANDS = np.arange(128, 256, dtype=np.float32)
SMALLER = np.concatenate([SIGNIFICANDS * np.float32(2.0**-power) for power in range(10)])


def every_pair() -> np.ndarray:
    """Rows (…, 64) in bfloat16 that begin with their largest: of each two magnitudes the quotient, with both signs."""
    largest = 2 * SIGNIFICANDS[:, None, None]
    others = np.broadcast_to(np.concatenate([SMALLER, -SMALLER, np.zeros(23)]).reshape(1, -1, 63), (128, 41, 63))
    rows = np.concatenate([np.broadcast_to(largest, (128, 41, 1)), others], axis=2).reshape(-1, 64)
    return np.where(np.abs(rows) <= np.abs(rows[:, :1]), rows, 0).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_every_quotient_is_held_as_jax_holds_it(kind):
    rows = every_pair()
    found = jax.jit(lambda weight: dequantize(quantize(weight, kind)))(jnp.asarray(rows.T))
    np.testing.assert_array_equal(dequantized(rows, kind=kind), np.asarray(found).T)


def test_no_quotient_is_near_the_middle_between_two_levels_of_nf4():
    """So that a chip's division, off by 1e-7, gives the same level."""
    middles = (np.array(LEVELS[1:]) + np.array(LEVELS[:-1])) / 2
    quotients = np.concatenate([SMALLER, 2 * SIGNIFICANDS])[:, None].astype(np.float64) / (2 * SIGNIFICANDS)
    assert min(np.abs(quotients - abs(middle)).min() for middle in middles) > 2e-7


def test_in_int8_the_middle_goes_to_the_smaller_on_every_machine():
    """0.02734375 * 6.5 is such a middle; XLA divides by multiplying with the reciprocal, and finds more than 6.5."""
    weight = np.full((2, 64), 0.02734375 * 6.5, ml_dtypes.bfloat16)
    weight[:, 0] = 0.02734375 * 127
    expected = np.float32(0.02734375 * 6)
    assert (dequantized(weight, kind="int8")[:, 1:].astype(np.float32) == expected).all()
    assert (dequantize(jax.jit(partial(quantize, kind="int8"))(jnp.asarray(weight.T)))[1:] == expected).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_every_quotient_is_held_as_bitsandbytes_holds_it(dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes").functional
    rows = every_pair().astype(np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16)
    weight = torch.from_numpy(rows.astype(np.float32)).bfloat16()
    codes, state = bitsandbytes.quantize_4bit(weight, quant_type="nf4", compress_statistics=False, blocksize=64)
    expected = bitsandbytes.dequantize_4bit(codes, state).float().numpy()
    np.testing.assert_array_equal(dequantized(rows, kind="nf4").astype(np.float32), expected)


@pytest.mark.parametrize(("name", "kind", "role"), [("tiny-26b-a4b", "int8", "expert_down"), ("tiny-e2b", "nf4", "up")])
def test_the_base_is_held_where_jax_quantises_it(tiny_checkpoint, name, kind, role):
    base = open_checkpoint(str(tiny_checkpoint(name, "bfloat16")))
    held = as_trained(base, Train(dtype=kind))
    names = {tensor.name for tensor in text_tensors(base.variant) if is_quantized(tensor)}
    assert names == {name for name, place in held.places.items() if place.held}
    assert held.fingerprint() == base.fingerprint()
    tensor = next(tensor for tensor in text_tensors(base.variant) if tensor.role == role)
    weight = jnp.asarray(np.swapaxes(base.read(tensor.name), -1, -2))
    expected = np.asarray(jax.jit(lambda weight: dequantize(quantize(weight, kind)))(weight)).swapaxes(-1, -2)
    place, rows = held.places[tensor.name], slice(3, 9)
    np.testing.assert_array_equal(place.read(), expected)
    np.testing.assert_array_equal(place.rows(rows), expected.reshape(place.matrix)[rows])
    assert not np.array_equal(place.read(), base.read(tensor.name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_base_that_was_not_quantised_is_itself(tiny_checkpoint, dtype):
    base = open_checkpoint(str(tiny_checkpoint("tiny-12b", "bfloat16")))
    assert as_trained(base, Train(dtype=dtype)) is base
