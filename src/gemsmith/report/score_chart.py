"""Scores with their intervals, base and tuned, of every task."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.eval_records import EvalRecord, Score
from gemsmith.report.charts import Chart, make_chart
from gemsmith.report.drawing import COLOURS
from gemsmith.report.numbers import fraction

_MOST_TASKS = 8
_LONGEST_NAME = 22


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    score: Score
    colour: str


def score_chart(scores: EvalRecord) -> Chart:
    """Base and tuned score with their intervals, on the whole range from 0 to 1; of many tasks the first."""
    tasks = [(each.task, each.base.score, each.tuned.score) for each in scores.tasks[:_MOST_TASKS]]
    rows = _rows(tasks or [(scores.scorer, scores.base, scores.tuned)])

    def draw(axes: Any) -> None:
        for place, row in enumerate(rows):
            _draw_row(axes, -place, row)
        axes.set(xlim=(-0.01, 1.01), ylim=(0.6 - len(rows), 0.6), xlabel=f"score ({_what_it_is(scores)})")
        axes.set_yticks([-place for place in range(len(rows))], [row.name for row in rows])
        axes.tick_params(axis="y", labelcolor=COLOURS["ink"])
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    alt = "; ".join(f"{row.name} {_words(row.score)}" for row in rows)
    return make_chart(
        "scores",
        draw,
        title="Score",
        unit="with 95 % intervals",
        alt=f"Score and 95 % interval: {alt}.",
        points=[(row.score.score, -place, f"{row.name}: {_words(row.score)}") for place, row in enumerate(rows)],
        height=60 + 40 * len(rows),
    )


def _rows(tasks: Sequence[tuple[str, Score, Score]]) -> list[_Row]:
    """Base over tuned, task by task; a single task needs no name."""
    return [
        _Row(name=f"{_cut(task)}, {name}" if len(tasks) > 1 else name, score=score, colour=colour)
        for task, base, tuned in tasks
        for name, score, colour in (("base", base, "muted"), ("tuned", tuned, "s1"))
    ]


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _draw_row(axes: Any, height: float, row: _Row) -> None:
    score, colour = row.score, COLOURS[row.colour]
    bar = {"linewidth": 2, "marker": "|", "markersize": 9, "markeredgewidth": 2}
    axes.plot([score.low, score.high], [height, height], color=colour, **bar)
    axes.plot([score.score], [height], "o", color=colour, markersize=8)
    # Beside the interval where there is room, so that it is never cut off.
    right = score.high < 0.62
    axes.text(
        score.high + 0.025 if right else score.low - 0.025,
        height,
        f"{fraction(score.score)}  ({fraction(score.low)}–{fraction(score.high)})",
        ha="left" if right else "right",
        va="center",
        color=COLOURS["ink"],
    )


def _words(score: Score) -> str:
    return f"{fraction(score.score)} ({fraction(score.low)} to {fraction(score.high)})"


def _what_it_is(scores: EvalRecord) -> str:
    if len(scores.tasks) > 1:
        return "of each task"
    sampled = bool(scores.tasks) and bool(scores.tasks[0].tuned.problems)
    return f"pass@1 on {scores.scorer}" if sampled else "share of held-out rows that are right"
