"""What runs measured becomes rows of a catalog, and plans of their machine say it again."""

from pathlib import Path

import pytest

from gemsmith.errors import RunError
from gemsmith.hardware import find_machine, load_catalog
from gemsmith.plan.calibrate import calibrate
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.records import TrainRecord, TrainStep
from gemsmith.runs.run import make_provenance, open_run, start_clock, write_record

H200 = ("NVIDIA H200",)


@pytest.fixture
def trained(recipe, tmp_path):
    """Returns the folder of a run whose steps took `step_s`: `trained("a", 2.5, devices=("NVIDIA H200",))`."""

    def make(
        name: str,
        step_s: float,
        *,
        devices=H200,
        steps: int = 12,
        processor: str | None = None,
        spread=(0.99, 1.0, 1.01),
    ) -> Path:
        run = open_run(tmp_path / name, recipe("gemma4-e2b", machines=("1xh200",)))
        provenance = make_provenance(run, "train", start_clock())
        changed = {"accelerators": devices} | ({"processor": processor} if processor else {})
        provenance = provenance.model_copy(update={"machine": provenance.machine.model_copy(update=changed)})
        seconds = [50.0] + [step_s * spread[step * len(spread) // (steps - 1)] for step in range(steps - 1)]
        record = TrainRecord(
            provenance=provenance,
            backend="tunix",
            model="gemma4-e2b",
            steps=tuple(
                TrainStep(step=number, loss=1, grad_norm=1, learning_rate=1, real_tokens=1, step_s=each)
                for number, each in enumerate(seconds, 1)
            ),
            adapted={},
            trained_parameters=1,
            mesh=Mesh(fsdp=max(1, len(devices))).model_dump(),
            real_tokens_per_s=1,
            peak_memory_bytes=1,
            last_checkpoint="checkpoints/1",
        )
        write_record(run, record)
        return run.path

    return make


def test_a_plan_says_again_what_a_run_on_the_machine_measured(trained, recipe, tmp_path):
    file = tmp_path / "own.yaml"
    (found,) = calibrate([trained("a", 2.5)], file)
    assert found.machine == "1xh200" and "median of 11 steps of a (gemma4-e2b): 2.5" in found.source
    asked = recipe("gemma4-e2b", machines=("1xh200", "8xh200"), catalog=str(file), remat="layer")
    one, eight = plan_only(asked).machines
    assert one.step_s == pytest.approx((2.475 / 1.15, 2.525 * 1.15), rel=0.001)
    assert one.measured and "measured there" in one.notes[-1]
    before = plan_only(recipe("gemma4-e2b", machines=("1xh200", "8xh200"), remat="layer")).machines
    assert eight == before[1] and before[0].measured is None, "the chip and other machines are as they were"
    assert before[0].step_s[1] / before[0].step_s[0] > 1.5 * one.step_s[1] / one.step_s[0]


def test_two_runs_give_a_range_and_a_later_calibration_replaces_it(trained, tmp_path):
    file = tmp_path / "deep" / "own.yaml"
    (both,) = calibrate([trained("a", 2.5), trained("b", 3.0)], file)
    low, high = both.shares["matmuls"]
    assert low < high and both.source.count("median") == 2
    calibrate([trained("c", 2.0)], file)
    machine = find_machine(load_catalog(file), "1xh200")
    assert machine.measured_high > machine.measured_low > high
    assert machine.measured_high / machine.measured_low == pytest.approx(1.01 / 0.99, rel=0.01)


def test_a_range_is_as_wide_as_the_steps_were(trained, tmp_path):
    (steady,) = calibrate([trained("a", 2.5)], tmp_path / "a.yaml")
    (wide,) = calibrate([trained("b", 2.5, steps=62, spread=(0.9, 1.1) * 15 + (9,))], tmp_path / "b.yaml")
    assert "2.25 to 2.75 without" in wide.source, "one step of many is left out"
    assert wide.shares["matmuls"][0] < steady.shares["matmuls"][0] < steady.shares["matmuls"][1]
    assert wide.shares["matmuls"][1] > steady.shares["matmuls"][1]


def test_rows_that_were_there_stay(trained, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "machines: {1xh200: {prices: [{provider: me, region: here, usd_per_hour: 2, source: bill, date: '2026'}]}}"
    )
    calibrate([trained("a", 2.5)], file)
    machine = find_machine(load_catalog(file), "1xh200")
    assert machine.prices[0].usd_per_hour == 2 and machine.measured_low
    assert machine.source == find_machine(load_catalog(), "1xh200").source


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"steps": 8}, "has 7 steps besides the first of each start; train at least 10"),
        ({"devices": ("NVIDIA X1",) * 2}, "was trained on 2 x NVIDIA X1, which no machine of the catalog is"),
        ({"devices": (), "processor": "Another"}, "was trained on another computer (Another"),
        ({"step_s": 0.001}, "shorter than 1xh200 can be by its row"),
        ({"spread": (1, 2, 3, 4, 5, 6, 7.3)}, "5.5 to 40.1 s, 5.5 to 33 without"),
        ({"spread": (1, 1, 1.3, 1.3)}, "5.5 s at the median of the first half and 7.15 of the second"),
        ({"spread": (1, 1.6, 1, 1.6, 1, 1.6)}, "train again while it does nothing else"),
    ],
)
def test_a_run_that_says_nothing_is_one_line_and_nothing_is_written(trained, tmp_path, run, message):
    values = {"step_s": 5.5 if "spread" in run else 2.5, **run}
    good, bad = trained("good", 2.5), trained("bad", values.pop("step_s"), **values)
    with pytest.raises(RunError, match=message.replace("(", r"\(")) as error:
        calibrate([good, bad], tmp_path / "own.yaml")
    assert "\n" not in str(error.value) and not (tmp_path / "own.yaml").exists()
