from pathlib import Path

import pytest

from gemsmith.errors import RecipeError
from gemsmith.launch.inputs import move_inputs
from gemsmith.recipe_file import build_recipe


def recipe_with(**data):
    return build_recipe({"model": "gemma4-e2b", "checkpoint": "gs://w/a/e2b", "data": {"train": "x"} | data})


def test_local_files_go_below_the_launched_recipe(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    keys, copies, _ = move_inputs(recipe_with(train=str(rows)), "gs://b/n", mount=None)
    assert copies == {str(rows): "gs://b/n/launched/inputs/data-train/rows.jsonl"}
    assert [(item.key, item.value) for item in keys] == [("data.train", "inputs/data-train/rows.jsonl")]


def test_a_base_in_a_bucket_is_read_through_the_mount(tmp_path):
    recipe = recipe_with(train={"task": "verilog", "rows": 2})
    keys, copies, bucket = move_inputs(recipe, "gs://b/n", mount="/mnt/weights")
    assert (keys[0].value, bucket, copies) == ("/mnt/weights/a/e2b", "w", {})
    assert move_inputs(recipe, "gs://b/n", mount=None) == ([], {}, None)


def test_a_file_that_is_not_there_is_named_with_its_key():
    with pytest.raises(RecipeError, match=r"^data\.train: x is not there"):
        move_inputs(recipe_with(), "gs://b/n", mount=None)
    with pytest.raises(RecipeError, match=r"^data\.train: /gone/x is not there"):
        move_inputs(recipe_with(train=str(Path("/gone/x"))), "gs://b/n", mount=None)


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ('{"image": "a.jpg", "prompt": "p", "response": "r"}', True),
        ('{"images": ["a.jpg"], "messages": []}', True),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}]}]}', True),
        ('{"image": {"bytes": "YQ=="}, "prompt": "p", "response": "r"}', False),
        ('{"messages": [{"role": "user", "content": "path"}]}', False),
        ("not JSON", False),
    ],
)
def test_rows_that_name_pictures_of_this_machine_are_refused(tmp_path, row, refused):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row + "\n")
    recipe = recipe_with(train=str(rows))
    if refused:
        with pytest.raises(RecipeError, match=r"^data\.train: rows of .* name pictures by their paths on this machine"):
            move_inputs(recipe, "gs://b/n", mount=None)
    else:
        assert move_inputs(recipe, "gs://b/n", mount=None)[1]
