from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.launch.provider import LaunchInputs
from gemsmith.launch.request import find_inputs
from gemsmith.recipe.load import build_recipe


def recipe_with(**data):
    return build_recipe({"model": "gemma4-e2b", "checkpoint": "gs://w/a/e2b", "data": {"train": "x"} | data})


def test_local_files_go_below_the_launched_recipe(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    found = find_inputs(recipe_with(train=str(rows)), "gs://b/n", mount=None)
    assert found.copies == {str(rows): "gs://b/n/launched/inputs/data-train/rows.jsonl"} and not found.images
    assert [(item.key, item.value) for item in found.placed] == [("data.train", "inputs/data-train/rows.jsonl")]


def test_a_dataset_of_the_hub_is_fetched_there():
    found = find_inputs(recipe_with(train="hub:me/rows@" + "a" * 40), "gs://b/n", mount=None)
    assert (found.placed, found.copies) == ((), {})


def test_a_base_in_a_bucket_is_read_through_the_mount(tmp_path):
    recipe = recipe_with(train={"task": "verilog", "rows": 2})
    found = find_inputs(recipe, "gs://b/n", mount="/mnt/weights")
    assert (found.placed[0].value, found.weights_bucket, found.copies) == ("/mnt/weights/a/e2b", "w", {})
    assert find_inputs(recipe, "gs://b/n", mount=None) == LaunchInputs(copies={})


def test_a_file_that_is_not_there_is_named_with_its_key():
    with pytest.raises(RecipeError, match=r"^data\.train: x does not exist"):
        find_inputs(recipe_with(), "gs://b/n", mount=None)
    with pytest.raises(RecipeError, match=r"^data\.train: /gone/x does not exist"):
        find_inputs(recipe_with(train=str(Path("/gone/x"))), "gs://b/n", mount=None)


def test_to_answer_rows_those_of_training_are_not_copied(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p"}\n')
    recipe = recipe_with(train=str(tmp_path / "gone.jsonl"), eval=str(rows))
    found = find_inputs(recipe, "gs://b/n", mount=None, rows=str(rows), trains=False)
    assert found.copies == {str(rows): f"gs://b/n/launched/{found.rows}"}
    placed = {item.key: item.value for item in found.placed}
    assert placed == {"data.train": "inputs/data-train/gone.jsonl", "data.eval": found.rows}, "the trained run's places"


@pytest.fixture
def images(tmp_path):
    for name in ("sphynx/1.png", "sphynx/2.png", "pug/1.png", "pug/2.png"):
        (tmp_path / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name).write_bytes(name.encode())
    return tmp_path / "pets"


def test_rows_go_as_they_are_and_their_images_beside_them(images):
    rows = images / "rows.jsonl"
    rows.write_text('{"image": "pug/1.png", "prompt": "p", "response": "r"}\n')
    found = find_inputs(recipe_with(train=str(rows)), "gs://b/n", mount=None)
    assert found.copies == {str(rows): "gs://b/n/launched/inputs/data-train/rows.jsonl"}
    (carried,) = found.images
    assert (carried.place, carried.folder, [*carried.sums]) == ("data-train", images, ["pug/1.png"])


def test_a_folder_of_photos_that_is_split_is_carried_once_and_stays_one_folder(images):
    """At two places its held-out images would be trained on."""
    data = {"train": str(images), "eval": str(images), "format": "image-folder", "prompt": "?", "held_out": 0.5}
    found = find_inputs(recipe_with(**data), "gs://b/n", mount=None)
    assert {item.key: item.value for item in found.placed} == dict.fromkeys(
        ("data.train", "data.eval"), "inputs/data-train/pets"
    )
    assert not found.copies
    assert [*found.images[0].sums] == ["pets/pug/1.png", "pets/pug/2.png", "pets/sphynx/1.png", "pets/sphynx/2.png"]
