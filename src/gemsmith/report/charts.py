"""Charts as SVG, the same bytes for the same numbers; and those of a run: training by step, scores with intervals."""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.runs.eval_records import EvalRecord, Score
from gemsmith.runs.records import TrainRecord
from gemsmith.system.format import count, decimal, fraction, plain

# Drawn in these stand-ins, which become var(--...) in the page, so that a chart follows light, dark and print.
COLORS = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "paper": "#040404",
    **{f"s{index}": f"#0500{index:02x}" for index in range(1, 7)},
}
SERIES = tuple(name for name in COLORS if name.startswith("s"))
MARKERS = ("o", "s", "D", "^", "v", "P")
# In units of the SVG. On a phone it is drawn at four fifths, on a desk at six fifths of this; text is readable at both.
WIDTH, HEIGHT = 440, 236
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
_STYLE = Path(__file__).parent / "templates" / "charts.mplstyle"
Point = tuple[float, float, str]  # x and y in units of the axes, and what is said of it
_MOST_POINTS = 800
_MOST_MARKS = 200
_DOTS: Mapping[str, Any] = {"marker": "o", "markersize": 4.5}
_CROSS: Mapping[str, Any] = {"marker": "X", "linestyle": "none", "markersize": 8}
_MOST_TASKS = 8
_LONGEST_NAME = 40


def write_ticks(axes: Any, *, log: bool, whole_x: bool = False) -> None:
    from matplotlib import ticker

    def tick(value: float, _place: int | None) -> str:
        """Without zeros that say nothing: 0.5, 1,200, 2e-5."""
        if abs(value) >= 1000:
            return count(value)
        text = f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
        mantissa, _, exponent = text.partition("e")
        return f"{float(mantissa):g}e{int(exponent)}" if exponent else text

    # Wrapped in a function of any value: a log axis would otherwise write powers in a mathematical font.
    write = ticker.FuncFormatter(tick)
    axes.yaxis.set_major_formatter(write)
    if log:
        low, high = axes.get_ylim()
        decades = math.log10(high / low)
        marks = (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 1.2 else (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=marks))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    if whole_x:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(write)


def draw_chart(
    name: str, draw: Callable[[Any], None], *, height: int = HEIGHT, points: Sequence[tuple[float, float]] = ()
) -> tuple[str, list[tuple[float, float]]]:
    """One axes, drawn by `draw`, as an <svg> element, and the points, of the axes' units, in those of its viewBox."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(fname=_STYLE):  # over the defaults: a user's matplotlibrc must not change the page
        matplotlib.rcParams["svg.hashsalt"] = f"gemsmith-{name}"
        layout = ConstrainedLayoutEngine(w_pad=2 / 72, h_pad=3 / 72)
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout=layout)
        axes = figure.add_subplot()
        draw(axes)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        places = axes.transData.transform(list(points)) if points else ()
    return _inline(file.getvalue()), [(float(x), height - float(y)) for x, y in places]


def _inline(svg: str) -> str:
    """Matplotlib's SVG file as an element of the page: its fonts and colors, no fixed size, ids only if referred to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view, "matplotlib writes a viewBox"
    svg = re.sub(r"<svg[^>]*>", f'<svg {view[0]} aria-hidden="true" focusable="false">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font: (?:\w+ )*?([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r"-?\d+\.\d{3,}(?=[^<>]*>)", lambda number: f"{float(number[0]):.2f}", svg)  # within tags
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """An SVG with what a reader needs around it."""

    name: str
    title: str
    unit: str
    svg: str
    alt: str  # what the chart shows, for those who cannot see it
    legend: tuple[tuple[str, str, str], ...] = ()
    """Name of the color's variable, kind of mark (line, thin, dash, dots, range, ring), words."""
    rows: bool = False  # whether the pointer chooses a point by its height first, as where each row is something else
    points: str = "[]"
    """JSON of [x, y, words] in units of the SVG, in the order in which the arrow keys go through them."""


def make_chart(
    name: str,
    draw: Callable[[Any], None],
    *,
    title: str,
    unit: str,
    alt: str,
    legend: Iterable[tuple[str, str, str]] = (),
    points: Iterable[Point] = (),
    height: int = HEIGHT,
    rows: bool = False,
) -> Chart:
    """The chart that `draw` draws on its axes; points that are not finite are nowhere on it."""
    points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    svg, places = draw_chart(name, draw, height=height, points=[(x, y) for x, y, _ in points])
    placed = [[round(x), round(y), words] for (x, y), (_, _, words) in zip(places, points, strict=True)]
    said = json.dumps(placed, ensure_ascii=False, separators=(",", ":"))
    return Chart(name=name, title=title, unit=unit, svg=svg, alt=alt, legend=tuple(legend), rows=rows, points=said)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of one color, joined unless `style`, which is Matplotlib's, says otherwise."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # instead of a line upright bars, each from there to `y`
    color: str  # the name of its variable; so below
    style: Mapping[str, Any] = field(default_factory=dict)
    words: str = ""  # in the legend
    mark: str = "line"  # the kind of mark there


def line_chart(
    name: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_names: Sequence[str] = (),
    x_range: tuple[float, float | None] | None = None,
    y_range: tuple[float, float | None] | None = None,
    dashed: Sequence[tuple[float, str]] = (),
    dotted: float | None = None,
    named: Sequence[Point] = (),
    log: bool = False,
    whole_x: bool = False,
    legend: Sequence[tuple[str, str, str]] = (),
    **around: Any,
) -> Chart:
    """Numbers against x, or against places with names.

    `dashed`: x and color of upright lines. `dotted`: the height of a level. `named`: points with words beside them.
    `legend`: beside that of the lines. `around`: as of `make_chart`.
    """

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for line in lines:
            if line.low is None:
                axes.plot(line.x, line.y, color=COLORS[line.color], **line.style)
            else:
                axes.vlines(line.x, line.low, line.y, color=COLORS[line.color], **line.style)
        for at, color in dashed:
            axes.axvline(at, color=COLORS[color], linewidth=1.2, linestyle=DASHED)
        if dotted is not None:
            axes.axhline(dotted, color=COLORS["muted"], linewidth=1.2, linestyle=DOTTED)
        for x, y, words in named:
            if math.isfinite(x) and math.isfinite(y):
                axes.annotate(words, (x, y), (5, 5), textcoords="offset points", fontsize=9.5, color=COLORS["muted"])
        if x_names:
            axes.set_xticks(range(len(x_names)), x_names)
        if x_range is not None:
            axes.set_xlim(*x_range)
        if y_range is not None:
            axes.set_ylim(*y_range)
        axes.set_xlabel(x_label)
        write_ticks(axes, log=log, whole_x=whole_x)

    said = [(line.color, line.mark, line.words) for line in lines if line.words]
    return make_chart(name, draw, legend=[*said, *legend], **around)


def spans_decades(values: Sequence[float], decades: float = 2.0) -> bool:
    """Whether the values are all positive and spread so far that a linear axis would hide most of them."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > decades


def falls_early(values: Sequence[float]) -> bool:
    """Whether a linear axis would show the second half of a fall as a flat line: all positive, and most of it before.

    >>> falls_early([4.0, 1.0, 0.5, 0.4, 0.38, 0.37]), falls_early([4.0, 3.5, 3.0, 2.5, 2.0, 1.5])
    (True, False)
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) < 2 * min(finite):
        return False
    late = finite[len(finite) // 2 :]
    return max(late) - min(late) < (max(finite) - min(finite)) / 5


def training_charts(train: TrainRecord, max_grad_norm: float | None) -> list[Chart]:
    """Loss, gradient norm, learning rate and speed against the step; nothing where one step is no curve."""
    if len(steps := train.steps) < 2:
        return []
    compiled = {steps[0].step, *(after + 1 for after in train.resumed_at)}
    timed = [step.step not in compiled and step.step_s > 0 for step in steps]
    speeds = [step.real_tokens / step.step_s if counts else math.nan for step, counts in zip(steps, timed, strict=True)]
    losses, norms, rates = zip(*((step.loss, step.grad_norm, step.learning_rate) for step in steps), strict=True)
    jumps, most = train.grad_norm_spikes, max_grad_norm
    return [
        _step_chart(train, "loss", "Loss", "mean over the tokens in the loss of a step", losses, marked=train.spikes),
        _step_chart(train, "grad-norm", "Gradient norm", "before clipping", norms, marked=jumps, limit=most),
        _step_chart(train, "learning-rate", "Learning rate", "of the step’s update", rates, smooth=False),
        _step_chart(train, "speed", "Speed", "real tokens/s, without steps that compile", speeds, from_zero=True),
    ]


def _step_chart(
    train: TrainRecord,
    name: str,
    title: str,
    unit: str,
    values: Sequence[float],
    *,
    marked: Sequence[int] = (),
    smooth: bool = True,
    from_zero: bool = False,
    limit: float | None = None,
) -> Chart:
    """One number against the step: raw and, where there are enough steps, its running mean."""
    steps = [step.step for step in train.steps]
    values = [value if math.isfinite(value) else math.nan for value in values]
    known = [value for value in values if not math.isnan(value)]
    window = mean_window(len(values)) if smooth else 1
    log = (spans_decades(values) or (smooth and falls_early(values))) and not from_zero
    crossed = frozenset(marked[:_MOST_MARKS])
    spikes = [(step, value) for step, value in zip(steps, values, strict=True) if step in crossed]
    limit = limit if limit is not None and known and limit <= 1.1 * max(known) else None
    shown, dots = _thinned(steps, values), _DOTS if len(steps) <= 20 else {}
    thin = {"linewidth": 1.0, "alpha": 0.42} if window > 1 else {}
    lines = [Line(x=shown[0], y=shown[1], color="s1", style={**dots, **thin})]
    if window > 1:
        x, y = _thinned(steps, running_mean(values, window))
        lines.append(Line(x=x, y=y, color="s1"))
    lines += [Line(x=[spike], y=[value], color="s2", style=_CROSS) for spike, value in spikes]
    if held_out := {one.step: one.loss for one in train.evaluations if name == "loss" and math.isfinite(one.loss)}:
        lines.append(Line(x=[*held_out], y=[*held_out.values()], color="s3", style=_DOTS, words="held-out rows"))
    legend = [("s1", "line", f"mean of {window} steps"), ("s1", "thin", "each step")] if window > 1 else []
    legend += [("s2", "dash", "continued from a checkpoint")] if train.resumed_at else []
    legend += [("s2", "cross", "spike")] if spikes else []
    legend += [] if limit is None else [("muted", "dots", f"clipped above {plain(limit)}")]
    return line_chart(
        name,
        lines,
        x_label="step",
        y_range=(0, 1.08 * max(known, default=1) or 1) if from_zero else None,
        dashed=[(resumed + 0.5, "s2") for resumed in train.resumed_at],
        dotted=limit,
        log=log,
        whole_x=True,
        title=title,
        unit=unit + (", log scale" if log else ""),
        alt=_describe(title, steps, values),
        legend=legend,
        points=[(step, value, f"step {count(step)}: {decimal(value)}") for step, value in zip(*shown, strict=True)],
    )


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` neighbors, half before and half after; fewer at the ends. Ignores NaN.

    >>> running_mean([0, 3, 6, 9], 3)
    [1.5, 3.0, 6.0, 7.5]
    """
    known = np.isfinite(values)
    ones = np.ones(min(window, len(known)))
    with np.errstate(invalid="ignore"):
        return [*(np.convolve(np.where(known, values, 0.0), ones, "same") / np.convolve(known, ones, "same")).tolist()]


def mean_window(steps: int) -> int:
    """An odd number of steps to average over, about a thirtieth of them; 1 below 30 steps."""
    return 1 if steps < 30 else 2 * max(1, steps // 60) + 1


def _thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most _MOST_POINTS points that keep each bin's lowest and highest value, so that no spike is lost."""
    if len(steps) <= _MOST_POINTS:
        return list(steps), list(values)
    bins = _MOST_POINTS // 2
    kept: set[int] = {0, len(steps) - 1}
    for low, high in pairwise(number * len(steps) // bins for number in range(bins + 1)):
        if inside := [i for i in range(low, high) if not math.isnan(values[i])]:
            kept |= {min(inside, key=lambda i: values[i]), max(inside, key=lambda i: values[i])}
    places = sorted(kept)
    return [steps[i] for i in places], [values[i] for i in places]


def _describe(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not known:
        return f"{title}: no finite value."
    finite = [value for _, value in known]
    ends = f"{decimal(known[0][1])} at step {known[0][0]}, {decimal(known[-1][1])} at step {known[-1][0]}"
    return f"{title} by step: {ends}; lowest {decimal(min(finite))}, highest {decimal(max(finite))}."


def score_chart(scores: EvalRecord) -> Chart:
    """Base and tuned score with their intervals, on the whole range from 0 to 1; of many tasks the first."""
    tasks = [(each.task, each.base.score, each.tuned.score) for each in scores.tasks[:_MOST_TASKS]]
    several = len(tasks) > 1
    rows: list[tuple[float, str, Score]] = []
    names, words = {}, []
    for place, (task, base, tuned) in enumerate(tasks):
        top = -2.7 * place  # from a task's row to the next one's, in rows
        if several:
            names[top] = task if len(task) <= _LONGEST_NAME else f"{task[: _LONGEST_NAME - 1]}…"
        of = f"{names[top]}, " if several else ""
        for down, (name, score) in enumerate((("base", base), ("tuned", tuned))):
            rows.append((top - down, name, score))
            words.append(f"{of}{name}: {fraction(score.score)} ({fraction(score.low)} to {fraction(score.high)})")
    sampled = bool(scores.tasks[0].tuned.problems)
    what = f"pass@1 on {scores.scorer}" if sampled else "share of held-out rows that are right"

    def draw(axes: Any) -> None:
        for height, name, score in rows:
            if height in names:
                axes.text(0, height + 0.55, names[height], va="center", color=COLORS["ink"])
            color = COLORS["muted" if name == "base" else "s1"]
            ends = {"linewidth": 2, "marker": "|", "markersize": 9, "markeredgewidth": 2}
            axes.plot([score.low, score.high], [height, height], color=color, **ends)
            axes.plot([score.score], [height], "o", color=color, markersize=8)
            # Beside the interval where there is room, so that it is never cut off.
            at, side = (score.high + 0.025, "left") if score.high < 0.62 else (score.low - 0.025, "right")
            said = f"{fraction(score.score)}  ({fraction(score.low)}–{fraction(score.high)})"
            axes.text(at, height, said, ha=side, va="center", color=COLORS["ink"])
        label = f"score ({'of each task' if several else what})"
        axes.set(xlim=(-0.01, 1.01), ylim=(rows[-1][0] - 0.6, 0.95 if several else 0.6), xlabel=label)
        axes.set_yticks([height for height, *_ in rows], [name for _, name, _ in rows])
        axes.tick_params(axis="y", labelcolor=COLORS["ink"])
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    return make_chart(
        "scores",
        draw,
        title="Score",
        unit="with 95 % intervals",
        alt=f"Score and 95 % interval. {'; '.join(words)}.",
        points=[(score.score, height, said) for (height, _, score), said in zip(rows, words, strict=True)],
        height=round(100 - 36 * rows[-1][0]),
    )
