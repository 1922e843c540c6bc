import re

import pytest

from gemsmith.plan.stage import plan
from gemsmith.runs.records import Computer, Provenance, TrainRecord, TrainStep
from gemsmith.runs.run import open_run
from gemsmith.train.logging import against_plan, describe, describe_first_step, machine_of, timed_steps, trained_s


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
    found = against_plan(planned, "cpu", steps_of(1, 2, 30))
    assert (found.machine, found.step_s, found.steps) == ("cpu", 2, 3)
    assert "times the most" in describe(found)
    low, high = found.planned_step_s
    assert "within it" in describe(found.model_copy(update={"step_s": (low + high) / 2}))
    assert "2 times faster than the least" in describe(found.model_copy(update={"step_s": low / 2}))
    assert against_plan(planned, "v5p-8", steps_of(1)).machine == "v5p-8"


def test_nothing_is_compared_with_no_plan_another_machines_or_an_older_recipes(planned):
    assert against_plan(planned, "1xh200", steps_of(1)) is against_plan(planned, None, steps_of(1)) is None
    assert against_plan(planned, "cpu", []) is None
    assert re.fullmatch(r"train  the first step.*: \d+ to \d+ s, estimated", describe_first_step(planned, "cpu"))
    assert describe_first_step(planned, "1xh200").endswith("minutes for a large one")
    planned.record_file("plan").write_text("{}")
    assert against_plan(planned, "cpu", steps_of(1)) is None
    planned.record_file("plan").unlink()
    assert against_plan(planned, "cpu", steps_of(1)) is None


@pytest.mark.parametrize(
    ("machines", "devices", "expected"),
    [
        (["v5p-8"], ["NVIDIA H100 80GB HBM3"] * 2, "2xh100"),
        (["v5p-8"], ["TPU v5"] * 4, "v5p-8"),
        (["v5p-8"], ["TPU v5 lite"] * 4, "v5e-4"),
        (["v5p-8"], [], "cpu"),
        (["2xv6e-16"], ["TPU v6 lite"] * 32, "2xv6e-16"),
        (["v5p-8"], ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], None),
        (["cloud-run-30"], ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], "cloud-run-30"),
        (["v5p-8"], ["NVIDIA H100 PCIe"], None),
    ],
)
def test_the_machine_has_the_devices_whatever_was_planned(small_recipe, tmp_path, machines, devices, expected):
    run = open_run(tmp_path / "run", small_recipe(hardware={"machines": machines}))
    assert machine_of(run, devices) == expected


def test_a_catalog_that_is_gone_ends_no_training(small_recipe, tmp_path):
    gone = {"machines": ["v5p-8"], "catalog": str(tmp_path / "gone.yaml")}
    assert machine_of(open_run(tmp_path / "run", small_recipe(hardware=gone)), []) is None


@pytest.mark.parametrize(
    ("duration_s", "resumed_at", "expected"),
    [(30.0, (), 30.0), (30.0, (2,), 35.0), (30.0, (1, 3), 37.0), (1.0, (), 17.0)],
    ids=["one start", "resumed", "twice", "nothing was left to train"],
)
def test_seconds_are_of_the_last_start_and_of_the_steps_before_it(duration_s, resumed_at, expected):
    machine = Computer(system="Linux", processor="x", cores=1, memory_bytes=1)
    provenance = Provenance.model_construct(duration_s=duration_s, machine=machine)
    steps = tuple(steps_of(4, 1, 2, 2))
    train = TrainRecord.model_construct(provenance=provenance, steps=steps, resumed_at=resumed_at, compile_s=8.0)
    assert trained_s(train) == expected
