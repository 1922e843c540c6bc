"""Charts of a page as SVG: text stays text, colors are CSS variables; the same numbers give the same bytes."""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemsmith.system.format import count

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
# In units of the SVG. On a phone it is drawn at four fifths, on a desk at six fifths of this; the text is readable at
# both.
WIDTH, HEIGHT = 440, 236
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
_STYLE = Path(__file__).parent / "templates" / "charts.mplstyle"


def write_ticks(axes: Any, *, log: bool, whole_x: bool = False) -> None:
    from matplotlib import ticker

    # Wrapped in a function of any value: a log axis would otherwise write powers in mathematical type, which needs its
    # own fonts.
    write = ticker.FuncFormatter(lambda value, _: _tick(value))
    axes.yaxis.set_major_formatter(write)
    if log:
        low, high = axes.get_ylim()
        wide = math.log10(high / low) > 3
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5))
    if whole_x:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(write)


def _tick(value: float) -> str:
    """A tick without zeros that say nothing: 0.5, 1,200, 2e-5."""
    if abs(value) >= 1000:
        return count(value)
    text = f"{value:.3e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    mantissa, _, exponent = text.partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if exponent else text


def draw_chart(
    name: str, draw: Callable[[Any], None], *, height: int = HEIGHT, points: Sequence[tuple[float, float]] = ()
) -> tuple[str, list[tuple[float, float]]]:
    """One axes, drawn by `draw`, as an <svg> element to put into a page, and the points in units of its viewBox.

    They are given in units of the axes.
    """
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
    """Matplotlib's SVG file as an element of the page.

    No prologue, no fixed size, no ids but those it refers to, the page's fonts and colors.
    """
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

    def shorten(tag: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0])

    svg = re.sub(r"<[^>]*>", shorten, svg)
    svg = re.sub(r"<defs>\s*</defs>", "", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


Point = tuple[float, float, str]
"""x and y in units of the axes, and what is said of it."""


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
    """Name of the color's variable, kind of mark (line, thin, dash, dots, range, ring), words."""
    rows: bool = False
    """Whether the pointer chooses a point by its height first, as where each row is something else."""
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
    return Chart(
        name=name,
        title=title,
        unit=unit,
        svg=svg,
        alt=alt,
        legend=tuple(legend),
        rows=rows,
        points=json.dumps(placed, ensure_ascii=False, separators=(",", ":")),
    )


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of one color, joined unless `style`, which is Matplotlib's, says otherwise."""

    x: Sequence[float]
    y: Sequence[float]
    color: str
    """The name of its variable; so below."""
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Upright bars behind the lines, each from `low` to `high`."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    color: str
    style: dict[str, Any]


def line_chart(
    name: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_names: Sequence[str] = (),
    x_range: tuple[float, float | None] | None = None,
    y_range: tuple[float, float | None] | None = None,
    bars: Sequence[Bars] = (),
    dashed: Sequence[tuple[float, str]] = (),
    dotted: float | None = None,
    log: bool = False,
    whole_x: bool = False,
    **around: Any,
) -> Chart:
    """Numbers against x, or against places with names.

    `dashed`: x and color of upright lines. `dotted`: the height of a level. `around`: as of `make_chart`.
    """

    def draw(axes: Any) -> None:
        if log:
            axes.set_yscale("log")
        for bar in bars:
            axes.vlines(bar.x, bar.low, bar.high, color=COLORS[bar.color], **bar.style)
        for line in lines:
            axes.plot(line.x, line.y, color=COLORS[line.color], **line.style)
        for at, color in dashed:
            axes.axvline(at, color=COLORS[color], linewidth=1.2, linestyle=DASHED)
        if dotted is not None:
            axes.axhline(dotted, color=COLORS["muted"], linewidth=1.2, linestyle=DOTTED)
        if x_names:
            axes.set_xticks(range(len(x_names)), x_names)
        if x_range is not None:
            axes.set_xlim(*x_range)
        if y_range is not None:
            axes.set_ylim(*y_range)
        axes.set_xlabel(x_label)
        write_ticks(axes, log=log, whole_x=whole_x)

    return make_chart(name, draw, **around)


def spans_decades(values: Sequence[float], decades: float = 2.0) -> bool:
    """Whether the values are all positive and spread so far that a linear axis would hide most of them."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > decades
