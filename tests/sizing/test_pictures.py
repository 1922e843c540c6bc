"""What pictures add to a step's work and memory."""

from dataclasses import replace

import pytest

from gemsmith.plan.time import attention_flops, matmul_flops
from gemsmith.recipe import Mesh
from gemsmith.recipe_file import build_recipe
from gemsmith.sizing import memory_of, on_chips, pictures_of, work_of
from gemsmith.zoo import LORA_KINDS, find_variant


def make_recipe(**lora):
    return build_recipe({"checkpoint": "base", "data": {"train": "rows.jsonl", "max_length": 4096}, "lora": lora})


def make_work(name="gemma4-31b", *, images=3, chips="tpu", **lora):
    recipe, variant = make_recipe(**lora), find_variant(name)
    pictures = pictures_of(recipe, variant, images=images, soft_tokens=288) if images else None
    return on_chips(work_of(recipe, variant, pictures=pictures), chips, recipe)


def test_the_large_tower_is_counted_from_its_tensors():
    pictures = make_work().pictures
    assert pictures.patches == 2592 and round(pictures.parameters / 1e6) == 576  # the tower's 570, and the projector
    # Two operations a weight and patch, of the 541 M that patches meet, and attention between all patches of a picture.
    of_patches = 2 * 2592 * (768 * 1152 + 27 * (4 * 1152**2 + 3 * 1152 * 4304)) + 2 * 288 * 1152 * 5376
    assert pictures.row_flops == 3 * (of_patches + 4 * 27 * 1152 * 2592**2)
    assert pictures.row_bytes == 3 * (2592 * (768 * 4 + 8) + 288 * 4)


def test_a_frozen_tower_is_not_walked_back_and_an_adapted_one_is():
    frozen, adapted = make_work(), make_work(targets=[*LORA_KINDS, "vision"], rank=64)
    assert frozen.pictures.adapters == 0 and frozen.pictures.saved_width == 0
    assert adapted.pictures.adapters == 64 * (27 * (4 * 2 * 1152 + 3 * (1152 + 4304)) + 1152 + 5376)
    assert adapted.pictures.row_flops > 3 * frozen.pictures.row_flops
    assert adapted.trained_parameters == frozen.trained_parameters + adapted.pictures.adapters
    assert matmul_flops(adapted) == matmul_flops(frozen), "text tokens meet none of the tower's adapters"
    mesh = Mesh(fsdp=4)
    assert memory_of(adapted, mesh).saved > memory_of(frozen, mesh).saved


def test_memory_holds_the_tower_its_patches_and_its_workspace():
    text, seen, mesh = make_work(images=0), make_work(), Mesh(fsdp=4)
    one, other = memory_of(text, mesh), memory_of(seen, mesh)
    assert other.base - one.base == pytest.approx(2 * seen.pictures.parameters / 4)
    rows = -(-seen.rows // 4)
    assert other.data - one.data == rows * seen.pictures.row_bytes
    assert one.tower.total == 0 and other.tower.total > 0
    many = memory_of(replace(seen, pictures=replace(seen.pictures, images=60)), mesh)
    assert many.total > other.total and many.workspace == many.tower.total


def test_sliding_layers_that_see_both_ways_run_without_the_kernel():
    text, seen = make_work(images=0), make_work()
    assert seen.nearby_attention == "blocked" and text.nearby_attention == seen.attention == "flash"
    assert attention_flops(seen) > attention_flops(text)
    small = make_work("gemma4-e2b")
    assert small.nearby_attention == "flash" and small.ahead == 0


def test_the_12b_projects_patches_without_a_tower():
    pictures = make_work("gemma4-12b").pictures
    assert pictures.patches == 288 and pictures.scores_width == 0
    assert pictures.row_flops == 3 * 2 * 288 * 3840 * (6912 + 3840)
