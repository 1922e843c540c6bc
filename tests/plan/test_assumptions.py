from gemsmith.arch import find_variant
from gemsmith.hardware.model import step_cost
from gemsmith.plan.stage import assumptions_of


def sentences(recipe, model="gemma4-31b"):
    return " ".join(assumptions_of(step_cost(recipe, find_variant(model)), recipe))


def test_what_the_start_and_spot_were_taken_to_be_is_said(recipe):
    text = sentences(recipe(save_steps=40))
    assert "the checkpoint read at 0.2 to 1 GB/s (assumed)" in text
    assert "once in 6 hours (assumed)" in text and "half of the 40 steps between checkpoints" in text


def test_what_only_some_recipes_have_is_said_of_those(recipe):
    assert "dequantized a layer at a time" in sentences(recipe(dtype="nf4"))
    assert "Experts compute" in sentences(recipe("gemma4-26b-a4b"), "gemma4-26b-a4b")
    assert "dequantized" not in sentences(recipe()) and "Experts" not in sentences(recipe())
