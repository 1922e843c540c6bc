"""What came out of a run, as a table for the terminal. From the records alone, like the page.

A comparison for the terminal, as Markdown and as CSV.
"""

import csv
import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from gemsmith.analysis.compare import Comparison, Pair
from gemsmith.analysis.published import Reanalysis
from gemsmith.analysis.ratios import Ratio
from gemsmith.analysis.summary import (
    RunRecords,
    cheapest_machine,
    count_checks,
    fastest_cell,
    find_notices,
    middle_cell,
    read_findings,
    saturation_lines,
    stage_s,
    total_s,
    verdict,
)
from gemsmith.report import comparison_words as words
from gemsmith.runs.run import Run
from gemsmith.system import format as numbers
from gemsmith.system.console import open_console


def print_summary(run: Run) -> None:
    """Prints the table, what a reader must know before its numbers, and where the report is, on stdout."""
    console = open_console(stderr=False, soft_wrap=False)
    console.print(summary_table(run))
    for notice in find_notices(read_findings(run)):
        mark = ("warning: ", "bold red") if notice.critical else ("notice: ", "yellow")
        console.print(Text.assemble(mark, notice.text), soft_wrap=True)
    if run.report.exists():
        console.print(Text(str(run.report)), soft_wrap=True)


def summary_table(run: Run) -> Table:
    """Stage, its time, what, value: one line for each thing that came out; a stage without a record says so."""
    findings = read_findings(run)
    records = findings.records()
    table = Table(
        title=Text(f"What came out of {run.path.name}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("stage", style="bold", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("what")
    table.add_column("value")
    for stage, lines in _LINES.items():
        if stage not in records:
            table.add_row(
                stage, "", Text("no record" if stage in findings.problems else "left out", style="yellow"), ""
            )
            continue
        time = numbers.duration(stage_s(records[stage]))
        for number, (what, value, style) in enumerate(lines(findings)):
            table.add_row("" if number else stage, "" if number else time, Text(what), Text(value, style=style))
    table.add_row("all", numbers.duration(total_s(findings)), "", "")
    return table


def _plan_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.plan
    fits = ", ".join(machine.name for machine in findings.plan.machines if machine.fits) or "none"
    yield "fits, estimated", fits, ""
    cheapest = cheapest_machine(findings.plan)
    if cheapest and cheapest.usd:
        cost = numbers.span(numbers.usd(cheapest.usd[0]), numbers.usd(cheapest.usd[1]))
        yield "cost, estimated", f"{cost}: {findings.plan.priced} on {cheapest.name}", ""


def _data_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.data
    dropped = sum(findings.data.dropped.values())
    yield "rows", f"{numbers.count(findings.data.rows)}, {numbers.count(dropped)} dropped", ""
    if findings.data.ignored_columns:
        yield "columns ignored", ", ".join(findings.data.ignored_columns), ""
    yield "packing efficiency", numbers.percent(findings.data.packing_efficiency), ""


def _train_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.train
    train = findings.train
    if train.steps:
        first, last = train.steps[0], train.steps[-1]
        yield (
            "loss",
            f"{numbers.decimal(first.loss)} → {numbers.decimal(last.loss)} in {numbers.count(last.step)} steps",
            "",
        )
    yield "real tokens/s", numbers.decimal(train.real_tokens_per_s), ""
    adapted = ", ".join(f"{kind} {count}" for kind, count in train.adapted.items())
    yield "adapted modules", f"{numbers.count(sum(train.adapted.values()))} ({adapted})", ""


def _export_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.export
    export = findings.export
    total = numbers.size(sum(file.bytes for file in export.merged))
    yield (
        "merged",
        f"{total}, {numbers.count(export.merged_tensors)} tensors merged, "
        f"{numbers.count(export.copied_tensors)} copied",
        "",
    )


def _verify_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.verify
    verify = findings.verify
    failed = [check.name for check in verify.checks if check.passed is False]
    value = count_checks(verify) + (f": {', '.join(failed)}" if failed else "")
    yield "checks", value, "green" if verify.passed else "bold red"


def _serve_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.serve
    yield "vLLM", f"{findings.serve.vllm}, ready after {numbers.duration(findings.serve.start_s)}", ""


def _bench_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.bench
    middle, fastest = middle_cell(findings.bench), fastest_cell(findings.bench)
    if middle is None or fastest is None:
        yield "requests", "none completed", "bold red"
        return
    where = f"({numbers.count(middle.input_tokens)} in, {numbers.rate(middle.request_rate, middle.max_concurrency)})"
    yield "TTFT p50", f"{numbers.decimal(middle.ttft_ms.p50)} ms {where}", ""
    yield "TPOT p50", f"{numbers.decimal(middle.tpot_ms.p50)} ms {where}", ""
    where = f"({numbers.count(fastest.input_tokens)} in, {numbers.rate(fastest.request_rate, fastest.max_concurrency)})"
    yield "output tokens/s", f"{numbers.decimal(fastest.output_tokens_per_s)} {where}", ""
    if seen := findings.bench.images:
        asked = f"{numbers.decimal(seen.images_per_request)} a request, {numbers.decimal(seen.soft_tokens)} soft tokens"
        yield "images", asked, ""
    for line in saturation_lines(findings.bench):
        yield "saturates with", line, ""
    if failed := sum(cell.failed for cell in findings.bench.cells):
        yield "failed requests", numbers.count(failed), "bold red"
    if cut := sum(cell.cut for cell in findings.bench.cells):
        yield "requests that ended early", numbers.count(cut), "bold red"


def _eval_lines(findings: RunRecords) -> Iterator[tuple[str, str, str]]:
    assert findings.eval
    for name, score in (("base", findings.eval.base), ("tuned", findings.eval.tuned)):
        interval = f"{numbers.fraction(score.low)}–{numbers.fraction(score.high)}"
        yield f"{name} score, 95 %", f"{numbers.fraction(score.score)} ({interval}, n = {numbers.count(score.n)})", ""
        for what, rows in (("without answer", score.failed), ("without verdict", score.ungraded)):
            if rows:
                reasons = ", ".join(f"{numbers.count(count)} {reason}" for reason, count in rows.items())
                yield f"{name} rows {what}", f"{numbers.count(sum(rows.values()))} ({reasons})", "bold red"
    if findings.eval.p_value is not None or findings.eval.tasks:
        yield "verdict", verdict(findings.eval), ""
    for result in findings.eval.tasks:
        for name, model in (("base", result.base), ("tuned", result.tuned)):
            if model.pass_at:
                passes = ", ".join(f"pass@{each.k} {numbers.fraction(each.score)}" for each in model.pass_at)
                yield f"{result.task}, {name}", f"{passes} over {numbers.count(len(model.problems))} problems", ""
    for result in findings.eval.tasks[1:]:
        yield f"{result.task}, verdict", result.difference.summary, ""


_LINES = {
    "plan": _plan_lines,
    "data": _data_lines,
    "train": _train_lines,
    "export": _export_lines,
    "verify": _verify_lines,
    "serve": _serve_lines,
    "bench": _bench_lines,
    "eval": _eval_lines,
}

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
    console.print(Text(words.summary_line(comparison)), soft_wrap=True)
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
    for notice in comparison.warnings:
        console.print(Text.assemble(("notice: ", "yellow"), notice), soft_wrap=True)


def print_verdicts(redrawn: Reanalysis) -> None:
    """What its claims come to, on stdout."""
    console = open_console(stderr=False, soft_wrap=False)
    console.print(_table(f"What {redrawn.title} says, and what its own figures say", VERDICTS, _verdict_rows(redrawn)))
    names = [side.name for side in redrawn.comparison.sides[:2]]
    console.print(_table("What else it reports", ("", *names), _figure_rows(redrawn)))
    for curve in redrawn.at_catalog:
        console.print(Text(f"At the catalog's prices, {curve.way}: {curve.say(*names)}"), soft_wrap=True)


def curve_lines(pair: Pair) -> list[str]:
    """What training and serving cost over time, a line for each way of buying."""
    return [f"Training and serving, {curve.way}: {curve.say(pair.first, pair.other)}" for curve in pair.curves]


def markdown_of(comparison: Comparison, redrawn: Reanalysis | None = None) -> str:
    """The same as Markdown, for an issue or a README."""
    names = [side.name for side in comparison.sides]
    lines = [f"# {words.title(comparison)}", "", words.summary_line(comparison), ""]
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
            [f"At the catalog's prices, {way.way}: {way.say(*names[:2])}" for way in redrawn.at_catalog]
        )
    lines += _markdown_list(comparison.warnings)
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


def _verdict_rows(redrawn: Reanalysis) -> list[tuple[str, ...]]:
    return [("holds" if each.holds else "does not hold", each.of, each.claim, each.found) for each in redrawn.verdicts]


def _figure_rows(redrawn: Reanalysis) -> list[tuple[str, ...]]:
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
