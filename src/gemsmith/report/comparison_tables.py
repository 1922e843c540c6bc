"""A comparison for the terminal, as Markdown and as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from gemsmith.compare.comparison import Comparison, Pair
from gemsmith.compare.published import Redrawn
from gemsmith.compare.ratios import Ratio
from gemsmith.report import comparison_words as words
from gemsmith.terminal import open_console

VERDICTS = ("", "version", "says", "found")
CSV_COLUMNS = (
    "row",
    "kind",
    "what",
    "unit",
    "first",
    "other",
    "first_value",
    "other_value",
    "value",
    "low",
    "high",
    "interval_of",
    "headline",
    "confounded_by",
    "notes",
)


def print_comparison(comparison: Comparison) -> None:
    """Differences, ratios and curves on stdout."""
    console = open_console(stderr=False, soft_wrap=False)
    names = [side.name for side in comparison.sides]
    console.print(Text(words.lede(comparison)), soft_wrap=True)
    rows = [
        (each.condition, *map(words.condition_value, each.values), words.effect(each))
        for each in comparison.differences
    ]
    console.print(_table("What differs", ("condition", *names, "bears on"), rows))
    for pair in comparison.pairs:
        for group in words.groups(pair):
            header = ("what", pair.first, pair.other, words.column(group.ratios[0]), "95 % interval")
            cells = [_cells(ratio) for ratio in group.ratios]
            console.print(_table(f"{group.kind}: {pair.other} against {pair.first}", header, cells))
            if group.confounded_by:
                console.print(Text(f"confounded by {', '.join(group.confounded_by)}", style="yellow"), soft_wrap=True)
        for line in (*pair.refused, *curve_lines(pair)):
            console.print(Text(line), soft_wrap=True)
    for notice in comparison.notices:
        console.print(Text.assemble(("notice: ", "yellow"), notice), soft_wrap=True)


def print_verdicts(redrawn: Redrawn) -> None:
    """What its claims come to, on stdout."""
    console = open_console(stderr=False, soft_wrap=False)
    console.print(_table(f"What {redrawn.title} says, and what its own figures say", VERDICTS, _verdict_rows(redrawn)))
    names = [side.name for side in redrawn.comparison.sides[:2]]
    console.print(_table("What else it reports", ("", *names), _figure_rows(redrawn)))
    for curve in redrawn.at_catalogue:
        console.print(Text(f"At the catalogue's prices, {curve.way}: {curve.say(*names)}"), soft_wrap=True)


def curve_lines(pair: Pair) -> list[str]:
    """What training and serving cost over time, a line for each way of buying."""
    return [f"Training and serving, {curve.way}: {curve.say(pair.first, pair.other)}" for curve in pair.curves]


def markdown_of(comparison: Comparison, redrawn: Redrawn | None = None) -> str:
    """The same as Markdown, for an issue or a README."""
    names = [side.name for side in comparison.sides]
    lines = [f"# {words.title(comparison)}", "", words.lede(comparison), ""]
    rows = [
        (f"`{each.condition}`", *map(words.condition_value, each.values), words.effect(each))
        for each in comparison.differences
    ]
    lines += _markdown_table(("condition", *names, "bears on"), rows)
    for pair in comparison.pairs:
        lines += [f"## {pair.other} against {pair.first}", ""]
        for group in words.groups(pair):
            header = (group.kind, pair.first, pair.other, words.column(group.ratios[0]), "95 % interval")
            lines += _markdown_table(header, [_cells(ratio) for ratio in group.ratios])
            confounds = ", ".join(f"`{name}`" for name in group.confounded_by)
            lines += [f"Confounded by {confounds}." if confounds else "Nothing that is recorded confounds these.", ""]
        lines += _markdown_list([*pair.refused, *curve_lines(pair)])
    if redrawn is not None:
        lines += [f"## What {redrawn.title} says, and what its own figures say", ""]
        lines += _markdown_table(VERDICTS, _verdict_rows(redrawn))
        lines += ["What else it reports:", "", *_markdown_table(("", *names[:2]), _figure_rows(redrawn))]
        lines += _markdown_list(
            [f"At the catalogue's prices, {way.way}: {way.say(*names[:2])}" for way in redrawn.at_catalogue]
        )
    lines += _markdown_list(comparison.notices)
    return "\n".join(lines).rstrip() + "\n"


def csv_of(comparison: Comparison) -> str:
    """A line for each difference of each pair's sides and for each ratio, whole numbers as they are."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_rows(comparison))
    return file.getvalue()


def _csv_rows(comparison: Comparison) -> Iterator[dict[str, object]]:
    first = comparison.sides[0].name
    for each in comparison.differences:
        for number, side in enumerate(comparison.sides[1:], 1):
            yield {
                "row": "difference",
                "what": each.condition,
                "first": first,
                "other": side.name,
                "first_value": words.condition_value(each.values[0]),
                "other_value": words.condition_value(each.values[number]),
                "notes": words.effect(each),
            }
    for pair in comparison.pairs:
        for ratio in pair.ratios:
            low, high = ratio.interval or ("", "")
            yield {
                "row": "difference of scores" if ratio.is_difference else "ratio",
                "kind": ratio.kind,
                "what": ratio.what,
                "unit": ratio.unit,
                "first": pair.first,
                "other": pair.other,
                "first_value": ratio.first,
                "other_value": ratio.other,
                "value": ratio.value,
                "low": low,
                "high": high,
                "interval_of": ratio.interval_of,
                "headline": ratio.is_headline,
                "confounded_by": " ".join(ratio.confounded_by),
                "notes": "; ".join(ratio.notes),
            }


def _cells(ratio: Ratio) -> tuple[str, ...]:
    notes = f" ({'; '.join(ratio.notes)})" if ratio.notes else ""
    return (
        f"{ratio.what}, {ratio.unit}{notes}",
        words.ratio_value(ratio, ratio.first),
        words.ratio_value(ratio, ratio.other),
        words.ratio_words(ratio),
        words.interval_words(ratio),
    )


def _verdict_rows(redrawn: Redrawn) -> list[tuple[str, ...]]:
    return [("holds" if each.holds else "does not hold", each.of, each.claim, each.found) for each in redrawn.verdicts]


def _figure_rows(redrawn: Redrawn) -> list[tuple[str, ...]]:
    return [(what, *(value or "–" for value in both)) for what, both in redrawn.figures.items()]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    written = [_markdown_row(header), "|" + "---|" * len(header), *map(_markdown_row, rows)]
    return [*written, ""]


def _markdown_list(items: Sequence[str]) -> list[str]:
    return [*(f"- {item}" for item in items), ""] if items else []


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
