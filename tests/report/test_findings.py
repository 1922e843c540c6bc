"""The numbers that stand for a run, how they are written, and the terminal's table."""

import doctest
import itertools
import math
import subprocess
import sys

import pytest
from rich.console import Console

from gemsmith.records import RECORDS, EvalRecord, Score
from gemsmith.report import charts, findings, numbers, page
from gemsmith.report.summary import print_summary, summary_table
from gemsmith.run import read_record


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
    cell = findings.middle_cell(read_record(make_run(steps=2, lengths=lengths, rates=rates), "bench"))
    assert (cell.input_tokens, cell.request_rate) == expected


def test_cells_without_a_completed_request_are_never_the_headline(make_run):
    bench = read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0), failed_requests=128), "bench")
    assert findings.middle_cell(bench).request_rate == findings.fastest_cell(bench).request_rate == 1.0


def test_the_cheapest_machine_fits_and_has_a_price(make_run):
    plan = read_record(make_run(steps=2), "plan")
    assert findings.cheapest_machine(plan).name == "v5p-8"
    none = plan.model_copy(update={"machines": tuple(machine.model_copy(update={"fits": False}) for machine in plan.machines)})
    assert findings.cheapest_machine(none) is None


@pytest.mark.parametrize(("base", "tuned", "word"), [
    ((0.0, 0.1), (0.2, 0.3), "better"),
    ((0.2, 0.3), (0.0, 0.1), "worse"),
    ((0.0, 0.2), (0.2, 0.3), "overlap"),
])  # fmt: skip
def test_the_verdict_follows_the_intervals(base, tuned, word):
    scores = [Score(score=sum(ends) / 2, low=ends[0], high=ends[1], n=100) for ends in (base, tuned)]
    assert word in findings.verdict(EvalRecord.model_construct(base=scores[0], tuned=scores[1]))


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
        "7 min 46 s",
    ):
        assert words in text, words


def test_the_table_shows_failures_and_what_is_missing(make_run):
    text = rendered(summary_table(make_run(steps=2, verified=False, without=("bench", "plan"))))
    assert "3 passed, 1 failed: logits" in text
    assert text.count("no record") == 2
    assert rendered(summary_table(make_run("none", without=tuple(RECORDS)))).count("no record") == len(RECORDS)


def test_the_table_takes_hostile_texts_as_texts(make_run):
    assert "[red]run" in rendered(summary_table(make_run("[red]run", steps=2, hostile=True)))


def test_the_summary_ends_with_the_path_of_the_page(make_run, capsys):
    run = make_run(steps=2)
    run.report.write_text("x")
    print_summary(run)
    assert capsys.readouterr().out.splitlines()[-1] == str(run.report)


def test_the_summary_loads_no_plotting():
    code = "import sys, gemsmith.report.summary; print({'matplotlib', 'numpy', 'jinja2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
