"""The sections of the page, in order: numbers from the records, and a template of the section's name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.summary import RunRecords
from gemsmith.report.sections import cost, evaluation, serving, training
from gemsmith.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """`make` gives the names that `templates/<id>.html` shows, beside `run`, `recipe`, `found` and the macros.

    A section whose template shows nothing is left out.
    """

    id: str
    title: str
    """In the navigation."""
    make: Callable[[Run, RunRecords], dict[str, Any]]


SECTIONS = (
    PageSection(id="about", title="About", make=training.make_about),
    PageSection(id="scores", title="Scores", make=evaluation.make_scores),
    PageSection(id="labels", title="Labels", make=evaluation.make_labels),
    PageSection(id="training", title="Training", make=training.make_training),
    PageSection(id="data", title="Data", make=training.make_data),
    PageSection(id="plan", title="Plan", make=cost.make_plan),
    PageSection(id="export", title="Export", make=training.make_export),
    PageSection(id="serve", title="Server", make=serving.make_serve),
    PageSection(id="bench", title="Load test", make=serving.make_bench),
    PageSection(id="time", title="Time and cost", make=cost.make_time),
    PageSection(id="provenance", title="Provenance", make=training.make_provenance),
)
"""To add one: a function here, a template, and a line in this table."""
