"""The run directories in a folder, a line each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from gemsmith.analysis.cost import actual_cost
from gemsmith.analysis.summary import RunRecords, read_findings
from gemsmith.errors import InputError, RecipeError, suggest
from gemsmith.report.tables import Table
from gemsmith.runs.run import Run, find_run
from gemsmith.system.console import open_console
from gemsmith.system.format import decimal, fraction, moment, usd
from gemsmith.system.locks import is_locked

State = Literal["complete", "running", "stopped", "stale", "failed", "damaged"]
STATES: dict[State, str] = {
    "complete": "green",
    "running": "blue",
    "stopped": "yellow",
    "stale": "yellow",
    "failed": "bold red",
    "damaged": "bold red",
}
_Write = Callable[[Any], str]
_WRITTEN: dict[str, _Write] = {"loss": decimal, "score": fraction, "speed": decimal, "cost": usd, "started": moment}


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run; None where its records do not say."""

    name: str
    path: Path
    state: State
    stage: str | None  # the last that has a record
    loss: float | None = None  # of the last step
    score: float | None = None  # the tuned model's
    speed: float | None = None  # real tokens/s
    cost: float | None = None  # USD of training, on demand, by the plan's price
    started: str | None = None
    problem: str | None = None  # why it is damaged or failed, in a line

    def as_json(self) -> dict[str, Any]:
        """Its fields, as JSON has them: no NaN."""
        odd = {name: str(one) for name, one in vars(self).items() if isinstance(one, float) and not math.isfinite(one)}
        return {**vars(self), "path": str(self.path), **odd}


def find_runs(
    folder: Path, *, states: Sequence[str] = (), name: str | None = None, sort: str = "started", reverse: bool = False
) -> list[RunRow]:
    """The runs in the folder, or the one that it is. Raises InputError for a folder that is none, or another state."""
    for state in states:
        if state not in STATES:
            raise InputError(f"--state {state}: is none{suggest(state, STATES)}; allowed: {', '.join(STATES)}")
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; give the one that holds the run directories")
    folders = [folder] if (folder / "recipe.yaml").is_file() else [file.parent for file in folder.glob("*/recipe.yaml")]
    listed = [read_listed(path) for path in sorted(folders) if name is None or fnmatchcase(path.resolve().name, name)]
    wanted = [each for each in listed if not states or each.state in states]
    known = [each for each in wanted if _is_known(getattr(each, sort))]
    known.sort(key=lambda each: getattr(each, sort), reverse=reverse)
    return [*known, *(each for each in wanted if not _is_known(getattr(each, sort)))]


def read_listed(folder: Path) -> RunRow:
    """A run's line, whatever is in its records."""
    name = folder.resolve().name
    try:
        run = Run(path=folder, recipe=find_run(folder))
    except RecipeError as error:
        return RunRow(name=name, path=folder, state="damaged", stage=None, problem=str(error.problems[0]))
    findings = read_findings(run)
    records = findings.records()
    state, problem = _state(run, findings)
    cost = actual_cost(findings)
    return RunRow(
        name=name,
        path=folder,
        state=state,
        stage=list(records)[-1] if records else None,
        loss=findings.train.steps[-1].loss if findings.train and findings.train.steps else None,
        score=findings.eval.tuned.score if findings.eval else None,
        speed=findings.train.real_tokens_per_s if findings.train else None,
        cost=cost.training if cost else None,
        started=min((record.provenance.started for record in records.values()), default=None),
        problem=problem,
    )


def _state(run: Run, findings: RunRecords) -> tuple[State, str | None]:
    if is_locked(run.path):
        return "running", None
    if damaged := [line for stage, line in findings.problems.items() if run.record_file(stage).exists()]:
        return "damaged", damaged[0]
    if findings.verify and not findings.verify.passed:
        failed = [check.name for check in findings.verify.checks if check.passed is False]
        return "failed", f"verify: {', '.join(failed)}"
    if findings.stale:
        return "stale", None
    return ("stopped" if findings.problems else "complete"), None


def print_runs(listed: Sequence[RunRow], folder: Path) -> None:
    """The table on stdout, and why runs are damaged or failed."""
    console = open_console(stderr=False, soft_wrap=False)
    if not listed:
        console.print(Text(f"no such run directory in {folder}"))
        return
    rows: list[list[str | Text]] = [
        [
            Text(each.name, style="bold"),
            Text(each.state, style=STATES[each.state]),
            each.stage or "–",
            *("–" if getattr(each, name) is None else write(getattr(each, name)) for name, write in _WRITTEN.items()),
        ]
        for each in listed
    ]
    columns = ("run", "state", "stage", "loss", "score", "tokens/s", "cost", "started")
    console.print(Table(columns=columns, rows=rows, right=("loss", "score", "tokens/s", "cost")).to_rich())
    for each in listed:
        if each.problem:
            console.print(Text(f"{each.name}: {each.problem}"), soft_wrap=True)


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))
