"""The report's charts: what each shows of which record."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.bench_records import BenchCell, Percentiles
from gemsmith.eval_records import EvalRecord
from gemsmith.records import TrainRecord
from gemsmith.report.drawing import COLOURS, MARKERS, SERIES, draw_svg, write_rates, write_ticks
from gemsmith.report.numbers import count, decimal, fraction, plain

_MOST_POINTS = 800
_MOST_RANGES = 3  # input lengths; with more of them the bars to p90 and p99 hide each other, and the table has them


@dataclass(frozen=True, kw_only=True)
class Chart:
    """An SVG with what a reader needs around it."""

    name: str
    title: str
    unit: str
    svg: str
    alt: str
    """What the chart shows, for those who cannot see it."""
    legend: tuple[tuple[str, str, str], ...] = ()
    """Name of the colour's variable, kind of mark (line, thin, dash, range), words."""


def training_charts(train: TrainRecord, clip_norm: float | None) -> list[Chart]:
    """Loss, gradient norm, learning rate and speed against the step; nothing where one step is no curve."""
    steps = train.steps
    if len(steps) < 2:
        return []
    compiled = {steps[0].step, *(after + 1 for after in train.resumed_at)}
    timed = [step.step not in compiled and step.step_s > 0 for step in steps]
    speeds = [step.real_tokens / step.step_s if counts else math.nan for step, counts in zip(steps, timed, strict=True)]
    return [
        _step_chart(train, "loss", "Loss", "mean over the supervised tokens of a step", [step.loss for step in steps]),
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


def bench_charts(cells: Sequence[BenchCell]) -> list[Chart]:
    """TTFT, TPOT and ITL percentiles and throughput against the request rate, for each input length."""
    cells = [cell for cell in cells if cell.completed and not cell.probe]
    # Where some cells have a rate, those that have a number of requests at once instead have no place beside them.
    cells = [cell for cell in cells if cell.max_concurrency is None] or cells
    if not cells:
        return []
    return [
        _latency_chart(cells, "ttft", "Time to first token (TTFT)", lambda cell: cell.ttft_ms),
        _latency_chart(cells, "tpot", "Time per output token (TPOT)", lambda cell: cell.tpot_ms),
        _latency_chart(cells, "itl", "Inter-token latency (ITL)", lambda cell: cell.itl_ms),
        _throughput_chart(cells),
    ]


def score_chart(scores: EvalRecord) -> Chart:
    """Base and tuned score with their intervals, on the whole range from 0 to 1."""

    def draw(axes: Any) -> None:
        for height, (score, colour) in enumerate(((scores.tuned, "s1"), (scores.base, "muted"))):
            axes.plot(
                [score.low, score.high],
                [height, height],
                color=COLOURS[colour],
                linewidth=2,
                marker="|",
                markersize=9,
                markeredgewidth=2,
            )
            axes.plot([score.score], [height], "o", color=COLOURS[colour], markersize=8)
            # Beside the interval where there is room, so that it is never cut off.
            right = score.high < 0.62
            text = f"{fraction(score.score)}  ({fraction(score.low)}–{fraction(score.high)})"
            axes.text(
                score.high + 0.025 if right else score.low - 0.025,
                height,
                text,
                ha="left" if right else "right",
                va="center",
                color=COLOURS["ink"],
            )
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.6, 1.6), xlabel=f"score ({_what_it_is(scores)})")
        axes.set_yticks([0, 1], ["tuned", "base"])
        axes.tick_params(axis="y", labelcolor=COLOURS["ink"])
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    base, tuned = scores.base, scores.tuned
    alt = f"Base {fraction(base.score)} ({fraction(base.low)} to {fraction(base.high)}), "
    alt += f"tuned {fraction(tuned.score)} ({fraction(tuned.low)} to {fraction(tuned.high)})."
    svg = draw_svg("scores", draw, height=140)
    return Chart(name="scores", title="Score", unit="with 95 % intervals", svg=svg, alt=alt)


def _what_it_is(scores: EvalRecord) -> str:
    sampled = bool(scores.tasks) and bool(scores.tasks[0].tuned.problems)
    return f"pass@1 on {scores.scorer}" if sampled else "share of held-out rows that are right"


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
    log = _spans_decades(values) and not from_zero

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        style = {"marker": "o", "markersize": 4.5} if len(steps) <= 20 else {}
        thin = {"linewidth": 1.0, "alpha": 0.42} if window > 1 else {}
        axes.plot(*_thinned(steps, values), color=COLOURS["s1"], **style, **thin)
        if window > 1:
            axes.plot(*_thinned(steps, running_mean(values, window)), color=COLOURS["s1"])
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
    legend += (
        [("muted", "dots", f"clipped above {plain(limit)}")] if limit is not None and _within(limit, values) else []
    )
    unit += ", log scale" if log else ""
    return Chart(
        name=name,
        title=title,
        unit=unit,
        svg=draw_svg(name, draw),
        alt=_describe(title, steps, values),
        legend=tuple(legend),
    )


def _latency_chart(cells: Sequence[BenchCell], name: str, title: str, of: Callable[[BenchCell], Percentiles]) -> Chart:
    """Milliseconds against the request rate: p50 as a mark on a line.

    For few lengths, from there a bar to p90 and a thin one to p99.
    """
    rates = sorted({cell.request_rate for cell in cells})
    lengths = sorted({cell.input_tokens for cell in cells})
    ranges = len(lengths) <= _MOST_RANGES
    values = [value for cell in cells for value in (of(cell).p50, of(cell).p99 if ranges else of(cell).p50)]
    log = _spans_decades(values, decades=1.3)

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for place, length in enumerate(lengths):
            row = sorted((cell for cell in cells if cell.input_tokens == length), key=lambda cell: cell.request_rate)
            shift = 0.11 * (place - (len(lengths) - 1) / 2) if ranges else 0.0
            at = [rates.index(cell.request_rate) + shift for cell in row]
            colour, numbers = COLOURS[SERIES[place % 6]], [of(cell) for cell in row]
            middle, high, top = [n.p50 for n in numbers], [n.p90 for n in numbers], [n.p99 for n in numbers]
            if ranges:
                axes.vlines(at, high, top, color=colour, linewidth=1.3)
                axes.vlines(at, middle, high, color=colour, linewidth=4, alpha=0.55)
            axes.plot(
                at, middle, color=colour, marker=MARKERS[place % 6], markersize=6.5, markeredgecolor=COLOURS["paper"]
            )
        write_rates(axes, rates)
        if not log:
            axes.set_ylim(bottom=0)
        write_ticks(axes, log=log)

    unit = f"{'ms' if ranges else 'p50, ms'}{', log scale' if log else ''}"
    legend = (*_length_legend(lengths), *([("muted", "range", "p50 to p90, p99")] if ranges else []))
    alt = "; ".join(
        f"{length} in at {_per_s(rate)}: {decimal(of(cell).p50)}"
        for length, rate, cell in _ordered(cells, lengths, rates)
    )
    return Chart(
        name=name, title=title, unit=unit, svg=draw_svg(name, draw), alt=f"{title}, p50 in ms. {alt}.", legend=legend
    )


def _throughput_chart(cells: Sequence[BenchCell]) -> Chart:
    """Output tokens/s against the request rate, beside what the requests ask for."""
    rates = sorted({cell.request_rate for cell in cells})
    lengths = sorted({cell.input_tokens for cell in cells})
    longest = max(cell.output_tokens for cell in cells)
    asked = [rate * longest if math.isfinite(rate) else math.nan for rate in rates]

    def draw(axes: Any) -> None:
        for place, length in enumerate(lengths):
            row = sorted((cell for cell in cells if cell.input_tokens == length), key=lambda cell: cell.request_rate)
            at = [rates.index(cell.request_rate) for cell in row]
            speeds = [cell.output_tokens_per_s for cell in row]
            mark = {"marker": MARKERS[place % 6], "markersize": 6.5, "markeredgecolor": COLOURS["paper"]}
            axes.plot(at, speeds, color=COLOURS[SERIES[place % 6]], zorder=3, **mark)
        top = max(cell.output_tokens_per_s for cell in cells)
        dots = {"linewidth": 1.4, "linestyle": (0, (1, 2))}
        axes.plot(range(len(rates)), asked, color=COLOURS["muted"], **dots)
        axes.set_ylim(0, 1.15 * top or 1)
        write_rates(axes, rates)
        write_ticks(axes, log=False)

    legend = (*_length_legend(lengths), ("muted", "dots", "asked for: rate × output tokens"))
    alt = "; ".join(
        f"{length} in at {_per_s(rate)}: {decimal(cell.output_tokens_per_s)}"
        for length, rate, cell in _ordered(cells, lengths, rates)
    )
    alt = f"Output tokens a second. {alt}."
    return Chart(
        name="throughput",
        title="Throughput",
        unit="output tokens/s",
        svg=draw_svg("throughput", draw),
        alt=alt,
        legend=legend,
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


def _spans_decades(values: Sequence[float], decades: float = 2.0) -> bool:
    """Whether the values are all positive and spread so far that a linear axis would hide most of them."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > decades


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


def _per_s(rate: float) -> str:
    return "a burst" if math.isinf(rate) else f"{decimal(rate)}/s"


def _length_legend(lengths: Sequence[int]) -> list[tuple[str, str, str]]:
    return [(SERIES[place % 6], "line", f"{count(length)} tokens in") for place, length in enumerate(lengths)]


def _ordered(
    cells: Sequence[BenchCell], lengths: Sequence[int], rates: Sequence[float]
) -> Iterator[tuple[int, float, BenchCell]]:
    for length in lengths:
        for rate in rates:
            yield from (
                (length, rate, cell) for cell in cells if (cell.input_tokens, cell.request_rate) == (length, rate)
            )
