"""Charts of load tests and of comparisons: latency, throughput and goodput against load, loss and cost of two runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.compare import Comparison, Pair
from gemsmith.analysis.cost import Curve
from gemsmith.analysis.ratios import common_cells
from gemsmith.analysis.summary import load_words
from gemsmith.bench.sweep import ENOUGH
from gemsmith.report import charts
from gemsmith.report.charts import COLORS, MARKERS, SERIES, Chart, Line, line_chart, make_chart
from gemsmith.runs.bench_records import BenchCell, BenchRecord, Percentiles
from gemsmith.system.format import count, decimal, percent, usd

_MOST_RANGES = 3  # input lengths; with more of them the bars to p90 and p99 hide each other, and the table has them
_RING = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.4, "linestyle": "none"}
_Load = tuple[float, float]  # requests/s asked for, and how many at once; infinite: no limit
_LEAST_HOURS, _MOST_HOURS = 24.0, 24.0 * 30
_MOST_SMOOTHED = 400
_COST_POINTS = 24  # of a line that is straight; its ends and the break-even are among them


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The cells that are drawn, and their places along the axis: a sweep is a set of settings, not a scale."""

    cells: list[BenchCell]
    loads: list[_Load]
    lengths: list[int]

    def row(self, length: int) -> list[BenchCell]:
        return sorted((cell for cell in self.cells if cell.input_tokens == length), key=load_of)

    def place(self, cell: BenchCell) -> int:
        return self.loads.index(load_of(cell))

    def ordered(self) -> list[BenchCell]:
        return [cell for length in self.lengths for cell in self.row(length)]

    @property
    def load_unit(self) -> str:
        at_once = all(math.isinf(rate) for rate, _ in self.loads) and any(math.isfinite(most) for _, most in self.loads)
        return "requests at once" if at_once else "requests/s asked for"


def load_of(cell: BenchCell) -> _Load:
    return cell.request_rate, math.inf if cell.max_concurrency is None else cell.max_concurrency


def load_name(load: _Load) -> str:
    """Its number alone: the rate, or how many at once; else that all came at once."""
    return next((f"{value:g}" for value in load if math.isfinite(value)), "burst")


def load_charts(bench: BenchRecord) -> list[Chart]:
    """Throughput against TTFT, throughput, TTFT, TPOT, ITL and, with an SLO, goodput; a line for each input length."""
    cells = [cell for cell in bench.cells if cell.completed and not cell.probe]
    # Where some cells have a rate, those that have a number of requests at once instead have no place beside them.
    cells = [cell for cell in cells if cell.max_concurrency is None] or cells
    if not cells:
        return []
    grid = _Grid(
        cells=cells,
        loads=sorted({load_of(cell) for cell in cells}),
        lengths=sorted({cell.input_tokens for cell in cells}),
    )
    return [
        _trade_chart(grid),
        _throughput_chart(grid),
        *([_goodput_chart(grid)] if any(cell.goodput is not None for cell in cells) else []),
        _latency_chart(grid, "ttft", "Time to first token (TTFT)", lambda cell: cell.ttft_ms),
        _latency_chart(grid, "tpot", "Time per output token (TPOT)", lambda cell: cell.tpot_ms),
        _latency_chart(grid, "itl", "Inter-token latency (ITL)", lambda cell: cell.itl_ms),
    ]


def _trade_chart(grid: _Grid) -> Chart:
    """Output tokens/s to the right, TTFT p50 upwards: a good server goes far to the right before it goes up."""
    log = charts.spans_decades([cell.ttft_ms.p50 for cell in grid.cells], decades=1.3)
    named = grid.cells if len(grid.lengths) <= _MOST_RANGES else [grid.row(length)[-1] for length in grid.lengths]
    return _grid_chart(
        grid,
        "trade",
        x=lambda cell: cell.output_tokens_per_s,
        y=lambda cell: cell.ttft_ms.p50,
        words=_trade_words,
        named=[(cell.output_tokens_per_s, cell.ttft_ms.p50, load_name(load_of(cell))) for cell in named],
        of="TTFT p50 in ms at output tokens a second",
        title="Latency against throughput",
        unit=f"TTFT p50, ms{', log scale' if log else ''}",
        x_label=f"output tokens/s; beside a point {grid.load_unit}",
        x_range=(0, None),
        y_range=None if log else (0, None),
        log=log,
        whole_x=True,
    )


def _throughput_chart(grid: _Grid) -> Chart:
    longest = max(cell.output_tokens for cell in grid.cells)
    asked = [rate * longest if math.isfinite(rate) else math.nan for rate, _ in grid.loads]
    top = max((cell.output_tokens_per_s for cell in grid.cells if math.isfinite(cell.output_tokens_per_s)), default=0.0)
    told, dots = any(math.isfinite(value) for value in asked), {"linewidth": 1.4, "linestyle": charts.DOTTED}
    return _grid_chart(
        grid,
        "throughput",
        y=lambda cell: cell.output_tokens_per_s,
        words=_trade_words,
        short_words=lambda cell: f"{load_words(cell)}: {decimal(cell.output_tokens_per_s)}",
        of="Output tokens a second",
        title="Throughput",
        unit="output tokens/s",
        beside=[Line(x=range(len(asked)), y=asked, color="muted", style=dots)],
        legend=[("muted", "dots", "asked for: rate × output tokens")] if told else [],
        y_range=(0, 1.15 * top or 1),
    )


def _goodput_chart(grid: _Grid) -> Chart:
    def good(cell: BenchCell) -> float:
        return math.nan if cell.goodput is None else cell.goodput

    return _grid_chart(
        grid,
        "goodput",
        y=lambda cell: 100 * good(cell),
        words=lambda cell: f"{load_words(cell)}: {percent(good(cell))} good",
        of="Share of requests within the SLO",
        title="Goodput",
        unit="% of requests within the SLO",
        legend=[("muted", "dots", "saturated below 95 %")],
        dotted=100 * ENOUGH,
        y_range=(-3, 104),
    )


def _latency_chart(grid: _Grid, name: str, title: str, of: Callable[[BenchCell], Percentiles]) -> Chart:
    """Milliseconds against the load: p50 as a mark on a line; for few lengths a bar to p90 and a thin one to p99."""
    ranges = len(grid.lengths) <= _MOST_RANGES
    values = [value for cell in grid.cells for value in (of(cell).p50, of(cell).p99 if ranges else of(cell).p50)]
    log = charts.spans_decades(values, decades=1.3)
    middle = (len(grid.lengths) - 1) / 2

    def place(cell: BenchCell) -> float:
        return grid.place(cell) + (0.11 * (grid.lengths.index(cell.input_tokens) - middle) if ranges else 0.0)

    def words(cell: BenchCell) -> str:
        took = of(cell)
        return f"{load_words(cell)}: p50 {decimal(took.p50)}, p90 {decimal(took.p90)}, p99 {decimal(took.p99)} ms"

    bars = []
    for number, length in enumerate(grid.lengths if ranges else ()):
        row, color = grid.row(length), SERIES[number % 6]
        at, low, high = ([get(cell) for cell in row] for get in (place, lambda c: of(c).p50, lambda c: of(c).p90))
        top = [of(cell).p99 for cell in row]
        bars.append(Line(x=at, y=top, low=high, color=color, style={"linewidth": 1.3}))
        bars.append(Line(x=at, y=high, low=low, color=color, style={"linewidth": 4, "alpha": 0.55}))
    return _grid_chart(
        grid,
        name,
        x=place,
        y=lambda cell: of(cell).p50,
        words=words,
        short_words=lambda cell: f"{load_words(cell)}: {decimal(of(cell).p50)}",
        of=f"{title}, p50 in ms",
        title=title,
        unit=f"{'ms' if ranges else 'p50, ms'}{', log scale' if log else ''}",
        legend=[("muted", "range", "p50 to p90, p99")] if ranges else [],
        beside=bars,
        y_range=None if log else (0, None),
        log=log,
    )


def _grid_chart(
    grid: _Grid,
    name: str,
    *,
    y: Callable[[BenchCell], float],
    words: Callable[[BenchCell], str],
    of: str,
    x: Callable[[BenchCell], float] | None = None,
    short_words: Callable[[BenchCell], str] | None = None,
    beside: Sequence[Line] = (),
    legend: Sequence[tuple[str, str, str]] = (),
    **how: Any,
) -> Chart:
    """A line for each input length, told apart by marks and color, and a ring round each saturated cell.

    `x`: by default the place of the load. `of`: what the alternative text, of `short_words`, is of.
    """
    at, lines = x or grid.place, []
    for place, length in enumerate(grid.lengths):
        row, color = grid.row(length), SERIES[place % 6]
        style = {"marker": MARKERS[place % 6], "markersize": 6.5, "markeredgecolor": COLORS["paper"], "zorder": 3}
        said: dict[str, Any] = {"mark": f"line m{place % 6}", "words": f"{count(length)} tokens in"}
        lines.append(Line(x=[at(cell) for cell in row], y=[y(cell) for cell in row], color=color, style=style, **said))
        if over := [cell for cell in row if cell.goodput is not None and cell.goodput < ENOUGH]:
            style = {**_RING, "markeredgecolor": COLORS[color], "zorder": 4}
            lines.append(Line(x=[at(cell) for cell in over], y=[y(cell) for cell in over], color=color, style=style))
    saturated = any(cell.goodput is not None and cell.goodput < ENOUGH for cell in grid.cells)
    ring = [("muted", "ring", "saturated: under 95 % good")] if saturated else []
    by_load = {
        "x_names": [*map(load_name, grid.loads)],
        "x_range": (-0.45, len(grid.loads) - 0.55),
        "x_label": grid.load_unit,
    }
    return line_chart(
        name,
        [*lines, *beside],
        alt=f"{of}. {'; '.join(map(short_words or words, grid.ordered()))}.",
        legend=[*ring, *legend],
        points=[(at(cell), y(cell), words(cell)) for cell in grid.ordered()],
        **(how if "x_label" in how else by_load | how),
    )


def _trade_words(cell: BenchCell) -> str:
    return f"{load_words(cell)}: {decimal(cell.output_tokens_per_s)} tokens/s, TTFT p50 {decimal(cell.ttft_ms.p50)} ms"


def loss_chart(comparison: Comparison) -> Chart | None:
    """The running means of the training losses against the step; None where fewer than two sides have curves."""
    smoothed = {}
    for place, side in enumerate(comparison.sides):
        if len(side.losses) > 1:  # steps and running means, few enough to draw
            steps = [step for step, _ in side.losses]
            losses = [loss if math.isfinite(loss) else math.nan for _, loss in side.losses]
            means = charts.running_mean(losses, charts.mean_window(len(losses)))
            every = max(1, len(steps) // _MOST_SMOOTHED)
            smoothed[side.name, SERIES[place % 6]] = [*steps[:-1:every], steps[-1]], [*means[:-1:every], means[-1]]
    if len(smoothed) < 2:
        return None
    tokens = ("data:rows_sha256", "data:loss_mask_sha256", "data:template_sha256")
    unlike = sorted({each.condition for each in comparison.differences if each.condition in tokens})
    alike = f"not of the same tokens: {', '.join(unlike)} differ" if unlike else "same rows and mask"
    ends = "; ".join(f"{name} {decimal(losses[-1])} at the end" for (name, _), (_, losses) in smoothed.items())
    return line_chart(
        "compared-loss",
        [Line(x=steps, y=losses, color=color, words=name) for (name, color), (steps, losses) in smoothed.items()],
        x_label="step",
        whole_x=True,
        title="Training loss",
        unit=f"running mean; {alike}",
        points=[
            (step, loss, f"{name}, step {count(step)}: {decimal(loss)}")
            for (name, _), curve in smoothed.items()
            for step, loss in zip(*curve, strict=True)
        ],
        alt=f"Training loss by step: {ends}.",
    )


def serving_charts(comparison: Comparison, pair: Pair) -> list[Chart]:
    """Output tokens/s, TTFT and TPOT of two sides, each with a row of bars for each load that both have."""
    charts = (
        _bars(comparison, pair, "throughput", "Throughput", "output tokens/s", lambda cell: cell.output_tokens_per_s),
        _bars(comparison, pair, "ttft", "Time to first token (TTFT)", "ms", lambda cell: cell.ttft_ms, log=True),
        _bars(comparison, pair, "tpot", "Time per output token (TPOT)", "ms", lambda cell: cell.tpot_ms),
    )
    return [chart for chart in charts if chart is not None]


def _bars(
    comparison: Comparison, pair: Pair, name: str, title: str, unit: str, of: Any, *, log: bool = False
) -> Chart | None:
    # A side's place among all gives it its color.
    both = {place: side for place, side in enumerate(comparison.sides) if side.name in (pair.first, pair.other)}
    (first, other), colors = both.values(), [SERIES[place % 6] for place in both]
    if not (rows := [cells for cells in common_cells(first, other) if all(map(of, cells))]):
        return None
    bars = [
        (of(cell), 0.19 - 0.38 * which - row, which, cell)
        for row, cells in enumerate(rows)
        for which, cell in enumerate(cells)
    ]
    # A load for an axis: its tokens on one line, how it was asked for on the next.
    loads = [f"{ours.input_tokens:,} / {ours.output_tokens:,}\n{ours.load.split(' out, ', 1)[1]}" for ours, _ in rows]
    values = [value for value, *_ in bars]
    log = log and max(values) / min(values) > 20

    def draw(axes: Any) -> None:
        if log:
            axes.set_xscale("log")
        for value, at, which, _ in bars:
            axes.barh(at, value, height=0.34, color=COLORS[colors[which]])
            axes.annotate(decimal(value), (value, at), (4, 0), textcoords="offset points", va="center", fontsize=9.5)
        axes.tick_params(axis="y", pad=15)
        axes.set_yticks([-row for row in range(len(rows))], loads)
        axes.set_xlim(min(values) / 2 if log else 0, max(values) * (2.2 if log else 1.18))
        axes.set_ylim(-len(rows) + 0.45, 0.55)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.minorticks_off()

    alt = "; ".join(f"{ours.load}: {decimal(of(ours))} and {decimal(of(theirs))}" for ours, theirs in rows)
    names = first.name, other.name
    return make_chart(
        f"{name}-{first.name}-{other.name}",
        draw,
        title=title,
        unit=f"{unit}, tokens in / out{', log scale' if log else ''}",
        points=[(of_, at, f"{names[which]}, {cell.load}: {decimal(of_)} {unit}") for of_, at, which, cell in bars],
        height=36 + 34 * len(rows),  # in units of the SVG, of which the two bars of a load take 34
        rows=True,
        alt=f"{title} of {first.name} and {other.name}. {alt}.",
        legend=[(color, "block", name) for color, name in zip(colors, names, strict=True)],
    )


def cost_chart(curve: Curve, names: tuple[str, str], basis: str = "", *, places: tuple[int, int] = (0, 1)) -> Chart:
    """Dollars of training and N hours of serving, and where both cost the same; `places`: for the two sides' colors."""
    even = curve.break_even_hours
    last = min(_MOST_HOURS, max(_LEAST_HOURS, 1.6 * even)) if even is not None else _LEAST_HOURS
    shown = [even] if even is not None and even < last else []
    start, end = curve.usd(0), curve.usd(last)
    lines = []
    for side, (name, place) in enumerate(zip(names, places, strict=True)):
        color = SERIES[place % 6]
        mark = {"marker": MARKERS[side], "markersize": 6, "linestyle": "none", "clip_on": False}
        lines.append(Line(x=[0, last], y=[start[side], end[side]], color=color, words=name))
        lines.append(Line(x=[0], y=[start[side]], color=color, style=mark))
    hours = sorted({*(last * step / _COST_POINTS for step in range(_COST_POINTS + 1)), *shown})
    ends = [", ".join(f"{name} {usd(value)}" for name, value in zip(names, at, strict=True)) for at in (start, end)]
    return line_chart(
        f"cost-{curve.way}-{basis}-{names[0]}-{names[1]}",
        lines,
        x_label="hours of serving",
        x_range=(0, last),
        y_range=(0, 1.08 * max(end) or 1),
        dashed=[(at, "muted") for at in shown],
        title=f"Training and serving, {curve.way}",
        unit=f"USD{f', {basis}' if basis else ''}",
        points=[
            (at, curve.usd(at)[side], f"{name}, training and {decimal(at)} h of serving: {usd(curve.usd(at)[side])}")
            for side, name in enumerate(names)
            for at in hours
        ],
        alt=f"Cost against hours of serving: at the start {ends[0]}; after {last:g} h {ends[1]}. {curve.say(*names)}",
        legend=[("muted", "dash", f"the same after {decimal(at)} h") for at in shown],
    )
