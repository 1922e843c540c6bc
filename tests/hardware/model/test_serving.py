"""Bytes of serving, against what can be counted by hand."""

import pytest

from gemsmith.arch import find_variant, text_tensors
from gemsmith.arch.tensors import parameter_count
from gemsmith.hardware.model.serving import ENCODER_BYTES, serving_memory

V31 = find_variant("gemma4-31b")


def memory(model: str = "gemma4-31b", *, tp: int = 1, length: int = 16_384, **more):
    return serving_memory(find_variant(model), tp=tp, max_model_len=length, **more)


def test_weights_are_the_zoos_and_fp8_halves_what_it_holds() -> None:
    parameters = parameter_count(text_tensors(V31))
    assert memory().weights == 2 * parameters
    assert memory(weight_dtype="float32").weights == 4 * parameters
    embedding = V31.vocabulary * V31.embed_dim
    fp8 = memory(weight_dtype="fp8").weights
    assert parameters + embedding < fp8 < 1.002 * (parameters + embedding), "the embedding matrix stays in bfloat16"


def test_keys_and_values_of_the_31b_are_those_of_ten_global_and_fifty_sliding_layers() -> None:
    """A token: K and V of 4 heads of 512 in each global layer, of 16 heads of 256 in each other; bfloat16."""
    ten, fifty = 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2
    assert memory(length=20_000, batched_tokens=8192).kv_cache == 20_000 * ten + (1024 + 8192) * fifty
    assert memory(length=1000).kv_cache == 1000 * (ten + fifty), "a window is no longer than the text"
    assert memory(kv_dtype="fp8").kv_cache == memory().kv_cache / 2


def test_a_kv_head_that_tp_does_not_split_is_held_more_than_once() -> None:
    four, eight = (memory(tp=tp, length=200_000).kv_cache for tp in (4, 8))
    assert eight > four / 2, "the 4 global heads: no device of 8 holds less than one"


def test_layers_that_share_anothers_keys_and_values_hold_none() -> None:
    e2b = find_variant("gemma4-e2b")
    own = sum(not e2b.shares_kv(layer) for layer in range(e2b.layers))
    assert own == 15 and memory("gemma4-e2b", length=100).kv_cache < 100 * own * 2 * 512 * 2 + 1


@pytest.mark.parametrize("more", [{"length": 65_536}, {"batched_tokens": 16_384}, {"images": True}])
def test_more_of_anything_needs_more(more: dict[str, int]) -> None:
    assert memory(**more).total > memory().total


def test_images_need_their_encoder_on_every_device() -> None:
    assert memory(tp=8, images=True).total - memory(tp=8).total == pytest.approx(ENCODER_BYTES, abs=1)
