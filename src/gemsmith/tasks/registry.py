"""Every task by the names that a recipe gives it. Only the task that is used is imported: recipes load fast."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gemsmith.tasks.base import Benchmark, DataGenerator, Scorer


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A task's module, and the recipe's names for its rows, its scorer and its own questions.

    It has one of them or more, each with what it does.
    """

    module: str
    rows: str | None = None
    makes: str = ""
    scorer: str | None = None
    scores: str = ""
    questions: str | None = None
    asks: str = ""


TASKS = (
    Listing(module="exact", scorer="exact", scores="ignores white space at both ends"),
    Listing(module="regex", scorer="regex", scores="searches for a pattern"),
    Listing(module="json_fields", scorer="json-fields", scores="compares the fields of a JSON object"),
    Listing(module="multiple_choice", scorer="multiple-choice",
            scores="compares the log-likelihoods of the row's choices"),
    Listing(module="classification", scorer="labels",
            scores="compares the label that is written with the expected one"),
    Listing(module="contained_label", scorer="contained-label",
            scores="compares the longest label in what is written with the expected one"),
    Listing(module="verilog.demo", rows="verilog", makes="makes specs of small modules with canonical answers",
            scorer="verilog-exact", scores="normalizes white space and comments first"),
    Listing(module="verilog.task", questions="verilog",
            asks="asks for the modules of a folder of verilog-eval's problems, and simulates the answers"),
)  # fmt: skip
GENERATORS = tuple(task.rows for task in TASKS if task.rows)
"""What `data.train: {task: …}` may name."""
SCORERS = tuple(task.scorer for task in TASKS if task.scorer)
"""What `eval.scorer` may name."""
SOURCES = tuple(task.questions for task in TASKS if task.questions)
"""What `eval.tasks` may name beside the scorers, each with a `dataset`."""


def is_task_file(name: object) -> bool:
    """Whether a task's name is that of a Python file of the user's own."""
    return isinstance(name, str) and name.endswith(".py")


def find_generator(name: str) -> DataGenerator:
    """The task that makes the rows of this name, one of MADE or the user's own file."""
    if is_task_file(name):
        from gemsmith.tasks.custom import load_generator  # here: planning needs no terminal

        return load_generator(name)
    maker: DataGenerator = _load(next(task for task in TASKS if task.rows == name))
    return maker


def find_scorer(name: str) -> Scorer:
    """The task that scores under this name, one of SCORERS or the user's own file."""
    if is_task_file(name):
        from gemsmith.tasks.custom import load_scorer

        return load_scorer(name)
    scorer: Scorer = _load(next(task for task in TASKS if task.scorer == name))
    return scorer


def find_source(name: str) -> Benchmark:
    """The task that brings its own questions under this name, one of SOURCES."""
    source: Benchmark = _load(next(task for task in TASKS if task.questions == name))
    return source


def describe_made() -> str:
    """As in: `verilog` makes …."""
    return "; ".join(f"`{task.rows}` {task.makes}" for task in TASKS if task.rows)


def describe_scorers() -> str:
    """As in: `exact` ignores …; `verilog-exact` normalizes …."""
    return "; ".join(f"`{task.scorer}` {task.scores}" for task in TASKS if task.scorer)


def describe_sources() -> str:
    """As in: `verilog` asks for …."""
    return "; ".join(f"`{task.questions}` {task.asks}" for task in TASKS if task.questions)


def _load(task: Listing) -> Any:
    return import_module(f"{__package__}.{task.module}")
