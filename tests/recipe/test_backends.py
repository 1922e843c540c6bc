"""What a step runs as: the kernels that fit, and the loops of blocked attention."""

from dataclasses import replace

import pytest

from gemsmith.arch import find_variant
from gemsmith.recipe.backends import (
    BACKENDS,
    PLAIN,
    TUNED,
    attention_loops,
    attention_on,
    bucket_of,
    chains_layers,
    default_optimizations,
    goes_row_by_row,
)


@pytest.mark.parametrize(
    ("length", "block", "window", "ahead"),
    [(4096, 512, None, 0), (4096, 512, 1024, 0), (640, 64, 100, 0), (64, 64, None, 0), (640, 64, 100, 280)],
)
def test_loops_of_attention_have_every_block_once_and_every_key_that_it_sees(length, block, window, ahead):
    loops = list(attention_loops(length, block=block, window=window, ahead=ahead))
    assert [number for blocks, _ in loops for number in blocks] == list(range(length // block))
    for blocks, keys in loops:
        last = (blocks[-1] + 1) * block
        seen = last if window is None else min(last, window - 1 + block)
        assert seen <= keys <= length
    assert len(loops) <= 9


def test_splash_runs_on_a_tpu_where_its_kernel_takes_the_heads_and_is_wanted():
    real, tiny = find_variant("gemma4-31b"), find_variant("tiny-31b")
    assert attention_on("tpu", "auto", real) == "flash"
    assert {
        attention_on(*other) for other in [("tpu", "dense", real), ("gpu", "auto", real), ("tpu", "auto", tiny)]
    } == {"blocked"}


def test_layers_are_chained_where_o_and_down_are_saved_and_nothing_else_adds_matmuls():
    dense = find_variant("gemma4-31b")
    assert chains_layers(TUNED, dense, ("o", "down", "q"), dequantizes=False)
    for optimizations, variant, remat, dequantizes in (
        (PLAIN, dense, ("o", "down"), False),
        (TUNED, dense, ("o",), False),
        (TUNED, dense, "layer", False),
        (TUNED, dense, ("o", "down"), True),
        (TUNED, replace(dense, per_layer_input=256), ("o", "down"), False),
        (TUNED, find_variant("gemma4-26b-a4b"), ("o", "down"), False),
    ):
        assert not chains_layers(optimizations, variant, remat, dequantizes=dequantizes)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_tuned_off_leaves_no_lever_on_any_device(kind):
    off, auto = default_optimizations(kind, "off"), default_optimizations(kind, "auto")
    assert not any(vars(off).values())
    assert auto.fuses_lora == (kind == "tpu")
    assert [goes_row_by_row(kind, backend) for backend in BACKENDS] == [kind == "cpu", False]


@pytest.mark.parametrize(("soft_tokens", "bucket"), [(1, 32), (32, 32), (33, 64), (256, 256), (266, 288), (1120, 1120)])
def test_buckets_are_multiples_of_32(soft_tokens, bucket):
    assert bucket_of(soft_tokens) == bucket
