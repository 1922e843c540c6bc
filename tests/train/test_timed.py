import pytest

from gemsmith.plan.stage import plan
from gemsmith.records import TrainStep
from gemsmith.run import open_run
from gemsmith.train.timed import against_plan, describe, timed_steps


def steps_of(*seconds: float) -> list[TrainStep]:
    return [
        TrainStep(step=number, loss=1, grad_norm=1, learning_rate=1, real_tokens=1, step_s=each)
        for number, each in enumerate(seconds, 1)
    ]


@pytest.fixture
def planned(small_recipe, tmp_path):
    run = open_run(tmp_path / "run", small_recipe(hardware={"machines": ["v5p-8", "cpu"]}))
    plan(run)
    return run


def test_first_steps_of_each_attempt_are_left_out():
    assert [step.step for step in timed_steps(steps_of(9, 1, 1, 9, 1), [3])] == [2, 3, 5]


def test_the_plan_of_this_machine_is_compared_with_the_median(planned):
    found = against_plan(planned, (), steps_of(1, 2, 30))
    assert (found.machine, found.step_s, found.steps) == ("cpu", 2, 3)
    assert "times the most" in describe(found)
    low, high = found.planned_step_s
    assert "within it" in describe(found.model_copy(update={"step_s": (low + high) / 2}))
    assert "2 times faster than the least" in describe(found.model_copy(update={"step_s": low / 2}))
    assert against_plan(planned, ("TPU v5",) * 4, steps_of(1)).machine == "v5p-8"


def test_nothing_is_compared_with_no_plan_another_machines_or_an_older_recipes(planned):
    assert against_plan(planned, ("NVIDIA H200",), steps_of(1)) is None
    assert against_plan(planned, (), []) is None
    planned.record_file("plan").write_text("{}")
    assert against_plan(planned, (), steps_of(1)) is None
    planned.record_file("plan").unlink()
    assert against_plan(planned, (), steps_of(1)) is None
