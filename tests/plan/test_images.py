"""How many images a plan reckons with, and what it says of them."""

import json

import pytest

from gemsmith.arch import find_variant
from gemsmith.plan.counts import count_images
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.load import build_recipe, with_values

PHOTOS = {"train": "pets", "format": "image-folder", "prompt": "Which?", "max_length": 4096}


def make_recipe(model="gemma4-31b", **data):
    return build_recipe({"checkpoint": "base", "model": model, "data": PHOTOS | data})


class Counted:
    """What the data stage's record says of images."""

    rows = 5

    def __init__(self, images, most_images, most_patches):
        self.images, self.most_images, self.most_patches = images, most_images, most_patches


@pytest.mark.parametrize(
    ("data", "images"),
    [
        ({}, 10),
        ({"packing": False}, 1),
        ({"image_tokens": 70}, 37),
        ({"max_patches": 5040}, 2),
        ({"max_length": 64}, 1),
    ],
)
def test_a_folder_of_photos_fills_its_rows(data, images):
    counted = count_images(make_recipe(**data), find_variant("gemma4-31b"))
    assert (counted.images.images, counted.in_prompt) == (images, 1)
    room = "an image" if images == 1 else f"{images} images"
    assert f"room for {room} of " in counted.reasons[0] and "assumed, with 40 tokens" in counted.reasons[0]
    assert counted.images.soft_tokens == {280: 288, 70: 96}[data.get("image_tokens", 280)], "whole buckets"


def test_the_data_stage_has_counted_them():
    recipe, variant = make_recipe(), find_variant("gemma4-31b")
    counted = count_images(recipe, variant, Counted(9, 4, 9000))
    assert counted.images.images == 4 and "counted by the data stage" in counted.reasons[0]
    assert counted.in_prompt == 2, "9 of 5 documents"
    assert count_images(recipe, variant, Counted(0, 0, 0)).images is None


ROWS = {"format": "auto", "prompt": None, "packing": False}
PART, WORDS = {"type": "image", "path": "a.jpg"}, {"type": "text", "text": "Which?"}


@pytest.mark.parametrize(
    ("row", "images"),
    [
        ({"image": "a.jpg", "prompt": "p", "response": "r"}, 1),
        ({"images": ["a.jpg", "b.jpg", "c.jpg"], "prompt": "p", "response": "r"}, 3),
        ({"prompt": [PART, PART, WORDS], "response": "r"}, 2),
        ({"images": ["a.jpg"], "messages": [{"role": "user", "content": [{"type": "image"}, WORDS]}]}, 1),
        ({"messages": [{"role": "user", "content": "hi"}, 3], "image": None}, 0),
    ],
)
def test_before_the_data_stage_the_first_rows_of_a_file_tell(row, images, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in ({"prompt": "p", "response": "r"}, row, 5)) + "{half")
    counted = count_images(make_recipe(train=str(file), **ROWS), find_variant("gemma4-31b"))
    assert (counted.images.images if counted.images else 0) == images
    assert not images or "as in the first rows of rows.jsonl" in counted.reasons[0]


def test_rows_that_are_not_here_have_images_where_bench_says_so():
    recipe, variant = make_recipe(train="absent.jsonl", eval="held_out.jsonl", **ROWS), find_variant("gemma4-31b")
    text = count_images(recipe, variant)
    assert text.images is None and "Rows are taken for text alone" in text.reasons[0]
    seen = count_images(with_values(recipe, [("bench.images", True)]), variant)
    assert seen.images.images == 1 and "bench.images says that rows have some" in seen.reasons[0]
    assert count_images(make_recipe(train={"task": "verilog", "rows": 4}, **ROWS), variant) == (None, (), 0)


def test_what_images_do_to_splash_attention_is_said_where_they_do_it():
    assert "splash kernel cannot" in count_images(make_recipe(), find_variant("gemma4-31b")).reasons[1]
    assert len(count_images(make_recipe("gemma4-e2b"), find_variant("gemma4-e2b")).reasons) == 1


def test_a_plan_with_images_holds_more_and_takes_longer():
    rows = {"train": "rows.jsonl", "format": "auto", "prompt": None}
    seen, text = (plan_only(make_recipe(**data), machine="v6e-8").machines[0] for data in ({}, rows))
    assert seen.parts["frozen weights"] > text.parts["frozen weights"] and seen.parts["data"] > text.parts["data"]
    assert seen.step_s[1] > text.step_s[1]
    (note,) = (note for note in seen.notes if note.startswith("images, by formula: "))
    assert "for embedding them and 50 sliding layers without the kernel" in note
    assert not any(note.startswith("images") for note in text.notes)
