from gemsmith.recipe.load import build_recipe, differing_keys, with_values

MINIMAL = {"checkpoint": "folder", "data": {"train": "rows.jsonl"}}


def test_differing_keys_are_named_with_both_values():
    one, two = (build_recipe(MINIMAL, [f"lora.rank={rank}"]) for rank in (8, 16))
    assert differing_keys(one, two) == {"lora.rank": (8, 16)}


def test_values_that_were_derived_are_put_in_their_section_and_leave_the_rest():
    recipe = build_recipe(MINIMAL, ["lora.rank=8"])
    changed = with_values(recipe, [("lora.alpha", 32.0)])
    assert differing_keys(recipe, changed) == {"lora.alpha": (64.0, 32.0)}
    assert changed.lora.model_fields_set == {"rank", "alpha"}
