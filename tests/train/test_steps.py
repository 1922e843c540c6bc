import pytest

from gemsmith.errors import RecipeError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Optimizer
from gemsmith.runs.records import Extension
from gemsmith.runs.run import Run
from gemsmith.train.schedule import check_export_step, describe_extension, say_schedule, schedule_notices


def run_of(folder, *overrides: str) -> Run:
    return Run(path=folder, recipe=build_recipe({"checkpoint": "x", "data": {"train": "x"}}, overrides))


def test_a_rate_that_is_never_reached_is_told_before_the_first_step_and_in_the_record(capsys):
    recipe = build_recipe({"checkpoint": "x", "data": {"train": "x"}}, ["optimizer.warmup_steps=100"])
    notice = (
        "Training has 19 steps and warm-up takes 100, so no step gets optimizer.learning_rate, 0.0001: the last one "
        "gets 1.8e-05."
    )
    assert schedule_notices(recipe.optimizer, 19)[0].startswith(notice)
    say_schedule(recipe, 19)
    said = capsys.readouterr().err
    assert "train: 19 steps, warm-up of 100 to the learning rate 0.0001\n" in said and notice in said


@pytest.mark.parametrize(
    ("warmup", "steps", "told"), [(18, 19, False), (19, 19, True), (0, 1, False), (1, 1, True), (None, 1, False)]
)
def test_one_step_at_the_full_rate_is_enough(warmup, steps, told):
    assert bool(schedule_notices(Optimizer(warmup_steps=warmup), steps)) == told


def test_the_rates_of_further_steps_are_told():
    optimizer = Optimizer(learning_rate=0.1, schedule="linear", warmup_steps=0)
    said = describe_extension(optimizer, Extension(after=4, planned_steps=4, steps=10))
    assert said.endswith("from step 5 on they are those of a linear schedule over 10 steps, 0.06 to 0.01")


def test_open_warmup_is_said_with_its_reason(capsys):
    say_schedule(build_recipe({"checkpoint": "x", "data": {"train": "x"}}), 19)
    assert (
        "19 steps, warm-up of 1 to the learning rate 0.0001 (a tenth of the steps, at most 100: optimizer.warmup_steps "
        "is not set)" in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(("step", "kept"), [(25, True), (20, True), (10, True), (24, False), (5, False), (30, False)])
def test_a_step_that_will_not_be_kept_cannot_be_exported(tmp_path, step, kept):
    """Of 25 steps, saved every 5th, the last four stay: 10, 15, 20, 25."""
    run = run_of(tmp_path, f"export.step={step}", "train.save_steps=5", "train.save_total_limit=4")
    if kept:
        return check_export_step(run, 25)
    with pytest.raises(
        RecipeError, match=rf"^export\.step: {step} was given; .* 10, 15, 20, 25 kept; set one of those or null"
    ):
        check_export_step(run, 25)
    return None


def test_a_step_that_is_saved_already_counts_unless_training_starts_again(tmp_path):
    run = run_of(tmp_path, "export.step=7")
    (run.checkpoints / "7").mkdir(parents=True)
    check_export_step(run, 25)
    with pytest.raises(RecipeError, match=r"export\.step: 7 was given"):
        check_export_step(run, 25, restart=True)


def test_nothing_is_asked_of_a_recipe_that_exports_the_last(tmp_path):
    check_export_step(run_of(tmp_path), 1)
    assert not (tmp_path / "checkpoints").exists()
