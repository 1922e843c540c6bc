"""The sections of the page, in order: numbers from the records, and a template of the section's name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.summary import RunRecords
from gemsmith.report.sections import cost, evaluation, provenance, serving, training
from gemsmith.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Section:
    """`make` gives the names that `templates/<id>.html` shows, beside `run`, `recipe`, `found` and the macros.

    A section whose template shows nothing is left out.
    """

    id: str
    title: str
    """In the navigation."""
    make: Callable[[Run, RunRecords], dict[str, Any]]


SECTIONS = (
    Section(id="about", title="About", make=training.make_about),
    Section(id="scores", title="Scores", make=evaluation.make_scores),
    Section(id="labels", title="Labels", make=evaluation.make_labels),
    Section(id="training", title="Training", make=training.make_training),
    Section(id="data", title="Data", make=training.make_data),
    Section(id="plan", title="Plan", make=cost.make_plan),
    Section(id="export", title="Export", make=provenance.make_export),
    Section(id="serve", title="Server", make=serving.make_serve),
    Section(id="bench", title="Load test", make=serving.make_bench),
    Section(id="time", title="Time and cost", make=cost.make_time),
    Section(id="provenance", title="Provenance", make=provenance.make_provenance),
)
"""To add one: a function here, a template, and a line in this table."""
