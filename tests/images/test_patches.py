"""Patches against the code that the processors of transformers run, where that needs no torchvision."""

import ast
import hashlib
import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from gemsmith.images.patches import (
    BUDGETS,
    PatchConfig,
    count_soft_tokens,
    cut,
    fitted_size,
    make_patches,
    read_patching,
)
from gemsmith.recipe.schema import Data
from support.images import image_values

GOLDEN = Path(__file__).parent / "golden" / "unified.json"
SIZES = [(640, 480), (7, 9), (768, 768), (33, 1200), (2, 1500), (1500, 3)]


def image_of(width: int, height: int) -> Image.Image:
    return Image.fromarray(image_values(width, height))


@pytest.mark.parametrize("budget", BUDGETS)
def test_sizes_are_those_of_the_processor(budget):
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    random = np.random.default_rng(budget)
    sides = np.exp(random.uniform(0, 8.5, (1000, 2))).astype(int).tolist()
    for width, height in [*sides, [1, 5000], [5000, 1], [1, 1]]:
        tall, wide = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
        patching = PatchConfig(budget=budget)
        assert fitted_size(width, height, patching) == (wide, tall), (width, height)
        assert count_soft_tokens(width, height, patching) == wide * tall // 48**2 <= budget


def test_recipes_allow_the_budgets_of_the_processor():
    from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS

    assert get_args(Data.model_fields["image_tokens"].annotation) == BUDGETS == _SUPPORTED_SOFT_TOKENS


@pytest.mark.parametrize("budget", [70, 280])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_positions_and_counts_are_those_of_the_processor_bit_for_bit(size, budget):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget).preprocess([image_of(*size)], return_tensors="np")
    ours = make_patches(image_of(*size), PatchConfig(budget=budget))
    count, values, positions = len(ours.values), theirs["pixel_values"][0], theirs["image_position_ids"][0]
    assert ours.values.dtype == np.float32 and np.array_equal(ours.values, values[:count])
    assert ours.positions.dtype == np.int32 and np.array_equal(ours.positions, positions[:count])
    assert not values[count:].any() and (positions[count:] == -1).all(), "the rest is padding"
    assert ours.soft_tokens == int(theirs["num_soft_tokens_per_image"][0])


def unified_functions() -> dict:
    """The functions of transformers' file, which cannot be imported without torchvision."""
    import torch
    import transformers

    file = Path(transformers.__file__).parent / "models/gemma4_unified/image_processing_gemma4_unified.py"
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names: dict = {"torch": torch, "math": math}
    exec(compile(tree, str(file), "exec"), names)
    return names


@pytest.mark.parametrize("size", [(384, 384), (480, 288)], ids=str)
def test_merged_patches_are_those_of_the_unified_processor_bit_for_bit(size):
    """Of images that are not resized: there it uses torchvision."""
    import torch

    theirs, patching = unified_functions(), PatchConfig(budget=70, merged=True)
    assert fitted_size(*size, patching) == size
    pixels = torch.from_numpy(image_values(*size)).permute(2, 0, 1) * (1 / 255)
    patches = theirs["convert_image_to_patches"](pixels, 16)
    columns, rows = size[0] // 16, size[1] // 16
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = torch.stack([x, y], dim=-1).reshape(-1, 2)
    values, positions = (part[0] for part in theirs["patches_merge"](patches[None], grid[None], rows * columns // 9))
    ours = make_patches(image_of(*size), patching)
    assert ours.soft_tokens == len(ours.values) == rows * columns // 9
    assert np.array_equal(ours.values, values.numpy()) and np.array_equal(ours.positions, positions.numpy())


def described(merged: bool) -> dict:
    made = make_patches(image_of(5, 3), PatchConfig(budget=70, merged=merged))
    return {
        "values": hashlib.sha256(made.values.tobytes()).hexdigest(),
        "shape": list(made.values.shape),
        "positions": made.positions.tolist()[:20],
        "soft_tokens": made.soft_tokens,
    }


def test_merged_patches_are_those_of_the_golden_file():
    assert described(merged=True) == json.loads(GOLDEN.read_text())


def test_a_merged_patch_holds_the_pixels_of_its_nine():
    image = image_of(96, 144)
    nine, one = (cut(image, PatchConfig(merged=merged)) for merged in (False, True))
    assert nine.shape[:2] == (3 * one.shape[0], 3 * one.shape[1])
    block = nine[:3, 3:6].reshape(3, 3, 16, 16, 3).transpose(0, 2, 1, 3, 4).reshape(48, 48, 3)
    assert np.array_equal(one[0, 1].reshape(48, 48, 3), block)


def test_both_kinds_scale_by_a_255th_each_in_its_processors_arithmetic():
    line = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 256, 3)
    tower, unified = (
        set(make_patches(Image.fromarray(line), PatchConfig(merged=merged)).values.ravel().tolist())
        for merged in (False, True)
    )
    assert tower <= {*(np.arange(256) * (1 / 255)).astype(np.float32).tolist()}
    assert unified <= {*(np.arange(256, dtype=np.float32) * np.float32(1 / 255)).tolist()}
    assert tower != unified


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_patching_is_read_from_the_config(kind):
    vision = {"patch_size": 4, "pooling_kernel_size": 2}
    patching = read_patching({"model_type": kind, "vision_config": vision}, 70)
    assert (patching.patch, patching.pooling, patching.budget) == (4, 2, 70)
    assert patching.side == {"gemma4": 4, "gemma4_unified": 8}[kind]
    assert read_patching({"model_type": kind, "vision_config": None}, 280).patch == 16


def test_tiny_patches_follow_the_same_rules():
    made = make_patches(image_of(20, 10), PatchConfig(budget=70, patch=4, pooling=2))
    assert made.values.shape == (4 * made.soft_tokens, 48)
    assert made.positions.max(axis=0).tolist() == [2 * 11 - 1, 2 * 5 - 1] and made.soft_tokens == 55
