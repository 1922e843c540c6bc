"""The load test's charts: latency, throughput and goodput against the load, and throughput against latency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.bench.saturation import ENOUGH
from gemsmith.bench_records import BenchCell, BenchRecord, Percentiles
from gemsmith.report.charts import Chart, make_chart, spans_decades
from gemsmith.report.drawing import COLOURS, MARKERS, SERIES, write_ticks
from gemsmith.report.numbers import count, decimal, percent, rate

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
        axes.plot(range(len(asked)), asked, color=COLOURS["muted"], **dots)
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
        axes.axhline(100 * ENOUGH, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (1, 2)))
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
            colour, numbers = COLOURS[SERIES[place % 6]], [of(cell) for cell in row]
            middle, high, top = [n.p50 for n in numbers], [n.p90 for n in numbers], [n.p99 for n in numbers]
            if ranges:
                axes.vlines(at, high, top, color=colour, linewidth=1.3)
                axes.vlines(at, middle, high, color=colour, linewidth=4, alpha=0.55)
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
    """A length's line; told apart by its marks as well as by its colour."""
    mark = {"marker": MARKERS[place % 6], "markersize": 6.5, "markeredgecolor": COLOURS["paper"]}
    axes.plot(x, y, color=COLOURS[SERIES[place % 6]], zorder=3, **mark)


def _ring(axes: Any, row: Sequence[BenchCell], x: Sequence[float], y: Sequence[float], place: int) -> None:
    """A ring round each cell of the length whose server was saturated."""
    over = [number for number, cell in enumerate(row) if cell.goodput is not None and cell.goodput < ENOUGH]
    style = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.4, "linestyle": "none"}
    if over:
        edge = COLOURS[SERIES[place % 6]]
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
