"""Training's curves, and its steps as a table."""

from typing import Any

from gemsmith.records import TrainRecord, TrainStep
from gemsmith.report.curves import training_charts
from gemsmith.report.findings import Findings, trained_tokens
from gemsmith.run import Run

_STEP_ROWS = 24


def make(run: Run, findings: Findings) -> dict[str, Any]:
    """Charts, some of the steps, and how many tokens they had."""
    train = findings.train
    counts = [step.loss_tokens for step in train.steps] if train else []
    return {
        "charts": training_charts(train, run.recipe.optimizer.clip_norm) if train else [],
        "step_rows": _step_rows(train) if train else [],
        "tokens": trained_tokens(train) if train else 0,
        "loss_tokens": sum(counts) if None not in counts else None,
    }


def _step_rows(train: TrainRecord) -> list[TrainStep]:
    """Some steps, evenly spread, with the first and the last."""
    last = len(train.steps) - 1
    if last < _STEP_ROWS:
        return list(train.steps)
    return [train.steps[round(row * last / (_STEP_ROWS - 1))] for row in range(_STEP_ROWS)]
