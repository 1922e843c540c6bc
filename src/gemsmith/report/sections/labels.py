"""What a classifier takes for what: matrices of the largest labels, for the page."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from gemsmith.eval_records import LabelScores, LabelsResult
from gemsmith.report.findings import Findings
from gemsmith.run import Run

MOST_LABELS = 12
OTHERS, NO_LABEL = "others", "no label"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Rows of one label that were answered with one, and their share of the label's rows."""

    rows: int
    share: float
    right: bool


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Expected labels by row, answered ones by column; both with `others` where there are more than MOST_LABELS."""

    model: str
    answered: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell, ...]], ...]


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """The tasks that classify, each with its matrices."""
    results = findings.eval.tasks if findings.eval else ()
    return {"tasks": [(result, label_matrices(result.labels)) for result in results if result.labels]}


def label_matrices(found: LabelsResult) -> tuple[Matrix, Matrix]:
    """The base's and the tuned model's, of the labels with the most rows, in the order of the labels."""
    largest = sorted(found.labels, key=lambda label: -found.rows.get(label, 0))[:MOST_LABELS]
    shown = tuple(label for label in found.labels if label in largest)
    return _matrix("base", found.base, found, shown), _matrix("tuned", found.tuned, found, shown)


def _matrix(model: str, scores: LabelScores, found: LabelsResult, shown: tuple[str, ...]) -> Matrix:
    names = (*shown, *((OTHERS,) if len(shown) < len(found.labels) else ()))
    cells, right = Counter[tuple[str, str]](), Counter[str]()
    for count in scores.confusion:
        line = count.expected if count.expected in shown else OTHERS
        column = NO_LABEL if count.answered is None else count.answered if count.answered in shown else OTHERS
        cells[line, column] += count.rows
        right[line] += count.rows if count.expected == count.answered else 0
    totals = {line: sum(cells[line, column] for column in (*names, NO_LABEL)) for line in names}
    return Matrix(
        model=model,
        answered=(*names, NO_LABEL),
        lines=tuple(
            (
                line,
                tuple(
                    Cell(
                        rows=cells[line, column],
                        share=cells[line, column] / totals[line] if totals[line] else 0.0,
                        right=line == column and right[line] == cells[line, column],
                    )
                    for column in (*names, NO_LABEL)
                ),
            )
            for line in names
            if totals[line]
        ),
    )
