"""The sections of the page, in order: a file of numbers and a template of the same name for each.

A section of the page: its place, its template, and what that template shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.summary import Findings
from gemsmith.report.sections import (
    cost as plan,
)
from gemsmith.report.sections import (
    cost as time,
)
from gemsmith.report.sections import (
    evaluation as labels,
)
from gemsmith.report.sections import (
    evaluation as scores,
)
from gemsmith.report.sections import (
    provenance,
    training,
)
from gemsmith.report.sections import (
    provenance as export,
)
from gemsmith.report.sections import (
    serving as bench,
)
from gemsmith.report.sections import (
    serving as serve,
)
from gemsmith.report.sections import (
    training as about,
)
from gemsmith.report.sections import (
    training as data,
)
from gemsmith.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Section:
    """`make` gives the names that `sections/<id>.html` shows, beside `run`, `recipe`, `found` and the macros.

    A section whose template shows nothing is left out.
    """

    id: str
    title: str
    """In the navigation."""
    make: Callable[[Run, Findings], dict[str, Any]]


SECTIONS = (
    Section(id="about", title="About", make=about.make),
    Section(id="scores", title="Scores", make=scores.make),
    Section(id="labels", title="Labels", make=labels.make),
    Section(id="training", title="Training", make=training.make),
    Section(id="data", title="Data", make=data.make),
    Section(id="plan", title="Plan", make=plan.make),
    Section(id="export", title="Export", make=export.make),
    Section(id="serve", title="Server", make=serve.make),
    Section(id="bench", title="Load test", make=bench.make),
    Section(id="time", title="Time and cost", make=time.make),
    Section(id="provenance", title="Provenance", make=provenance.make),
)
"""To add one: its two files here, and a line in this table."""
