import json

import pytest

from gemsmith.arch import find_variant
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.hardware.model import step_cost
from gemsmith.plan.fix import find_fix
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.load import build_recipe, with_values

CATALOG = load_catalog()


def fix(recipe, machine, model="gemma4-31b"):
    variant = find_variant(model)
    return find_fix(
        recipe,
        find_machine(CATALOG, machine),
        lambda dtype: step_cost(with_values(recipe, [("train.dtype", dtype)]), variant),
    )


@pytest.mark.parametrize(
    ("machine", "train", "changes"),
    [
        ("v5p-8", {"remat": "none"}, {"train.remat": "auto"}),
        ("v6e-8", {"mesh": {"fsdp": 1, "tp": 4}}, {"train.mesh": "auto"}),
        ("h100", {}, {"train.gradient_accumulation_steps": 8}),
        ("rtx-pro-6000", {}, {"train.gradient_accumulation_steps": 2}),
        ("h100", {"dtype": "float32"}, {"train.gradient_accumulation_steps": 8, "train.dtype": "bfloat16"}),
        ("h100", {"backend": "trl"}, {"train.gradient_accumulation_steps": 8}),
    ],
)
def test_the_smallest_change_is_found(recipe, machine, train, changes):
    assert fix(recipe(**train), machine).changes == changes


def test_weights_that_do_not_fit_are_held_in_fewer_bits(recipe):
    found = fix(recipe(), "v5e-4")
    assert found.changes["train.dtype"] == "int8" and found.recipe.train.dtype == "int8"
    assert not found.choice.problems


@pytest.mark.parametrize("machine", ["v5e-4", "h100", "rtx-pro-6000"])
def test_no_change_of_a_fix_can_be_left_out(recipe, machine):
    wanted = recipe(remat="none")
    changes = fix(wanted, machine).changes
    assert changes
    for key in changes:
        rest = [f"{name}={json.dumps(value)}" for name, value in changes.items() if name != key]
        with_rest = build_recipe(wanted.model_dump(mode="json"), rest)
        if key != "train.mesh":  # there training by itself would take tp 1
            assert not plan_only(with_rest, machine).machines[0].fits, key


def test_a_mesh_that_training_would_not_choose_is_part_of_the_fix(recipe):
    found = fix(recipe(global_batch_size=1), "v5e-4")
    assert found.choice.mesh.tp > 1 and found.changes["train.mesh"] == found.choice.mesh.model_dump()


@pytest.mark.parametrize(("machine", "train"), [("l4", {}), ("v5p-8", {"backend": "trl"})])
def test_nothing_is_found_where_nothing_helps(recipe, machine, train):
    """24 GB hold no 31B with its adapters; TRL trains on no TPU."""
    assert fix(recipe(**train), machine) is None


def test_a_recipe_that_could_not_be_trained_is_no_fix(recipe):
    """bitsandbytes leaves experts in bfloat16, so nf4 would not help."""
    assert fix(recipe("gemma4-26b-a4b", backend="trl"), "l4", "gemma4-26b-a4b") is None
