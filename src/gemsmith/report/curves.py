"""Training's curves: numbers against the step."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from gemsmith.records import TrainRecord
from gemsmith.report.charts import Chart, make_chart, spans_decades
from gemsmith.report.drawing import COLOURS, write_ticks
from gemsmith.report.numbers import count, decimal, plain

_MOST_POINTS = 800
_MOST_MARKS = 200


def training_charts(train: TrainRecord, clip_norm: float | None) -> list[Chart]:
    """Loss, gradient norm, learning rate and speed against the step; nothing where one step is no curve."""
    steps = train.steps
    if len(steps) < 2:
        return []
    compiled = {steps[0].step, *(after + 1 for after in train.resumed_at)}
    timed = [step.step not in compiled and step.step_s > 0 for step in steps]
    speeds = [step.real_tokens / step.step_s if counts else math.nan for step, counts in zip(steps, timed, strict=True)]
    return [
        _step_chart(train, "loss", "Loss", "mean over the tokens in the loss of a step", [step.loss for step in steps]),
        _step_chart(
            train, "grad-norm", "Gradient norm", "before clipping", [step.grad_norm for step in steps], limit=clip_norm
        ),
        _step_chart(
            train,
            "learning-rate",
            "Learning rate",
            "of the step’s update",
            [step.learning_rate for step in steps],
            smooth=False,
        ),
        _step_chart(train, "speed", "Speed", "real tokens/s, without steps that compile", speeds, from_zero=True),
    ]


def _step_chart(
    train: TrainRecord,
    name: str,
    title: str,
    unit: str,
    values: Sequence[float],
    *,
    smooth: bool = True,
    from_zero: bool = False,
    limit: float | None = None,
) -> Chart:
    """One number against the step: raw and, where there are enough steps, its running mean."""
    steps = [step.step for step in train.steps]
    values = [value if math.isfinite(value) else math.nan for value in values]
    window = _window(len(values)) if smooth else 1
    log = spans_decades(values) and not from_zero
    shown = _thinned(steps, values)
    place = {step: number for number, step in enumerate(steps)}
    marked = [step for step in train.spikes if name == "loss" and step in place][:_MOST_MARKS]

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        style = {"marker": "o", "markersize": 4.5} if len(steps) <= 20 else {}
        thin = {"linewidth": 1.0, "alpha": 0.42} if window > 1 else {}
        axes.plot(*shown, color=COLOURS["s1"], **style, **thin)
        if window > 1:
            axes.plot(*_thinned(steps, running_mean(values, window)), color=COLOURS["s1"])
        for spike in marked:
            axes.plot(spike, values[place[spike]], "X", color=COLOURS["s2"], markersize=8)
        for resumed in train.resumed_at:
            axes.axvline(resumed + 0.5, color=COLOURS["s2"], linewidth=1.2, linestyle=(0, (4, 3)))
        if limit is not None and _within(limit, values):
            axes.axhline(limit, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (1, 2)))
        if from_zero:
            axes.set_ylim(0, 1.08 * max((value for value in values if not math.isnan(value)), default=1) or 1)
        axes.set_xlabel("step")
        write_ticks(axes, log=log, whole_x=True)

    legend = [("s1", "line", f"mean of {window} steps"), ("s1", "thin", "each step")] if window > 1 else []
    legend += [("s2", "dash", "continued from a checkpoint")] if train.resumed_at else []
    legend += [("s2", "cross", "spike")] if marked else []
    legend += (
        [("muted", "dots", f"clipped above {plain(limit)}")] if limit is not None and _within(limit, values) else []
    )
    unit += ", log scale" if log else ""
    return make_chart(
        name,
        draw,
        title=title,
        unit=unit,
        alt=_describe(title, steps, values),
        legend=legend,
        points=[(step, value, f"step {count(step)}: {decimal(value)}") for step, value in zip(*shown, strict=True)],
    )


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` neighbours, half before and half after; fewer at the ends. Ignores NaN.

    >>> running_mean([0, 3, 6, 9], 3)
    [1.5, 3.0, 6.0, 7.5]
    """
    half = window // 2
    sums = [0.0, *itertools.accumulate(0.0 if math.isnan(value) else value for value in values)]
    known = [0, *itertools.accumulate(not math.isnan(value) for value in values)]
    ends = [(max(0, middle - half), min(len(values), middle + half + 1)) for middle in range(len(values))]
    return [
        (sums[end] - sums[start]) / (known[end] - known[start]) if known[end] > known[start] else math.nan
        for start, end in ends
    ]


def _window(steps: int) -> int:
    """An odd number of steps to average over, about a thirtieth of them; 1 below 30 steps."""
    return 1 if steps < 30 else 2 * max(1, steps // 60) + 1


def _thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most _MOST_POINTS points that keep each bin's lowest and highest value, so that no spike is lost."""
    if len(steps) <= _MOST_POINTS:
        return list(steps), list(values)
    bins = _MOST_POINTS // 2
    kept: set[int] = {0, len(steps) - 1}
    for number in range(bins):
        inside = [
            i
            for i in range(number * len(steps) // bins, (number + 1) * len(steps) // bins)
            if not math.isnan(values[i])
        ]
        if inside:
            kept |= {min(inside, key=lambda i: values[i]), max(inside, key=lambda i: values[i])}
    places = sorted(kept)
    return [steps[i] for i in places], [values[i] for i in places]


def _within(limit: float, values: Sequence[float]) -> bool:
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and limit <= 1.1 * max(finite)


def _describe(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not known:
        return f"{title}: no finite value."
    finite = [value for _, value in known]
    ends = f"{decimal(known[0][1])} at step {known[0][0]}, {decimal(known[-1][1])} at step {known[-1][0]}"
    return f"{title} by step: {ends}; lowest {decimal(min(finite))}, highest {decimal(max(finite))}."
