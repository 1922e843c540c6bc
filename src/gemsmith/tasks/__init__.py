"""Tasks, each in one file: its rows, the prompt in them, and its scorer; and the names that a recipe may give.

Only the task that is used is imported: recipes load fast.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from gemsmith.tasks.base import Benchmark, DataGenerator, QuestionSet, Scorer
from gemsmith.tasks.base import Verdict as Verdict  # what scorers of users make


class Listing(NamedTuple):
    """A task's module, and what it does under a name, as in: `exact` ignores …."""

    module: str
    does: str


GENERATORS = {"verilog": Listing("verilog.demo", "makes specs of small modules with canonical answers")}
"""What `data.train: {task: …}` may name."""
SCORERS = {
    "exact": Listing("exact", "ignores white space at both ends"),
    "regex": Listing("regex", "searches for a pattern"),
    "json-fields": Listing("json_fields", "compares the fields of a JSON object"),
    "multiple-choice": Listing("multiple_choice", "compares the log-likelihoods of the row's choices"),
    "labels": Listing("classification", "compares the label that is written with the expected one"),
    "contained-label": Listing(
        "contained_label", "compares the longest label in what is written with the expected one"
    ),
    "verilog-exact": Listing("verilog.demo", "normalizes white space and comments first"),
}
"""What `eval.scorer` may name."""
SOURCES = {
    "verilog": Listing(
        "verilog.task", "asks for the modules of a folder of verilog-eval's problems, and simulates the answers"
    )
}
"""What `eval.tasks` may name beside the scorers, each with a `dataset`."""


def is_task_file(name: object) -> bool:
    """Whether a task's name is that of a Python file of the user's own."""
    return isinstance(name, str) and name.endswith(".py")


def is_prompt_file(name: object) -> bool:
    """Whether a way to ask is a text file of the user's own."""
    return isinstance(name, str) and name.endswith(".txt")


def find_generator(name: str) -> DataGenerator:
    """The task that makes the rows of this name, one of GENERATORS or the user's own file."""
    if is_task_file(name):
        from gemsmith.tasks.custom import load_generator  # here: planning needs no terminal

        return load_generator(name)
    return _load(GENERATORS[name])


def find_scorer(name: str) -> Scorer:
    """The task that scores under this name, one of SCORERS or the user's own file."""
    if is_task_file(name):
        from gemsmith.tasks.custom import load_scorer

        return load_scorer(name)
    return _load(SCORERS[name])


def find_source(name: str) -> Benchmark:
    """The task that brings its own questions under this name, one of SOURCES."""
    return _load(SOURCES[name])


def source_questions(task: str, dataset: str, prompt: str) -> QuestionSet:
    """Those that a task of SOURCES brings. Raises DataError."""
    return find_source(task).read_questions(Path(dataset), prompt=prompt)


def describe_tasks(tasks: Mapping[str, Listing]) -> str:
    """As in: `exact` ignores …; `verilog-exact` normalizes …."""
    return "; ".join(f"`{name}` {task.does}" for name, task in tasks.items())


def _load(task: Listing) -> Any:
    return import_module(f"{__package__}.{task.module}")
