"""What a chart is to the page, and what all charts have in common."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.report import drawing

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
    """Name of the colour's variable, kind of mark (line, thin, dash, dots, range, ring), words."""
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
    height: int = drawing.HEIGHT,
    rows: bool = False,
) -> Chart:
    """The chart that `draw` draws on its axes; points that are not finite are nowhere on it."""
    points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    drawn = drawing.draw_chart(name, draw, height=height, points=[(x, y) for x, y, _ in points])
    placed = [[round(x), round(y), words] for (x, y), (_, _, words) in zip(drawn.places, points, strict=True)]
    return Chart(
        name=name,
        title=title,
        unit=unit,
        svg=drawn.svg,
        alt=alt,
        legend=tuple(legend),
        rows=rows,
        points=json.dumps(placed, ensure_ascii=False, separators=(",", ":")),
    )


def spans_decades(values: Sequence[float], decades: float = 2.0) -> bool:
    """Whether the values are all positive and spread so far that a linear axis would hide most of them."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > decades
