"""Where the time went, and what serving costs."""

import math

import pytest

from gemsmith.analysis.summary import read_findings
from gemsmith.report.sections import make_time as make
from gemsmith.report.sections import stage_spans, training_spans
from gemsmith.runs.records import Provenance, TrainRecord, TrainSaves, TrainStep


def step(number, seconds):
    return TrainStep.model_construct(step=number, step_s=seconds)


def train(steps, *, duration_s, compile_s=0.0, resumed_at=(), saves=None):
    provenance = Provenance.model_construct(duration_s=duration_s)
    fields = {"steps": steps, "compile_s": compile_s, "resumed_at": resumed_at, "compiled_from_cache": False}
    fields["saves"] = saves
    return TrainRecord.model_construct(provenance=provenance, **fields)


def test_training_is_compile_steps_saves_and_the_rest():
    saves = TrainSaves(number=2, s=3.0, bytes=5_000_000)
    slow = [step(n, 9.0 if n == 1 else 4.0 if n == 11 else 1.0) for n in range(1, 21)]
    rest, compiled, steps, saved = training_spans(train(slow, duration_s=50.0, compile_s=5.0, saves=saves), 100.0)
    assert (rest.name, rest.start_s, rest.seconds, rest.reckoned) == ("load and start: the rest", 100.0, 11.0, True)
    assert (compiled.start_s, compiled.seconds, compiled.reckoned) == (111.0, 5.0, False)
    assert (steps.name, steps.start_s, steps.seconds) == ("20 steps", 116.0, 31.0)
    assert (saved.name, saved.start_s, saved.seconds) == ("2 saves of 5.00\u00a0MB in all, waited for", 147.0, 3.0)
    assert not saved.reckoned


def test_of_a_continued_training_the_steps_of_earlier_starts_come_first():
    spans = training_spans(train([step(n, 1.0) for n in range(1, 101)], duration_s=45.0, resumed_at=(60,)), 0.0)
    assert [(span.name, span.seconds) for span in spans] == [
        ("60 steps of earlier starts", 60.0),
        ("load and start: the rest", 5.0),
        ("40 steps", 40.0),
    ]


def test_time_that_is_not_finite_is_no_part():
    assert training_spans(train([step(1, math.nan)], duration_s=5.0), 0.0) == []


def test_stages_follow_each_other_and_missing_ones_take_no_time(make_run):
    findings = read_findings(make_run(steps=3, without=("verify",)))
    outer = {span.name: span for span in stage_spans(findings) if not span.inner}
    assert outer["verify"].missing and outer["train"].start_s == pytest.approx(0.21 + 14.3)
    assert outer["serve"].start_s == outer["export"].start_s + outer["export"].seconds


def test_dollars_are_the_seconds_beside_them_times_the_price(large_run):
    """Of a continued training the page had the dollars of all starts beside the seconds of the last."""
    made = make(read_findings(large_run))
    outer = {span.name: span.seconds for span in made["spans"] if not span.inner}
    assert made["total_s"] == pytest.approx(sum(outer.values()))
    for stage, usd in made["actual_cost"].stages.items():
        assert usd == pytest.approx(16.8 / 3600 * outer[stage])


def test_serving_costs_what_the_cheapest_load_of_each_length_costs(large_run):
    findings = read_findings(large_run)
    served = make(findings)["served"]
    assert [cell.input_tokens for cell in served] == [128, 512, 1024, 4096, 8192, 15360]
    for cell in served:
        same = [each for each in findings.bench.cells if each.input_tokens == cell.input_tokens and each.completed]
        assert cell.output_tokens_per_s == max(each.output_tokens_per_s for each in same)


def test_modelled_dollars_are_called_modelled_and_unknown_ones_not_told(large_run, make_run, section_words):
    words = section_words(large_run, "time")
    assert "at $16.80 an hour of v5p-8 estimated" in words and "$1.64" in words
    assert "What it cost is not told: which of the plan’s machines trained" in section_words(make_run(steps=3), "time")
