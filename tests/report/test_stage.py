"""The report as a file of the run."""

from gemsmith.report.page import render_page, report


def test_report_writes_the_page_and_returns_its_path(make_run, undrawn):
    run = make_run(steps=40)
    path = report(run)
    assert path == run.report
    assert path.read_text(encoding="utf-8") == render_page(run)
    assert [file.name for file in run.path.iterdir() if file.name.startswith(".")] == []
