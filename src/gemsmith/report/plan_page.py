"""The HTML of a plan, and of a sweep of plans: one page that needs nothing but what was planned."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from gemsmith.errors import InputError
from gemsmith.plan.machine import RUNTIME, describe_changes
from gemsmith.plan.stage import SweptPlan
from gemsmith.report.charts import COLORS, MARKERS, SERIES, Chart, Line, Point, line_chart, make_chart
from gemsmith.report.page import Tile, open_environment, render
from gemsmith.report.plan_table import OTHER, PARTS, serving_cost
from gemsmith.report.tables import sweep_table
from gemsmith.runs.plan_records import MachinePlan, PlanRecord, ServingPlan
from gemsmith.runs.records import Range
from gemsmith.system.files import write_text
from gemsmith.system.format import price, rough_hours, span, usd

LEGEND = tuple(dict.fromkeys((words, color) for _, words, color in (*PARTS.values(), OTHER)))
"""What parts of the memory are shown as, and their colors."""


def write_plan(record: PlanRecord, path: Path, *, name: str) -> None:
    """Writes the page of a plan, whole. Raises InputError where it cannot be written there."""
    _write(path, render_plan(record, name=name))


def write_sweep(keys: Sequence[str], found: Sequence[SweptPlan], path: Path, *, name: str) -> None:
    """Writes the page of a sweep over these keys: dollars as charts, all numbers as a table. Raises as `write_plan`."""
    environment = open_environment()
    values = {"name": name, "keys": keys, "charts": sweep_charts(keys, found), "table": sweep_table(keys, found)}
    _write(path, render(environment, "sweep_page.html", **values))


def _write(path: Path, html: str) -> None:
    try:
        write_text(path, html)
    except OSError as error:
        raise InputError(f"--html {path}: cannot be written ({error.strerror or error})") from None


def render_plan(record: PlanRecord, *, name: str) -> str:
    """The page; its machines come in the record's order. The same record gives the same bytes."""
    # By prompts and answers, shortest prompts first; of each the cheapest first.
    serving: dict[str, list[ServingPlan]] = {}
    for row in sorted(record.serving, key=lambda row: (row.input_tokens, row.output_tokens, serving_cost(row))):
        if row.fits:
            serving.setdefault(row.load, []).append(row)
    return render(
        open_environment(),
        "plan_page.html",
        plan=record,
        name=name,
        tiles=_tiles(record),
        bars={machine.name: bar_of(machine) for machine in record.machines},
        legend=LEGEND,
        charts=[chart for chart in (_range_chart(record, "usd"), _range_chart(record, "hours")) if chart],
        serving=serving,
        describe_changes=describe_changes,
    )


def bar_of(machine: MachinePlan) -> tuple[list[tuple[str, str, float]], float]:
    """The memory by what it is for: what, color, share; parts that are shown alike put together, the runtime last.

    Shares are of the bar's width: the chip's memory, or what is needed where that is more. Then where the memory ends.
    """
    runtime = PARTS[RUNTIME][1:]
    sizes = dict.fromkeys((*(shown for shown in LEGEND if shown != runtime), runtime), 0)
    for part, size in machine.parts.items():
        sizes[PARTS.get(part, OTHER)[1:]] += size
    limit = machine.hbm_limit_bytes_per_chip
    whole = max(limit, sum(sizes.values()), 1)
    return [(words, color, size / whole) for (words, color), size in sizes.items() if size], limit / whole


def _tiles(record: PlanRecord) -> list[Tile]:
    fitting = [machine for machine in record.machines if machine.fits]
    tiles = []
    for question, of, write, none in (
        ("Cheapest", "usd", usd, "no machine that fits has a price"),
        ("Fastest", "hours", rough_hours, "no machine fits"),
    ):
        known = [(ends, machine.name) for machine in fitting if (ends := getattr(machine, of)) and ends[1] > 0]
        ends, name = min(known, key=lambda each: each[0][1], default=(None, None))
        line = f"{record.priced} on {name}" if name else none
        tiles.append(Tile(question=question, answer=ends and span(*map(write, ends)), lines=(line,)))
    count = f"{len(fitting)} of {len(record.machines)}"
    return [*tiles, Tile(question="Machines that fit", answer=count, lines=("the recipe as it is",))]


def _range_chart(record: PlanRecord, of: Literal["usd", "hours"]) -> Chart | None:
    """The range on each machine, on a log scale, so that what costs nothing is not on it."""
    title, unit = {"usd": ("Cost", "dollars, on demand"), "hours": ("Time", "hours, with one start")}[of]
    rows = [(machine.name, ends) for machine in record.machines if (ends := getattr(machine, of)) and ends[0] > 0]
    if not rows:
        return None

    def draw(axes: Any) -> None:
        from matplotlib import ticker

        places = range(len(rows))
        axes.hlines(places, [low for _, (low, _) in rows], [high for _, (_, high) in rows], COLORS["s1"], linewidth=6)
        axes.set_yticks(places, [machine for machine, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.3g}"))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    words = [f"{machine} {low:.3g} to {high:.3g}" for machine, (low, high) in rows]
    return make_chart(
        f"plan-{of}",
        draw,
        title=title,
        unit=unit,
        alt=f"{title} in {unit}: {'; '.join(words)}",
        # In the middle of its bar on the log scale.
        points=[((low * high) ** 0.5, place, words[place]) for place, (_, (low, high)) in enumerate(rows)],
        height=46 + 19 * len(rows),  # in units of the SVG, of which a machine takes 19
        rows=True,
    )


def sweep_charts(keys: Sequence[str], found: Sequence[SweptPlan]) -> list[Chart]:
    """Dollars per million tokens against the last key whose values are numbers, else the last key.

    A chart a machine, a line for each choice of the other keys; of one key all in one. What does not fit has no point.
    """
    axis = len(keys) - 1
    for place in range(len(keys)):
        if all(each.values[place].replace(".", "", 1).isdecimal() for each in found):
            axis = place
    values = list(dict.fromkeys(each.values[axis] for each in found))
    charts: dict[str, dict[str, list[tuple[int, Range]]]] = {}
    for each in found:
        others = ", ".join(value for place, value in enumerate(each.values) if place != axis)
        chart, line = (each.machine.name, others) if others else ("all machines", each.machine.name)
        points = charts.setdefault(chart, {}).setdefault(line, [])
        if each.usd_per_million is not None:
            points.append((values.index(each.values[axis]), each.usd_per_million))
    return [_sweep_chart(name, lines, keys[axis], values) for name, lines in charts.items() if any(lines.values())]


def _sweep_chart(name: str, lines: dict[str, list[tuple[int, Range]]], key: str, values: Sequence[str]) -> Chart:
    """The range at each value, and a line through their middles on the log scale."""
    drawn: list[Line] = []
    bars: list[Line] = []
    said: list[Point] = []
    for place, (line, points) in enumerate(lines.items()):
        if points:
            color, style = SERIES[place % len(SERIES)], {"marker": MARKERS[place % len(MARKERS)], "markersize": 5}
            at, low, high = zip(*((at, *ends) for at, ends in points), strict=True)
            middle = [(one * other) ** 0.5 for one, other in zip(low, high, strict=True)]
            drawn.append(Line(x=at, y=middle, color=color, style=style, words=line))
            bars.append(Line(x=at, y=high, low=low, color=color, style={"linewidth": 3, "alpha": 0.3}))
            words = (f"{line}, {values[each]}: {span(*map(price, ends))}" for each, ends in points)
            said += zip(at, middle, words, strict=True)
    return line_chart(
        f"sweep-{name}",
        [*bars, *drawn],
        x_label=key,
        x_names=values,
        x_range=(-0.5, len(values) - 0.5),
        log=True,
        title=name,
        unit="dollars per million tokens, log scale; low to high",
        alt=f"Dollars per million tokens on {name}: {'; '.join(words for *_, words in said)}",
        points=said,
    )
