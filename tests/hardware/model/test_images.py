"""What images add to a step's work and memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.arch import LORA_KINDS, find_variant
from gemsmith.hardware.model import images_of, memory_of, on_chips, step_cost
from gemsmith.hardware.model.step_time import _score_bytes, attention_flops, matmul_flops
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Mesh


def make_recipe(**lora):
    return build_recipe({"checkpoint": "base", "data": {"train": "rows.jsonl", "max_length": 4096}, "lora": lora})


def make_work(name="gemma4-31b", *, images=3, chips="tpu", **lora):
    recipe, variant = make_recipe(**lora), find_variant(name)
    load = images_of(recipe, variant, images=images, soft_tokens=288) if images else None
    return on_chips(step_cost(recipe, variant, images=load), chips, recipe)


def test_the_large_tower_is_counted_from_its_tensors():
    images = make_work().images
    assert images.patches == 2592 and round(images.parameters / 1e6) == 576  # the tower's 570, and the projector
    # Two operations a weight and patch, of the 541 M that patches meet, and attention between all patches of an image.
    of_patches = 2 * 2592 * (768 * 1152 + 27 * (4 * 1152**2 + 3 * 1152 * 4304)) + 2 * 288 * 1152 * 5376
    assert images.row_flops == 3 * (of_patches + 4 * 27 * 1152 * 2592**2)
    assert images.row_bytes == 3 * (2592 * (768 * 4 + 8) + 288 * 4)


def test_a_frozen_tower_is_not_walked_back_and_an_adapted_one_is():
    frozen, adapted = make_work(), make_work(targets=[*LORA_KINDS, "vision"], rank=64)
    assert frozen.images.adapters == 0 and frozen.images.saved_width == 0
    assert adapted.images.adapters == 64 * (27 * (4 * 2 * 1152 + 3 * (1152 + 4304)) + 1152 + 5376)
    assert adapted.images.row_flops > 3 * frozen.images.row_flops
    assert adapted.trained_parameters == frozen.trained_parameters + adapted.images.adapters
    assert matmul_flops(adapted) == matmul_flops(frozen), "text tokens meet none of the tower's adapters"
    mesh = Mesh(fsdp=4)
    assert memory_of(adapted, mesh).saved > memory_of(frozen, mesh).saved


def test_memory_holds_the_tower_its_patches_and_its_workspace():
    text, seen, mesh = make_work(images=0), make_work(), Mesh(fsdp=4)
    one, other = memory_of(text, mesh), memory_of(seen, mesh)
    whole = 2 * 10_240 * 1152  # the table of positions, which is not split
    assert seen.images.whole_parameters == whole
    assert other.base - one.base == pytest.approx(2 * ((seen.images.parameters - whole) / 4 + whole))
    rows = -(-seen.rows // 4)
    assert other.data - one.data == rows * seen.images.row_bytes
    assert one.tower.total == 0 and other.tower.total > 0
    many = memory_of(replace(seen, images=replace(seen.images, images=60)), mesh)
    assert many.total > other.total and many.workspace is many.tower


def test_sliding_layers_that_see_both_ways_run_without_the_kernel():
    text, seen = make_work(images=0), make_work()
    assert seen.nearby_attention == "blocked" and text.nearby_attention == seen.attention == "flash"
    assert attention_flops(seen) > attention_flops(text)
    small = make_work("gemma4-e2b")
    assert small.nearby_attention == "flash" and small.ahead == 0


def test_the_12b_projects_patches_without_a_tower():
    images = make_work("gemma4-12b").images
    assert images.patches == 288 and images.scores_width == 0
    assert images.row_flops == 3 * 2 * 288 * 3840 * (6912 + 3840)


RECORDS = Path(__file__).parents[3] / "benchmarks" / "records" / "tpu_compile"


def read_case(name):
    """The bytes of a compiled step, and the formula's memory of it."""
    record = json.loads((RECORDS / f"{name}.json").read_text())
    settings = record["settings"]
    train = {"global_batch_size": settings["rows"], **settings["train"], "remat": record["remat"]}
    data = {"train": "x", "max_length": settings["length"]}
    recipe = build_recipe({"checkpoint": "x", "data": data, "lora": settings["lora"], "train": train})
    variant = find_variant(settings["variant"])
    images = images_of(recipe, variant, **settings["images"]) if settings["images"] else None
    work = on_chips(step_cost(recipe, variant, images=images), "tpu", recipe)
    return record["memory_per_chip"], memory_of(work, recipe.train.mesh)


def test_what_images_add_is_near_what_xla_adds():
    """The same rows of 640 with an image each and as text alone, both compiled for a v6e-8."""
    (xla, ours), (xla_text, ours_text) = (read_case(f"31b-v6e-images-640{end}") for end in ("", "-text"))
    added = xla["peak_bytes"] - xla_text["peak_bytes"]
    assert ours.total - ours_text.total == pytest.approx(added, rel=0.15)
    given = xla["argument_bytes"] - xla_text["argument_bytes"]
    assert ours.base + ours.data - ours_text.base - ours_text.data == pytest.approx(given, rel=0.1)


@pytest.mark.parametrize("case", ["31b-v6e-images", "31b-v6e-images-640"])
def test_memory_with_images_is_near_what_xla_reserves(case):
    """Ratios 0.953 and 0.998."""
    xla, ours = read_case(case)
    assert 0.95 < ours.total / xla["peak_bytes"] < 1.05


def test_scores_in_memory_are_the_towers_and_those_of_sliding_layers_without_a_kernel():
    """Float32: the tower's written and read, with adapters in four passes; a sliding layer's in five."""
    seen, tower = make_work(), 2 * 4 * 3 * 27 * 16 * 2592**2
    assert seen.images.row_score_bytes == tower
    assert make_work(targets=[*LORA_KINDS, "vision"]).images.row_score_bytes == 4 * tower
    assert make_work("gemma4-12b").images.row_score_bytes == 0
    sliding = 2 * 5 * 4 * 50 * 32 * seen.sliding_pairs
    assert _score_bytes(seen, Mesh(fsdp=4)) == 2 * (tower + sliding), "two of eight rows"
    assert _score_bytes(make_work(chips="gpu"), Mesh(fsdp=4)) == 2 * tower
    assert _score_bytes(make_work(images=0), Mesh(fsdp=4)) == _score_bytes(make_work(chips="cpu"), Mesh(fsdp=4)) == 0
