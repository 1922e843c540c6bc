"""Training's curves: which points, and what is said where there are none."""

import itertools
import json
import math

from gemsmith.analysis.summary import find_notices, read_findings
from gemsmith.report import charts as curves
from gemsmith.report import tables
from gemsmith.report.page import render_page
from gemsmith.runs.records import Evaluation, TrainRecord, TrainStep
from gemsmith.runs.run import read_record
from gemsmith.runs.stages import STAGES


def test_thinning_keeps_the_ends_and_every_extreme():
    values = [math.sin(step / 50) for step in range(20_000)]
    values[7_777] = 99.0
    steps, kept = curves._thinned(range(20_000), values)
    assert len(steps) <= curves._MOST_POINTS + 2
    assert (steps[0], steps[-1], max(kept), min(kept)) == (0, 19_999, 99.0, min(values))
    assert all(one < other for one, other in itertools.pairwise(steps))


def test_a_running_mean_leaves_out_what_is_not_known():
    assert curves.running_mean([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]
    assert math.isnan(curves.running_mean([math.nan], 3)[0])


def test_two_steps_without_time_are_drawn(make_run):
    step = {"loss": 1.0, "grad_norm": 0.0, "learning_rate": 0.0, "real_tokens": 10, "step_s": 0.0}
    html = render_page(make_run(train=[TrainStep(step=number, **step) for number in (1, 2)]))
    assert "Speed: no finite value." in html


def test_a_loss_that_is_not_finite_is_told(make_run):
    values = {"grad_norm": 1.0, "learning_rate": 1e-4, "real_tokens": 10, "step_s": 1.0}
    steps = [TrainStep(step=number, loss=loss, **values) for number, loss in ((1, 2.0), (2, math.nan))]
    told = [each.text for each in find_notices(read_findings(make_run(train=steps))) if each.critical]
    assert "The training loss is not finite at some steps. The curves leave those out." in told


def test_a_loss_that_is_not_finite_is_not_drawn():
    values = {"grad_norm": 1.0, "learning_rate": 1e-4, "real_tokens": 10, "step_s": 1.0}
    losses = (2.0, math.nan, math.inf, 1.0)
    steps = tuple(TrainStep.model_construct(step=number, loss=loss, **values) for number, loss in enumerate(losses, 1))
    train = STAGES["train"].record.model_construct(steps=steps, resumed_at=(), spikes=(), grad_norm_spikes=())
    loss = curves.training_charts(train, 1.0)[0]
    assert "2.00 at step 1, 1.00 at step 4" in loss.alt
    assert [words for _, _, words in json.loads(loss.points)] == ["step 1: 2.00", "step 4: 1.00"]


def test_a_spike_is_marked_on_the_loss_alone(make_run, undrawn):
    train = read_record(make_run(steps=12), TrainRecord).model_copy(update={"spikes": (7,)})
    marked = [("s2", "cross", "spike") in chart.legend for chart in curves.training_charts(train, None)]
    assert marked == [True, False, False, False]
    train = train.model_copy(update={"spikes": (), "grad_norm_spikes": (7,)})
    marked = [("s2", "cross", "spike") in chart.legend for chart in curves.training_charts(train, None)]
    assert marked == [False, True, False, False]


def test_the_held_out_loss_is_drawn_on_the_loss_alone_and_its_least_named(make_run, undrawn):
    losses = {4: 2.0, 8: 1.5, 12: 1.75}
    evaluations = tuple(
        Evaluation(step=step, loss=loss, token_accuracy=0.5, loss_tokens=9, s=1.0) for step, loss in losses.items()
    )
    train = read_record(make_run(steps=12), TrainRecord).model_copy(update={"evaluations": evaluations})
    drawn = [("s3", "line", "held-out rows") in chart.legend for chart in curves.training_charts(train, None)]
    assert drawn == [True, False, False, False]
    lines = [line[:2] for line in tables._lines(train)]
    assert ("held-out loss", "1.75, the least 1.50 at step 8") in lines
    assert ("held-out token accuracy", "50.0\xa0%") in lines
    kept = tables._lines(train.model_copy(update={"kept": "best", "early_stop": "ended early"}))
    shown = dict(line[:2] for line in kept)
    assert (
        shown["held-out loss"].endswith(" at step 8, which export takes") and "12 steps, ended early" in shown["loss"]
    )


def test_a_loss_that_is_flat_after_its_fall_is_drawn_on_a_log_scale(make_run, undrawn):
    train = read_record(make_run(steps=40), TrainRecord)
    early = [4.0, 1.0, *([0.5] * 38)]
    even = [4.0 - step / 20 for step in range(40)]
    for losses, log in ((early, True), (even, False), ([1.0, *([0.6] * 39)], False), ([4.0, *([0.0] * 39)], False)):
        pairs = zip(train.steps, losses, strict=True)
        steps = tuple(step.model_copy(update={"loss": loss}) for step, loss in pairs)
        loss = curves.training_charts(train.model_copy(update={"steps": steps}), None)[0]
        assert loss.unit.endswith(", log scale") == log
