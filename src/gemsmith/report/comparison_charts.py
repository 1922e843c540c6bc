"""The charts of a comparison, in the drawing of the report."""

import math
from typing import Any

from gemsmith.compare.comparison import Comparison, Pair
from gemsmith.compare.curve import Curve
from gemsmith.compare.ratios import common_cells
from gemsmith.compare.side import Cell, Side
from gemsmith.report.charts import Chart, make_chart
from gemsmith.report.curves import running_mean
from gemsmith.report.drawing import COLOURS, MARKERS, SERIES, write_ticks
from gemsmith.report.numbers import count, decimal, usd

_LEAST_HOURS, _MOST_HOURS = 24.0, 24.0 * 30
_ROW = 34
"""Height of a load's bars, in units of the SVG."""
_MOST_SMOOTHED = 400
_COST_POINTS = 24
"""Of a line that is straight; its ends and the break-even are among them."""


def loss_chart(comparison: Comparison) -> Chart | None:
    """The running means of the training losses against the step; None where fewer than two sides have curves."""
    sides = [side for side in comparison.sides if len(side.losses) > 1]
    if len(sides) < 2:
        return None

    def draw(axes: Any) -> None:
        for side in sides:
            steps, losses = _smoothed(side)
            axes.plot(steps, losses, color=COLOURS[SERIES[comparison.sides.index(side) % 6]])
        axes.set_xlabel("step")
        write_ticks(axes, log=False, whole_x=True)

    unlike = {
        each.condition
        for each in comparison.differences
        if each.condition in ("data:rows_sha256", "data:loss_mask_sha256", "data:template_sha256")
    }
    alike = "same rows and mask" if not unlike else f"not of the same tokens: {', '.join(sorted(unlike))} differ"
    ends = "; ".join(f"{side.name} {decimal(_smoothed(side)[1][-1])} at the end" for side in sides)
    points = [
        (step, loss, f"{side.name}, step {count(step)}: {decimal(loss)}")
        for side in sides
        for step, loss in zip(*_smoothed(side), strict=True)
    ]
    return make_chart(
        "compared-loss",
        draw,
        title="Training loss",
        unit=f"running mean; {alike}",
        points=points,
        alt=f"Training loss by step: {ends}.",
        legend=tuple((SERIES[comparison.sides.index(side) % 6], "line", side.name) for side in sides),
    )


def speed_chart(comparison: Comparison, pair: Pair) -> Chart | None:
    """Output tokens/s of two sides, a row of bars for each load that both have."""
    both = _places(comparison, pair)
    return _bars(both, "throughput", "Throughput", "output tokens/s", lambda cell: cell.output_tokens_per_s)


def latency_chart(comparison: Comparison, pair: Pair) -> Chart | None:
    """The same of TTFT."""
    both = _places(comparison, pair)
    return _bars(both, "ttft", "Time to first token (TTFT)", "ms", lambda cell: cell.ttft_ms, log=True)


def _places(comparison: Comparison, pair: Pair) -> dict[int, Side]:
    """The two sides of a pair by their places among all, which give them their colours."""
    return {place: side for place, side in enumerate(comparison.sides) if side.name in (pair.first, pair.other)}


def _bars(both: dict[int, Side], name: str, title: str, unit: str, of: Any, *, log: bool = False) -> Chart | None:
    (first, other), colours = both.values(), [SERIES[place % 6] for place in both]
    pairs: list[tuple[Cell, Cell]] = [pair for pair in common_cells(first, other) if of(pair[0]) and of(pair[1])]
    if not pairs:
        return None
    values = [of(cell) for pair in pairs for cell in pair]
    log = log and max(values) / min(values) > 20

    def draw(axes: Any) -> None:
        if log:
            axes.set_xscale("log")
        for place, cells in enumerate(pairs):
            for side, cell in enumerate(cells):
                value, at = of(cell), _bar_place(place, side)
                axes.barh(at, value, height=0.34, color=COLOURS[colours[side]])
                beside: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9.5}
                axes.annotate(decimal(value), (value, at), **beside)
        axes.tick_params(axis="y", pad=15)
        axes.set_yticks([-place for place in range(len(pairs))], [_short(ours) for ours, _ in pairs])
        low = min(values) / 2 if log else 0
        axes.set_xlim(low, max(values) * (2.2 if log else 1.18))
        axes.set_ylim(-len(pairs) + 0.45, 0.55)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.minorticks_off()

    alt = "; ".join(f"{ours.load}: {decimal(of(ours))} and {decimal(of(theirs))}" for ours, theirs in pairs)
    key = f"{name}-{first.name}-{other.name}"
    points = [
        (of(cell), _bar_place(place, at), f"{side.name}, {cell.load}: {decimal(of(cell))} {unit}")
        for place, cells in enumerate(pairs)
        for at, (side, cell) in enumerate(zip((first, other), cells, strict=True))
    ]
    return make_chart(
        key,
        draw,
        title=title,
        unit=f"{unit}, tokens in / out{', log scale' if log else ''}",
        points=points,
        height=36 + _ROW * len(pairs),
        rows=True,
        alt=f"{title} of {first.name} and {other.name}. {alt}.",
        legend=tuple((colours[at], "block", side.name) for at, side in enumerate((first, other))),
    )


def cost_chart(curve: Curve, names: tuple[str, str], basis: str = "", *, places: tuple[int, int] = (0, 1)) -> Chart:
    """Dollars of training and N hours of serving, and where the two cost the same.

    `places`: of the two among all sides, for their colours.
    """
    even = curve.break_even_hours
    last = min(_MOST_HOURS, max(_LEAST_HOURS, 1.6 * even)) if even is not None else _LEAST_HOURS
    shown = even is not None and even < last
    colours = [SERIES[place % 6] for place in places]

    def draw(axes: Any) -> None:
        ends = curve.usd(0), curve.usd(last)
        for side in (0, 1):
            axes.plot([0, last], [end[side] for end in ends], color=COLOURS[colours[side]])
            mark: dict[str, Any] = {"marker": MARKERS[side], "markersize": 6, "linestyle": "none"}
            axes.plot([0], [ends[0][side]], color=COLOURS[colours[side]], clip_on=False, **mark)
        if shown and even is not None:
            axes.axvline(even, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlim(0, last)
        axes.set_ylim(0, 1.08 * max(ends[1]) or 1)
        axes.set_xlabel("hours of serving")
        write_ticks(axes, log=False)

    legend = tuple((colour, "line", name) for colour, name in zip(colours, names, strict=True))
    if shown and even is not None:
        legend = (*legend, ("muted", "dash", f"the same after {decimal(even)} h"))
    key = f"cost-{curve.way}-{basis}-{names[0]}-{names[1]}"
    start, end = (
        ", ".join(f"{name} {usd(value)}" for name, value in zip(names, curve.usd(at), strict=True)) for at in (0, last)
    )
    crossing = [even] if shown and even is not None else []
    hours = sorted({*(last * step / _COST_POINTS for step in range(_COST_POINTS + 1)), *crossing})
    points = [
        (at, curve.usd(at)[side], f"{name}, training and {decimal(at)} h of serving: {usd(curve.usd(at)[side])}")
        for side, name in enumerate(names)
        for at in hours
    ]
    return make_chart(
        key,
        draw,
        title=f"Training and serving, {curve.way}",
        unit=f"USD{f', {basis}' if basis else ''}",
        points=points,
        alt=f"Cost against hours of serving: at the start {start}; after {last:g} h {end}. {curve.say(*names)}",
        legend=legend,
    )


def _bar_place(row: int, side: int) -> float:
    """The height of a side's bar: the first above the other."""
    return -row - 0.19 + (0.38 if side == 0 else 0)


def _short(cell: Cell) -> str:
    """A load for an axis: its tokens on one line, how it was asked for on the next."""
    tokens = f"{cell.input_tokens:,} / {cell.output_tokens:,}"
    return f"{tokens}\n{cell.load.split(' out, ', 1)[1]}"


def _smoothed(side: Side) -> tuple[list[int], list[float]]:
    """Steps and running means, few enough to draw."""
    steps = [step for step, _ in side.losses]
    losses = [loss if math.isfinite(loss) else math.nan for _, loss in side.losses]
    means = running_mean(losses, 1 if len(losses) < 30 else 2 * max(1, len(losses) // 60) + 1)
    every = max(1, len(steps) // _MOST_SMOOTHED)
    return [*steps[:-1:every], steps[-1]], [*means[:-1:every], means[-1]]
