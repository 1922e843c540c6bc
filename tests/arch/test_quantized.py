import pytest

from gemsmith.arch import Tensor, find_variant, text_tensors
from gemsmith.arch.lora_targets import BLOCK, KINDS, block_of, disk_bytes, is_quantized


def test_bits_a_weight_are_those_of_values_and_scales():
    up = Tensor(name="up", shape=(21_504, 5376), role="up")
    bits = {dtype: 8 * disk_bytes(up, dtype) / up.size for dtype in ("float32", "bfloat16", "nf4", "int8")}
    assert bits == {"float32": 32, "bfloat16": 16, "nf4": 4 + 16 / BLOCK, "int8": pytest.approx(8 + 16 / 5376)}


@pytest.mark.parametrize("inputs", [5376, 704, 96, 64, 7])
def test_blocks_divide_the_inputs_and_are_no_larger_than_64_in_nf4(inputs):
    block = block_of(inputs, "nf4")
    assert inputs % block == 0 and BLOCK % block == 0
    assert block_of(inputs, "int8") == inputs


@pytest.mark.parametrize("name", ["gemma4-26b-a4b", "gemma4-e2b"])
def test_embeddings_norms_routers_and_per_layer_inputs_stay_as_they_are(name):
    for tensor in text_tensors(find_variant(name)):
        kept = "norm" in tensor.name or "embed" in tensor.name or "router" in tensor.name or "per_layer" in tensor.name
        if kept:
            assert not is_quantized(tensor), tensor.name
            assert {disk_bytes(tensor, kind) for kind in KINDS} == {2 * tensor.size}


def test_a_quantised_base_is_most_of_a_large_model():
    tensors = list(text_tensors(find_variant("gemma4-31b")))
    held = {dtype: sum(disk_bytes(tensor, dtype) for tensor in tensors) for dtype in ("bfloat16", "int8", "nf4")}
    assert held["nf4"] < 0.32 * held["bfloat16"] < held["int8"] < 0.56 * held["bfloat16"]
