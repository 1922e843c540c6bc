"""Scores with their intervals, base and tuned, of every task."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.eval_records import EvalRecord, Score
from gemsmith.report.charts import Chart, make_chart
from gemsmith.report.drawing import COLOURS
from gemsmith.report.numbers import fraction

_MOST_TASKS = 8
_LONGEST_NAME = 40
_TASK = 2.7
"""From a task's row to the next one's, in rows."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    task: str
    """Above its first row; else empty."""
    height: float
    score: Score
    colour: str


def score_chart(scores: EvalRecord) -> Chart:
    """Base and tuned score with their intervals, on the whole range from 0 to 1; of many tasks the first."""
    tasks = [(each.task, each.base.score, each.tuned.score) for each in scores.tasks[:_MOST_TASKS]]
    rows = _rows(tasks or [(scores.scorer, scores.base, scores.tuned)])

    def draw(axes: Any) -> None:
        for row in rows:
            _draw_row(axes, row)
        top = 0.95 if rows[0].task else 0.6
        axes.set(xlim=(-0.01, 1.01), ylim=(rows[-1].height - 0.6, top), xlabel=f"score ({_what_it_is(scores)})")
        axes.set_yticks([row.height for row in rows], [row.name for row in rows])
        axes.tick_params(axis="y", labelcolor=COLOURS["ink"])
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    task, alt, points = "", [], []
    for row in rows:
        task = row.task or task
        alt.append(words := f"{task}{', ' if task else ''}{row.name}: {_words(row.score)}")
        points.append((row.score.score, row.height, words))
    return make_chart(
        "scores",
        draw,
        title="Score",
        unit="with 95 % intervals",
        alt=f"Score and 95 % interval. {'; '.join(alt)}.",
        points=points,
        height=round(100 - 36 * rows[-1].height),
    )


def _rows(tasks: Sequence[tuple[str, Score, Score]]) -> list[_Row]:
    """Base over tuned, task by task; a single task needs no name."""
    rows = []
    for place, (task, base, tuned) in enumerate(tasks):
        named, height = _cut(task) if len(tasks) > 1 else "", -_TASK * place
        rows += [
            _Row(name="base", task=named, height=height, score=base, colour="muted"),
            _Row(name="tuned", task="", height=height - 1, score=tuned, colour="s1"),
        ]
    return rows


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _draw_row(axes: Any, row: _Row) -> None:
    score, colour, height = row.score, COLOURS[row.colour], row.height
    if row.task:
        axes.text(0, height + 0.55, row.task, va="center", color=COLOURS["ink"])
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
