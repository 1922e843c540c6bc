"""The terminal's table."""

import re
import subprocess
import sys

from rich.console import Console

from gemsmith.report.tables import print_summary, summary_table
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.records import DataRecord
from gemsmith.runs.run import read_record, write_record
from gemsmith.runs.stages import STAGES


def rendered(table, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(table.to_rich())
        return console.export_text().replace("\u00a0", " ")


def test_the_table_says_what_came_out(make_run):
    text = rendered(summary_table(make_run(failed_requests=3)))
    for words in (
        "1.66 → 0.310 in 311 steps",
        "410 (q 60",
        "4 passed",
        "52.2 ms (512 in, 4 requests/s)",
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


def test_rows_that_are_held_out_are_not_called_left_out(make_run):
    run = make_run(steps=2)
    data = read_record(run, DataRecord)
    write_record(run, data.model_copy(update={"rows": 77, "dropped": {"held_out": 23, "too_long": 2}}))
    assert "77, 23 held out, 2 left out" in rendered(summary_table(run))


def test_the_table_takes_hostile_texts_as_texts(make_run):
    assert "[red]run" in rendered(summary_table(make_run("[red]run", steps=2, hostile=True)))


def test_the_summary_ends_with_the_path_of_the_page_and_what_comes_next(make_run, capsys):
    run = make_run(steps=2)
    run.report.write_text("x")
    print_summary(run)
    assert capsys.readouterr().out.splitlines()[-2:] == [f"report: {run.report}", f"next: gemsmith chat {run.path}"]


def test_the_summary_loads_no_plotting():
    code = "import sys, gemsmith.report.tables; print({'matplotlib', 'jinja2'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


def test_the_summary_shows_the_notices_below_its_table(make_run, capsys, told):
    run = make_run(steps=2)
    told(run, "eval", warnings=("The score did not move: [/a] 12 of 200.",), critical_warnings=("The loss rose.",))
    run.report.write_text("x")
    print_summary(run)
    lines = capsys.readouterr().out.splitlines()
    assert "critical: The loss rose." in lines and "warning: The score did not move: [/a] 12 of 200." in lines
    assert lines.index("critical: The loss rose.") > max(
        number for number, line in enumerate(lines) if line.strip().startswith("all ")
    )
    assert lines[-2] == f"report: {run.report}"


def test_the_table_tells_the_verdict_of_each_task(make_run):
    text = rendered(summary_table(make_run(steps=2)), width=200)
    assert "verdict" in text and "The tuned model scores higher: 0.910 (0.870 to 0.950)." in text
