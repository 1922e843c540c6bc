"""Training's curves, and its steps as a table."""

from collections.abc import Sequence
from typing import Any

from gemsmith.records import TrainRecord, TrainStep
from gemsmith.report.curves import training_charts
from gemsmith.report.findings import Findings, trained_tokens
from gemsmith.run import Run

_STEP_ROWS = 24


def make(run: Run, findings: Findings) -> dict[str, Any]:
    """Charts, some of the steps, and how many tokens they had."""
    train = findings.train
    return {
        "charts": training_charts(train, run.recipe.optimizer.clip_norm) if train else [],
        "step_rows": _step_rows(train) if train else [],
        "tokens": trained_tokens(train) if train else 0,
        "loss_tokens": _loss_tokens(train.steps) if train else None,
    }


def _loss_tokens(steps: Sequence[TrainStep]) -> int | None:
    """Of all steps; None where one does not say."""
    counts = [step.loss_tokens for step in steps if step.loss_tokens is not None]
    return sum(counts) if len(counts) == len(steps) else None


def _step_rows(train: TrainRecord) -> list[TrainStep]:
    """Some steps, evenly spread, with the first and the last."""
    last = len(train.steps) - 1
    if last < _STEP_ROWS:
        return list(train.steps)
    return [train.steps[round(row * last / (_STEP_ROWS - 1))] for row in range(_STEP_ROWS)]
