"""Every task by the names that a recipe gives it. Only the task that is used is imported: recipes load fast."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gemsmith.tasks.task import RowMaker, Scorer


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A task's module, and the recipe's names for its rows and its scorer, with what each does; it has one or both."""

    module: str
    rows: str | None = None
    makes: str = ""
    scorer: str | None = None
    scores: str = ""


TASKS = (
    Listing(module="exact", scorer="exact", scores="ignores white space at both ends"),
    Listing(
        module="verilog_demo",
        rows="verilog",
        makes="makes specs of small modules with canonical answers",
        scorer="verilog-exact",
        scores="normalises white space and comments first",
    ),
)
MADE = tuple(task.rows for task in TASKS if task.rows)
"""What `data.train: {task: …}` may name."""
SCORERS = tuple(task.scorer for task in TASKS if task.scorer)
"""What `eval.scorer` may name."""


def find_row_maker(name: str) -> RowMaker:
    """The task that makes the rows of this name, one of MADE."""
    maker: RowMaker = _load(next(task for task in TASKS if task.rows == name))
    return maker


def find_scorer(name: str) -> Scorer:
    """The task that scores under this name, one of SCORERS."""
    scorer: Scorer = _load(next(task for task in TASKS if task.scorer == name))
    return scorer


def describe_made() -> str:
    """`verilog` makes …"""
    return "; ".join(f"`{task.rows}` {task.makes}" for task in TASKS if task.rows)


def describe_scorers() -> str:
    """`exact` ignores …; `verilog-exact` normalises …"""
    return "; ".join(f"`{task.scorer}` {task.scores}" for task in TASKS if task.scorer)


def _load(task: Listing) -> Any:
    return import_module(f"{__package__}.{task.module}")
