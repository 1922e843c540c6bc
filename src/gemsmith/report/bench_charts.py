"""The load test's charts: latency, throughput and goodput against the load, and throughput against latency.

The charts of a comparison, in the drawing of the report.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.compare import Comparison, Pair
from gemsmith.analysis.cost import Curve
from gemsmith.analysis.ratios import common_cells
from gemsmith.analysis.sides import Cell, Side
from gemsmith.bench.sweep import ENOUGH
from gemsmith.report.charts import COLORS, MARKERS, SERIES, Chart, make_chart, spans_decades, write_ticks
from gemsmith.report.run_charts import running_mean
from gemsmith.runs.bench_records import BenchCell, BenchRecord, Percentiles
from gemsmith.system.format import count, decimal, percent, rate, usd

_MOST_RANGES = 3  # input lengths; with more of them the bars to p90 and p99 hide each other, and the table has them
_Load = tuple[float, float]
"""Requests/s asked for, and how many at once; infinite: no limit."""


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
    def at_once(self) -> bool:
        return all(math.isinf(rate) for rate, _ in self.loads) and any(math.isfinite(most) for _, most in self.loads)

    @property
    def judged(self) -> bool:
        return any(cell.goodput is not None for cell in self.cells)


def load_of(cell: BenchCell) -> _Load:
    return cell.request_rate, math.inf if cell.max_concurrency is None else cell.max_concurrency


def load_charts(bench: BenchRecord) -> list[Chart]:
    """Throughput against TTFT, throughput, TTFT, TPOT, ITL and, with an SLO, goodput; a line for each input length."""
    grid = _grid(bench.cells)
    if not grid.cells:
        return []
    charts = [_trade_chart(grid), _throughput_chart(grid)]
    charts += [_goodput_chart(grid)] if grid.judged else []
    return [
        *charts,
        _latency_chart(grid, "ttft", "Time to first token (TTFT)", lambda cell: cell.ttft_ms),
        _latency_chart(grid, "tpot", "Time per output token (TPOT)", lambda cell: cell.tpot_ms),
        _latency_chart(grid, "itl", "Inter-token latency (ITL)", lambda cell: cell.itl_ms),
    ]


def _grid(cells: Sequence[BenchCell]) -> _Grid:
    cells = [cell for cell in cells if cell.completed and not cell.probe]
    # Where some cells have a rate, those that have a number of requests at once instead have no place beside them.
    cells = [cell for cell in cells if cell.max_concurrency is None] or cells
    return _Grid(
        cells=cells,
        loads=sorted({load_of(cell) for cell in cells}),
        lengths=sorted({cell.input_tokens for cell in cells}),
    )


def _trade_chart(grid: _Grid) -> Chart:
    """Output tokens/s to the right, TTFT p50 upwards: a good server goes far to the right before it goes up."""
    log = spans_decades([cell.ttft_ms.p50 for cell in grid.cells], decades=1.3)

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for place, length in enumerate(grid.lengths):
            row = grid.row(length)
            speeds, waits = [cell.output_tokens_per_s for cell in row], [cell.ttft_ms.p50 for cell in row]
            _draw_line(axes, place, speeds, waits)
            _ring(axes, row, speeds, waits, place)
        axes.set_xlim(left=0)
        if not log:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("output tokens/s")
        write_ticks(axes, log=log, whole_x=True)

    return make_chart(
        "trade",
        draw,
        title="Latency against throughput",
        unit=f"TTFT p50, ms{', log scale' if log else ''}",
        alt=f"TTFT p50 in ms at output tokens a second. {_list(grid, _trade_words)}.",
        legend=_legend(grid),
        points=[(cell.output_tokens_per_s, cell.ttft_ms.p50, _trade_words(cell)) for cell in grid.ordered()],
    )


def _throughput_chart(grid: _Grid) -> Chart:
    """Output tokens/s against the load, beside what the requests ask for."""
    longest = max(cell.output_tokens for cell in grid.cells)
    asked = [rate * longest if math.isfinite(rate) else math.nan for rate, _ in grid.loads]
    top = max((cell.output_tokens_per_s for cell in grid.cells if math.isfinite(cell.output_tokens_per_s)), default=0.0)

    def draw(axes: Any) -> None:
        for place, length in enumerate(grid.lengths):
            row = grid.row(length)
            at, speeds = [grid.place(cell) for cell in row], [cell.output_tokens_per_s for cell in row]
            _draw_line(axes, place, at, speeds)
            _ring(axes, row, at, speeds, place)
        dots = {"linewidth": 1.4, "linestyle": (0, (1, 2))}
        axes.plot(range(len(asked)), asked, color=COLORS["muted"], **dots)
        axes.set_ylim(0, 1.15 * top or 1)
        _write_loads(axes, grid)

    legend = _legend(grid)
    if any(math.isfinite(value) for value in asked):
        legend.append(("muted", "dots", "asked for: rate × output tokens"))
    points = [(grid.place(cell), cell.output_tokens_per_s, _trade_words(cell)) for cell in grid.ordered()]
    alt = _list(grid, lambda cell: f"{_where(cell)}: {decimal(cell.output_tokens_per_s)}")
    return make_chart(
        "throughput",
        draw,
        title="Throughput",
        unit="output tokens/s",
        alt=f"Output tokens a second. {alt}.",
        legend=legend,
        points=points,
    )


def _goodput_chart(grid: _Grid) -> Chart:
    """The share of good requests against the load, and the line under which a server is saturated."""
    shares = {id(cell): math.nan if cell.goodput is None else 100 * cell.goodput for cell in grid.cells}

    def draw(axes: Any) -> None:
        for place, length in enumerate(grid.lengths):
            row = grid.row(length)
            at, good = [grid.place(cell) for cell in row], [shares[id(cell)] for cell in row]
            _draw_line(axes, place, at, good)
            _ring(axes, row, at, good, place)
        axes.axhline(100 * ENOUGH, color=COLORS["muted"], linewidth=1.2, linestyle=(0, (1, 2)))
        axes.set_ylim(-3, 104)
        _write_loads(axes, grid)

    def words(cell: BenchCell) -> str:
        return f"{_where(cell)}: {percent(math.nan if cell.goodput is None else cell.goodput)} good"

    return make_chart(
        "goodput",
        draw,
        title="Goodput",
        unit="% of requests within the SLO",
        alt=f"Share of requests within the SLO. {_list(grid, words)}.",
        legend=[*_legend(grid), ("muted", "dots", "saturated below 95 %")],
        points=[(grid.place(cell), shares[id(cell)], words(cell)) for cell in grid.ordered()],
    )


def _latency_chart(grid: _Grid, name: str, title: str, of: Callable[[BenchCell], Percentiles]) -> Chart:
    """Milliseconds against the load: p50 as a mark on a line.

    For few lengths, from there a bar to p90 and a thin one to p99.
    """
    ranges = len(grid.lengths) <= _MOST_RANGES
    values = [value for cell in grid.cells for value in (of(cell).p50, of(cell).p99 if ranges else of(cell).p50)]
    log = spans_decades(values, decades=1.3)
    shift = {
        length: 0.11 * (place - (len(grid.lengths) - 1) / 2) if ranges else 0.0
        for place, length in enumerate(grid.lengths)
    }

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for place, length in enumerate(grid.lengths):
            row = grid.row(length)
            at = [grid.place(cell) + shift[length] for cell in row]
            color, numbers = COLORS[SERIES[place % 6]], [of(cell) for cell in row]
            middle, high, top = [n.p50 for n in numbers], [n.p90 for n in numbers], [n.p99 for n in numbers]
            if ranges:
                axes.vlines(at, high, top, color=color, linewidth=1.3)
                axes.vlines(at, middle, high, color=color, linewidth=4, alpha=0.55)
            _draw_line(axes, place, at, middle)
            _ring(axes, row, at, middle, place)
        if not log:
            axes.set_ylim(bottom=0)
        _write_loads(axes, grid, log=log)

    def words(cell: BenchCell) -> str:
        numbers = of(cell)
        return f"{_where(cell)}: p50 {decimal(numbers.p50)}, p90 {decimal(numbers.p90)}, p99 {decimal(numbers.p99)} ms"

    alt = _list(grid, lambda cell: f"{_where(cell)}: {decimal(of(cell).p50)}")
    return make_chart(
        name,
        draw,
        title=title,
        unit=f"{'ms' if ranges else 'p50, ms'}{', log scale' if log else ''}",
        alt=f"{title}, p50 in ms. {alt}.",
        legend=[*_legend(grid), *([("muted", "range", "p50 to p90, p99")] if ranges else [])],
        points=[(grid.place(cell) + shift[cell.input_tokens], of(cell).p50, words(cell)) for cell in grid.ordered()],
    )


def _draw_line(axes: Any, place: int, x: Sequence[float], y: Sequence[float]) -> None:
    """A length's line; told apart by its marks as well as by its color."""
    mark = {"marker": MARKERS[place % 6], "markersize": 6.5, "markeredgecolor": COLORS["paper"]}
    axes.plot(x, y, color=COLORS[SERIES[place % 6]], zorder=3, **mark)


def _ring(axes: Any, row: Sequence[BenchCell], x: Sequence[float], y: Sequence[float], place: int) -> None:
    """A ring round each cell of the length whose server was saturated."""
    over = [number for number, cell in enumerate(row) if cell.goodput is not None and cell.goodput < ENOUGH]
    style = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.4, "linestyle": "none"}
    if over:
        edge = COLORS[SERIES[place % 6]]
        axes.plot([x[i] for i in over], [y[i] for i in over], "o", markeredgecolor=edge, zorder=4, **style)


def _write_loads(axes: Any, grid: _Grid, *, log: bool = False) -> None:
    """One place for each load, named as it was asked for."""
    names = [
        f"{value:g}" if math.isfinite(value) else "burst" if math.isinf(most) else f"{most:g}"
        for value, most in grid.loads
    ]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.45, len(names) - 0.55)
    axes.set_xlabel("requests at once" if grid.at_once else "requests/s asked for")
    write_ticks(axes, log=log)


def _legend(grid: _Grid) -> list[tuple[str, str, str]]:
    legend = [
        (SERIES[place % 6], f"line m{place % 6}", f"{count(length)} tokens in")
        for place, length in enumerate(grid.lengths)
    ]
    saturated = any(cell.goodput is not None and cell.goodput < ENOUGH for cell in grid.cells)
    return [*legend, *([("muted", "ring", "saturated: under 95 % good")] if saturated else [])]


def _where(cell: BenchCell) -> str:
    return f"{count(cell.input_tokens)} in at {rate(cell.request_rate, cell.max_concurrency)}"


def _trade_words(cell: BenchCell) -> str:
    return f"{_where(cell)}: {decimal(cell.output_tokens_per_s)} tokens/s, TTFT p50 {decimal(cell.ttft_ms.p50)} ms"


def _list(grid: _Grid, words: Callable[[BenchCell], str]) -> str:
    return "; ".join(words(cell) for cell in grid.ordered())


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
            axes.plot(steps, losses, color=COLORS[SERIES[comparison.sides.index(side) % 6]])
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
    """The two sides of a pair by their places among all, which give them their colors."""
    return {place: side for place, side in enumerate(comparison.sides) if side.name in (pair.first, pair.other)}


def _bars(both: dict[int, Side], name: str, title: str, unit: str, of: Any, *, log: bool = False) -> Chart | None:
    (first, other), colors = both.values(), [SERIES[place % 6] for place in both]
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
                axes.barh(at, value, height=0.34, color=COLORS[colors[side]])
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
        legend=tuple((colors[at], "block", side.name) for at, side in enumerate((first, other))),
    )


def cost_chart(curve: Curve, names: tuple[str, str], basis: str = "", *, places: tuple[int, int] = (0, 1)) -> Chart:
    """Dollars of training and N hours of serving, and where the two cost the same.

    `places`: of the two among all sides, for their colors.
    """
    even = curve.break_even_hours
    last = min(_MOST_HOURS, max(_LEAST_HOURS, 1.6 * even)) if even is not None else _LEAST_HOURS
    shown = even is not None and even < last
    colors = [SERIES[place % 6] for place in places]

    def draw(axes: Any) -> None:
        ends = curve.usd(0), curve.usd(last)
        for side in (0, 1):
            axes.plot([0, last], [end[side] for end in ends], color=COLORS[colors[side]])
            mark: dict[str, Any] = {"marker": MARKERS[side], "markersize": 6, "linestyle": "none"}
            axes.plot([0], [ends[0][side]], color=COLORS[colors[side]], clip_on=False, **mark)
        if shown and even is not None:
            axes.axvline(even, color=COLORS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlim(0, last)
        axes.set_ylim(0, 1.08 * max(ends[1]) or 1)
        axes.set_xlabel("hours of serving")
        write_ticks(axes, log=False)

    legend = tuple((color, "line", name) for color, name in zip(colors, names, strict=True))
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
