from dataclasses import replace

import pytest

from gemsmith.arch import VARIANTS, find_variant
from gemsmith.errors import RecipeError
from gemsmith.hardware.model.limits import check_training, check_trl_quantized
from gemsmith.recipe.load import build_recipe
from support.cases import each


def check(model: str, *overrides: str) -> None:
    check_training(build_recipe({"checkpoint": "x", "data": {"train": "x"}}, overrides), find_variant(model))


@each(
    ("model", "overrides", "expected"),
    [
        (
            "gemma4-31b",
            ["train.gradient_accumulation_steps=3"],
            r"train\.global_batch_size: 8 rows do not divide over micro_batches 3 .* set a multiple of 3",
        ),
        (
            "gemma4-31b",
            ["train.mesh.fsdp=16"],
            r"train\.global_batch_size: 8 rows do not divide over replica × fsdp = 16",
        ),
        (
            "gemma4-31b",
            ["train.mesh.sequence=3"],
            r"data\.max_length: 4096 does not divide over 3 devices of a row \(sequence 3\)",
        ),
        ("gemma4-31b", ["train.mesh.tp=3"], r"train\.mesh\.tp: 3 does not split the 32 heads"),
        (
            "tiny-31b",
            ["train.attention=splash"],
            r"train\.attention: the splash kernel takes heads in multiples of 128",
        ),
        (
            "gemma4-31b",
            ["train.attention=splash", "data.max_length=1000"],
            r"data\.max_length: .* multiples of 128 positions .*set 1024,",
        ),
        (
            "gemma4-31b",
            ["train.backend=trl", "train.mesh.tp=2"],
            r"train\.mesh: train\.backend trl splits by replica and fsdp only",
        ),
        (
            "gemma4-31b",
            ["train.backend=trl", "train.gradient_accumulation_steps=3"],
            r"train\.global_batch_size: 8 cannot be split over 1 processes × 3",
        ),
        (
            "gemma4-31b",
            ["train.backend=trl", "train.dtype=nf4", "train.mesh.fsdp=2"],
            r"train\.dtype: nf4 trains in one process, 2 were",
        ),
        (
            "gemma4-26b-a4b",
            ["train.backend=trl", "train.dtype=nf4"],
            r"train\.dtype: nf4 was given, but bitsandbytes leaves the experts",
        ),
    ],
)
def test_what_no_machine_can_train_is_refused_without_one(model, overrides, expected):
    with pytest.raises(RecipeError, match=rf"^{expected}") as refusal:
        check(model, *overrides)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.gradient_accumulation_steps=4"],
        ["train.mesh={fsdp: 2, sequence: 2, tp: 4}", "train.attention=splash"],
        ["train.backend=trl", "train.dtype=nf4"],
        ["train.backend=trl", "train.mesh={replica: 2, fsdp: 4}"],
    ],
)
def test_what_some_machine_can_train_is_not(overrides):
    check("gemma4-31b", *overrides)


def test_rows_that_blocks_of_bitsandbytes_run_over_are_refused():
    """Its kernels for CPUs and for GPUs differ there; no published variant has such rows."""
    odd = replace(find_variant("tiny-31b"), embed_dim=96)
    with pytest.raises(
        RecipeError, match=r"^train\.dtype: nf4 was given, but bitsandbytes has blocks of 64, which run over .*q_proj"
    ):
        check_trl_quantized("nf4", odd)
    for variant in VARIANTS.values():
        if not variant.experts:
            check_trl_quantized("nf4", variant)
