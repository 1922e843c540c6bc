"""A section of the page: its place, its template, and what that template shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemsmith.report.findings import Findings
from gemsmith.run import Run


@dataclass(frozen=True, kw_only=True)
class Section:
    """`make` gives the names that `sections/<id>.html` shows, beside `run`, `recipe`, `found` and the macros.

    A section whose template shows nothing is left out.
    """

    id: str
    title: str
    """In the navigation."""
    make: Callable[[Run, Findings], dict[str, Any]]
