"""What is drawn of a run: which points, and what is said where there are none."""

import itertools
import math

from gemsmith.bench_records import BenchRecord
from gemsmith.records import TrainStep
from gemsmith.report import charts
from gemsmith.report.page import render_page
from gemsmith.run import read_record
from gemsmith.stages import STAGES


def test_thinning_keeps_the_ends_and_every_extreme():
    values = [math.sin(step / 50) for step in range(20_000)]
    values[7_777] = 99.0
    steps, kept = charts._thinned(range(20_000), values)
    assert len(steps) <= charts._MOST_POINTS + 2
    assert (steps[0], steps[-1], max(kept), min(kept)) == (0, 19_999, 99.0, min(values))
    assert all(one < other for one, other in itertools.pairwise(steps))


def test_a_running_mean_leaves_out_what_is_not_known():
    assert charts.running_mean([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]
    assert math.isnan(charts.running_mean([math.nan], 3)[0])


def test_two_steps_without_time_are_drawn(make_run):
    step = {"loss": 1.0, "grad_norm": 0.0, "learning_rate": 0.0, "real_tokens": 10, "step_s": 0.0}
    html = render_page(make_run(train=[TrainStep(step=number, **step) for number in (1, 2)]))
    assert "Speed: no finite value." in html


def test_a_loss_that_is_not_finite_is_told():
    from gemsmith.report.findings import losses_are_finite

    values = {"grad_norm": 1.0, "learning_rate": 1e-4, "real_tokens": 10, "step_s": 1.0}
    losses = (2.0, math.nan, math.inf, 1.0)
    steps = tuple(TrainStep.model_construct(step=number, loss=loss, **values) for number, loss in enumerate(losses, 1))
    train = STAGES["train"].record.model_construct(steps=steps, resumed_at=())
    assert not losses_are_finite(train)
    assert "2.00 at step 1, 1.00 at step 4" in charts.training_charts(train, 1.0)[0].alt


def test_probes_and_numbers_at_once_have_no_place_among_the_rates(make_run):
    cells = read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0)), BenchRecord).cells
    burst = cells[0].model_copy(update={"request_rate": math.inf})
    closed = burst.model_copy(update={"max_concurrency": 64, "input_tokens": 128})
    probe = cells[0].model_copy(update={"request_rate": 2.0, "probe": True})
    alt = charts.bench_charts([*cells, burst, closed, probe])[-1].alt
    assert "512 in at a burst" in alt and "128 in" not in alt and "at 2.00/s" not in alt
    assert "128 in at a burst" in charts.bench_charts([closed])[-1].alt
