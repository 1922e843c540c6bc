"""The numbers that stand for a run, how they are written, and the terminal's table."""

import doctest
import itertools
import math
import re
import subprocess
import sys

import pytest
from rich.console import Console

from gemsmith.records import BenchRecord, EvalRecord, PlanRecord, Score
from gemsmith.report import charts, findings, numbers, page
from gemsmith.report.summary import print_summary, summary_table
from gemsmith.run import read_record, write_record
from gemsmith.stages import STAGES


@pytest.mark.parametrize("module", [numbers, charts, page])
def test_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize(("lengths", "rates", "expected"), [
    ((512, 4096), (1.0, 4.0, 16.0), (512, 4.0)),
    ((128, 512, 4096), (1.0, 4.0), (512, 1.0)),
    ((512,), (4.0,), (512, 4.0)),
])  # fmt: skip
def test_the_middle_cell_is_one_that_was_measured(make_run, lengths, rates, expected):
    cell = findings.middle_cell(read_record(make_run(steps=2, lengths=lengths, rates=rates), BenchRecord))
    assert (cell.input_tokens, cell.request_rate) == expected


def test_cells_without_a_completed_request_are_never_the_headline(make_run):
    bench = read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0), failed_requests=128), BenchRecord)
    assert findings.middle_cell(bench).request_rate == findings.fastest_cell(bench).request_rate == 1.0


def test_the_cheapest_machine_fits_and_has_a_price(make_run):
    plan = read_record(make_run(steps=2), PlanRecord)
    assert findings.cheapest_machine(plan).name == "v5p-8"
    none = plan.model_copy(
        update={"machines": tuple(machine.model_copy(update={"fits": False}) for machine in plan.machines)}
    )
    assert findings.cheapest_machine(none) is None


@pytest.mark.parametrize(("base", "tuned", "word"), [
    ((0.0, 0.1), (0.2, 0.3), "better"),
    ((0.2, 0.3), (0.0, 0.1), "worse"),
    ((0.0, 0.2), (0.2, 0.3), "overlap"),
])  # fmt: skip
def test_the_verdict_follows_the_intervals(base, tuned, word):
    scores = [Score(score=sum(ends) / 2, low=ends[0], high=ends[1], n=100) for ends in (base, tuned)]
    assert word in findings.verdict(EvalRecord.model_construct(base=scores[0], tuned=scores[1]))


@pytest.mark.parametrize(("better", "worse", "p_value", "word"), [
    (30, 2, 1e-7, "The tuned model is better: 30 rows better, 2 worse; exact McNemar test, p < 0.001."),
    (2, 30, 1e-7, "The tuned model is worse: 2 rows better, 30 worse; exact McNemar test, p < 0.001."),
    (3, 2, 1.0, "This evaluation does not tell the two apart: 3 rows better, 2 worse; exact McNemar test, p = 1."),
])  # fmt: skip
def test_the_verdict_follows_the_rows_that_differ_where_they_are_known(better, worse, p_value, word):
    """The intervals of these scores lie apart, or overlap, whatever the rows say."""
    for ends in ((0.0, 0.1), (0.2, 0.3), (0.05, 0.25)):
        scores = [Score(score=sum(some) / 2, low=some[0], high=some[1], n=100) for some in ((0.1, 0.2), ends)]
        rows = {"rows_better": better, "rows_worse": worse, "p_value": p_value}
        assert findings.verdict(EvalRecord.model_construct(base=scores[0], tuned=scores[1], **rows)) == word


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_to_be_so(value):
    writers = (
        numbers.decimal,
        numbers.plain,
        numbers.count,
        numbers.fraction,
        numbers.percent,
        numbers.duration,
        numbers.rough,
        numbers.usd,
    )
    assert {write(value) for write in writers} == {"not finite"}


def rendered(table, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table)
        return console.export_text().replace("\u00a0", " ")


def test_the_table_says_what_came_out(make_run):
    text = rendered(summary_table(make_run(failed_requests=3)))
    for words in (
        "1.66 → 0.310 in 311 steps",
        "410 (q 60",
        "4 passed",
        "52.2 ms (512 in, 4 req/s)",
        "0.940 (0.898–0.965, n = 200)",
        "failed requests",
        "id, source",
        "7 min 46 s",
    ):
        assert words in text, words


def test_the_table_shows_failures_and_what_is_missing(make_run):
    text = rendered(summary_table(make_run(steps=2, verified=False, without=("bench", "plan"))))
    assert "3 passed, 1 failed: logits" in text
    assert text.count("no record") == 2
    assert rendered(summary_table(make_run("none", without=tuple(STAGES)))).count("no record") == len(STAGES)


def test_the_table_counts_requests_that_ended_early_and_rows_without_an_answer(make_run):
    run = make_run(steps=2)
    bench, scores = read_record(run, BenchRecord), read_record(run, EvalRecord)
    cells = (bench.cells[0].model_copy(update={"cut": 7}), *bench.cells[1:])
    write_record(run, bench.model_copy(update={"cells": cells}))
    write_record(
        run,
        scores.model_copy(update={"base": scores.base.model_copy(update={"failed": {"timeout": 2, "http 500": 1}})}),
    )
    text = rendered(summary_table(run))
    assert re.search(r"requests that ended early +7\b", text)
    assert re.search(r"base rows without answer +3 \(2 timeout, 1 http 500\)", text) and "tuned rows" not in text


def test_the_table_takes_hostile_texts_as_texts(make_run):
    assert "[red]run" in rendered(summary_table(make_run("[red]run", steps=2, hostile=True)))


def test_the_summary_ends_with_the_path_of_the_page(make_run, capsys):
    run = make_run(steps=2)
    run.report.write_text("x")
    print_summary(run)
    assert capsys.readouterr().out.splitlines()[-1] == str(run.report)


def test_the_summary_loads_no_plotting():
    code = "import sys, gemsmith.report.summary; print({'matplotlib', 'numpy', 'jinja2'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


def told(run, stage, **notices):
    write_record(run, read_record(run, STAGES[stage].record).model_copy(update=notices))
    return findings.find_notices(findings.read_findings(run))


def test_a_records_notices_are_shown_before_the_numbers(make_run):
    notices = told(make_run(steps=2), "data", notices=("3 held-out rows are also trained on.",))
    assert [notice.text for notice in notices if "held-out" in notice.text] == ["3 held-out rows are also trained on."]


def test_grave_notices_come_first(make_run):
    run = make_run(steps=2)
    told(run, "data", notices=("mild",))
    notices = told(run, "eval", grave_notices=("The tuned model scores lower.",))
    assert [notice.grave for notice in notices] == sorted((notice.grave for notice in notices), reverse=True)
    assert notices[0] == findings.Notice(grave=True, text="The tuned model scores lower.")


def test_what_eval_says_of_held_out_rows_stands_for_what_the_data_stage_said(make_run):
    """Eval may have had others, and the data stage is not done again for them."""
    early, own = "data.eval: held-out rows whose prompt is also trained on: 9 of 9", "too few rows"
    for without, expected in ((("eval",), [early, own]), ((), [own])):
        run = make_run(f"run{len(without)}", steps=2, without=without)
        assert [
            notice.text for notice in told(run, "data", notices=(early, own)) if notice.text in (early, own)
        ] == expected


def test_the_summary_shows_the_notices_below_its_table(make_run, capsys):
    run = make_run(steps=2)
    told(run, "eval", notices=("The score did not move: [/a] 12 of 200.",), grave_notices=("The loss rose.",))
    run.report.write_text("x")
    print_summary(run)
    lines = capsys.readouterr().out.splitlines()
    assert "warning: The loss rose." in lines and "notice: The score did not move: [/a] 12 of 200." in lines
    assert lines.index("warning: The loss rose.") > max(
        number for number, line in enumerate(lines) if line.strip().startswith("all ")
    )
    assert lines[-1] == str(run.report)
    assert "verdict" not in "".join(lines)


def test_the_table_tells_the_rows_that_differ(make_run):
    run = make_run(steps=2)
    told(run, "eval", rows_better=190, rows_worse=1, p_value=1e-50)
    assert "The tuned model is better: 190 rows better, 1 worse" in rendered(summary_table(run), width=200)
