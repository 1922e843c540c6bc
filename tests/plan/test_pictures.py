"""How many pictures a plan reckons with, and what it says of them."""

import pytest

from gemsmith.plan.pictures import count_pictures
from gemsmith.plan.stage import plan_only
from gemsmith.recipe_file import build_recipe
from gemsmith.zoo import find_variant

PHOTOS = {"train": "pets", "format": "image-folder", "prompt": "Which?", "max_length": 4096}


def make_recipe(model="gemma4-31b", **data):
    return build_recipe({"checkpoint": "base", "model": model, "data": PHOTOS | data})


class Counted:
    """What the data stage's record says of pictures."""

    def __init__(self, pictures, most_pictures, most_patches):
        self.pictures, self.most_pictures, self.most_patches = pictures, most_pictures, most_patches


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
    counted = count_pictures(make_recipe(**data), find_variant("gemma4-31b"))
    assert counted.pictures.images == images
    assert f"room for {images} pictures" in counted.reasons[0] and "assumed, with 40 tokens" in counted.reasons[0]


def test_the_data_stage_has_counted_them():
    recipe, variant = make_recipe(), find_variant("gemma4-31b")
    counted = count_pictures(recipe, variant, Counted(9, 4, 9000))
    assert counted.pictures.images == 4 and "counted by the data stage" in counted.reasons[0]
    assert count_pictures(recipe, variant, Counted(9, 0, 9000)).pictures.images == 4, "of an earlier version's record"
    assert count_pictures(recipe, variant, Counted(0, 0, 0)).pictures is None


def test_what_pictures_do_to_splash_attention_is_said_where_they_do_it():
    assert "splash kernel cannot" in count_pictures(make_recipe(), find_variant("gemma4-31b")).reasons[1]
    assert len(count_pictures(make_recipe("gemma4-e2b"), find_variant("gemma4-e2b")).reasons) == 1


def test_a_plan_with_pictures_holds_more_and_takes_longer():
    rows = {"train": "rows.jsonl", "format": "auto", "prompt": None}
    seen, text = (plan_only(make_recipe(**data), on="v6e-8").machines[0] for data in ({}, rows))
    assert seen.parts["frozen weights"] > text.parts["frozen weights"] and seen.parts["data"] > text.parts["data"]
    assert seen.step_s[1] > text.step_s[1]
    assert not count_pictures(make_recipe(**rows), find_variant("gemma4-31b")).reasons
