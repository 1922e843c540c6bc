"""Writes the report of a run: one HTML page that needs nothing else."""

from pathlib import Path

from gemsmith.report.page import render_page
from gemsmith.runs.run import Run
from gemsmith.system.files import write_text


def report(run: Run) -> Path:
    """The path of `report.html`, written whole from the records that are there.

    The same records give the same bytes. A missing record is said to be missing; it is not an error.
    """
    write_text(run.report, render_page(run))
    return run.report
