"""Tables: the results of a run, and a comparison; rows made once, for the terminal, Markdown and CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from gemsmith.analysis import summary
from gemsmith.analysis.compare import Comparison, Pair
from gemsmith.analysis.published import Reanalysis
from gemsmith.plan.mesh import USABLE_SHARE
from gemsmith.plan.stage import SweptPlan
from gemsmith.report import comparison_page as words
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import DataRecord, ExportRecord, ServeRecord, TrainRecord, VerifyRecord
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES
from gemsmith.system.console import open_console
from gemsmith.system.format import count, counts, decimal, duration, fraction, interval, percent, price, size, span, usd

_Lines = Iterator[tuple[str, ...]]  # what, its value, and where it is not plain, the style of that


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows of plain text; what is not plain on the terminal is a Text of Rich."""

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    right: Sequence[str] = ()  # columns of numbers
    whole: Sequence[str] = ()  # columns whose cells stay on one line

    def to_rich(self) -> RichTable:
        title = Text(self.title) if self.title else None
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for name in self.columns:
            table.add_column(
                Text(name),
                justify="right" if name in self.right else "left",
                overflow="fold",
                no_wrap=name in self.whole,
            )
        for row in self.rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        return table

    def to_markdown(self) -> list[str]:
        """Its lines, and an empty one."""
        rows = [
            [str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in row]
            for row in (self.columns, *self.rows)
        ]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return [lines[0], "|" + "---|" * len(self.columns), *lines[1:], ""]

    def to_csv(self) -> str:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])
        return file.getvalue()


def print_summary(run: Run) -> None:
    """Prints the table, what a reader must know before its numbers, and where the report is, on stdout."""
    console = open_console(stderr=False, soft_wrap=False)
    console.print(summary_table(run).to_rich())
    for notice in summary.find_notices(summary.read_findings(run)):
        if notice.text in run.told:
            continue
        mark = ("critical: ", "bold red") if notice.critical else ("warning: ", "yellow")
        console.print(Text.assemble(mark, notice.text), soft_wrap=True)
    if run.report.exists():
        console.print(f"report: {run.report}", soft_wrap=True)
    if run.record_file("export").exists():
        console.print(f"next: gemsmith chat {run.path}", soft_wrap=True)


def summary_table(run: Run) -> Table:
    """Stage, its time, what, value: one line for each thing that came out; a stage without a record says so."""
    findings = summary.read_findings(run)
    records = findings.records()
    rows: list[list[str | Text]] = []
    for stage in STAGES:
        name = Text(stage, style="bold")
        if stage not in records:
            rows.append([name, "", Text("no record" if stage in findings.problems else "left out", style="yellow"), ""])
            continue
        for number, (what, value, *style) in enumerate(_lines(records[stage])):
            start = ["", ""] if number else [name, duration(summary.stage_s(records[stage]))]
            rows.append([*start, what, Text(value, style="".join(style))])
    rows.append([Text("all", style="bold"), duration(summary.total_s(findings)), "", ""])
    title, columns = f"Results of {run.path.name}", ("stage", "time", "what", "value")
    return Table(title=title, columns=columns, rows=rows, right=("time",), whole=("stage", "time"))


def _lines(record: Any) -> _Lines:
    match record:
        case PlanRecord():
            yield "fits, estimated", ", ".join(machine.name for machine in record.machines if machine.fits) or "none"
            if (cheapest := summary.cheapest_machine(record)) and cheapest.usd:
                yield "cost, estimated", f"{span(*map(usd, cheapest.usd))}: {record.priced} on {cheapest.name}"
        case DataRecord():
            held_out = record.dropped.get("held_out", 0)
            apart = f", {count(held_out)} held out" if held_out else ""
            yield "rows", f"{count(record.rows)}{apart}, {count(sum(record.dropped.values()) - held_out)} left out"
            if record.ignored_columns:
                yield "columns ignored", ", ".join(record.ignored_columns)
            yield "packing efficiency", percent(record.packing_efficiency)
        case TrainRecord():
            if record.steps:
                first, last = record.steps[0], record.steps[-1]
                early = ", ended early" if record.early_stop else ""
                yield "loss", f"{decimal(first.loss)} → {decimal(last.loss)} in {count(last.step)} steps{early}"
            if record.evaluations:
                yield "held-out loss", summary.held_out_words(record)
                yield "held-out token accuracy", percent(record.evaluations[-1].token_accuracy)
            yield "real tokens/s", decimal(record.real_tokens_per_s)
            adapted = ", ".join(f"{kind} {modules}" for kind, modules in record.adapted.items())
            modules = f"{count(sum(record.adapted.values()))} ({adapted})"
            yield "adapted modules", modules if adapted else "none: the weights themselves are trained"
        case ExportRecord():
            copied = f"{count(record.merged_tensors)} tensors merged, {count(record.copied_tensors)} copied"
            yield "merged", f"{size(sum(file.bytes for file in record.merged))}, {copied}"
        case VerifyRecord():
            failed = [check.name for check in record.checks if check.passed is False]
            value = summary.count_checks(record) + (f": {', '.join(failed)}" if failed else "")
            yield "checks", value, "green" if record.passed else "bold red"
        case ServeRecord():
            yield "vLLM", f"{record.vllm}, ready after {duration(record.start_s)}"
        case BenchRecord():
            yield from _bench_lines(record)
        case EvalRecord():
            yield from _eval_lines(record)


def _bench_lines(bench: BenchRecord) -> _Lines:
    middle, fastest = summary.middle_cell(bench), summary.fastest_cell(bench.cells)
    if middle is None or fastest is None:
        yield "requests", "none completed", "bold red"
        return
    yield "TTFT p50", f"{decimal(middle.ttft_ms.p50)} ms ({summary.load_words(middle)})"
    yield "TPOT p50", f"{decimal(middle.tpot_ms.p50)} ms ({summary.load_words(middle)})"
    yield "output tokens/s", f"{decimal(fastest.output_tokens_per_s)} ({summary.load_words(fastest)})"
    if seen := bench.images:
        yield "images", f"{decimal(seen.images_per_request)} a request, {decimal(seen.soft_tokens)} soft tokens"
    for line in summary.saturation_lines(bench):
        yield "saturates with", line
    if failed := sum(cell.failed for cell in bench.cells):
        yield "failed requests", count(failed), "bold red"
    if cut := sum(cell.cut for cell in bench.cells):
        yield "requests that ended early", count(cut), "bold red"


def _eval_lines(scores: EvalRecord) -> _Lines:
    for name, score in (("base", scores.base), ("tuned", scores.tuned)):
        ends = interval(score.low, score.high)
        yield f"{name} score, 95 %", f"{fraction(score.score)} ({ends}, n = {count(score.n)})"
        for what, rows in (("without answer", score.failed), ("without verdict", score.ungraded)):
            if rows:
                yield f"{name} rows {what}", f"{count(sum(rows.values()))} ({counts(rows)})", "bold red"
    for number, result in enumerate(scores.tasks):
        yield f"{result.task}, verdict" if number else "verdict", result.difference.summary
        for name, model in (("base", result.base), ("tuned", result.tuned)):
            if model.pass_at:
                passes = ", ".join(f"pass@{each.k} {fraction(each.score)}" for each in model.pass_at)
                yield f"{result.task}, {name}", f"{passes} over {count(len(model.problems))} problems"


def sweep_table(keys: Sequence[str], found: Sequence[SweptPlan]) -> Table:
    """A line for each machine under each choice of values; what does not fit says how much is missing."""
    rows = []
    for each in found:
        machine = each.machine
        limit = f"{machine.hbm_bytes_per_chip / 2**30:.1f} of {machine.hbm_limit_bytes_per_chip / 2**30:.1f}"
        step = "–" if not machine.fits else span(*map(decimal, machine.step_s))
        rates = "–" if not machine.fits else span(*map(count, each.tokens_per_s))
        cost = "–" if each.usd_per_million is None else span(*map(price, each.usd_per_million))
        rows.append((*each.values, machine.name, "yes" if machine.fits else "no", limit, step, rates, cost))
    columns = (*keys, "machine", "fits", "GiB a chip", "s a step", "tokens/s", "USD/M tokens")
    title = f"Full rows, estimated; {100 * USABLE_SHARE:.0f} % of a chip's memory can be used"
    return Table(title=title, columns=columns, rows=rows, right=columns[-4:], whole=columns)


def sweep_csv(keys: Sequence[str], found: Sequence[SweptPlan]) -> str:
    """The same with plain numbers, low and high in columns of their own."""
    ends = [f"{name}_{end}" for name in ("step_s", "tokens_per_s", "usd_per_million") for end in ("low", "high")]
    rows = []
    for each in found:
        machine = each.machine
        sizes = (machine.hbm_bytes_per_chip, machine.hbm_limit_bytes_per_chip)
        numbers = [f"{value:.5g}" for value in (*machine.step_s, *each.tokens_per_s, *(each.usd_per_million or ()))]
        numbers += [""] * (len(ends) - len(numbers))
        rows.append([*each.values, machine.name, str(machine.fits).lower(), *map(str, sizes), *numbers])
    return Table(columns=(*keys, "machine", "fits", "bytes_per_chip", "limit_bytes", *ends), rows=rows).to_csv()


def print_comparison(comparison: Comparison, redrawn: Reanalysis | None = None) -> None:
    """Differences, ratios and curves on stdout; of a published comparison first what it says of itself."""
    console = open_console(stderr=False, soft_wrap=False)
    if redrawn is not None:
        for table in _published_tables(redrawn):
            console.print(table.to_rich())
        for line in _catalog_lines(redrawn):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(words.summary_line(comparison)), soft_wrap=True)
    console.print(_difference_table(comparison, "{}").to_rich())
    for pair in comparison.pairs:
        for group in words.groups(pair):
            console.print(_ratio_table(pair, group, "what").to_rich())
            if group.confounded_by:
                console.print(Text(f"confounded by {', '.join(group.confounded_by)}", style="yellow"), soft_wrap=True)
        for line in (*pair.refused, *curve_lines(pair)):
            console.print(Text(line), soft_wrap=True)
    for notice in comparison.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), notice), soft_wrap=True)


def curve_lines(pair: Pair) -> list[str]:
    """What training and serving cost over time, a line for each way of buying."""
    return [f"Training and serving, {curve.way}: {curve.say(pair.first, pair.other)}" for curve in pair.curves]


def markdown_of(comparison: Comparison, redrawn: Reanalysis | None = None) -> str:
    """The same as Markdown, for an issue or a README."""
    lines = [f"# {words.title(comparison)}", "", words.summary_line(comparison), ""]
    lines += _difference_table(comparison, "`{}`").to_markdown()
    for pair in comparison.pairs:
        lines += [f"## {pair.other} against {pair.first}", ""]
        for group in words.groups(pair):
            lines += _ratio_table(pair, group, group.kind).to_markdown()
            confounds = ", ".join(f"`{name}`" for name in group.confounded_by)
            lines += [f"Confounded by {confounds}." if confounds else "Nothing that is recorded confounds these.", ""]
        lines += _markdown_list([*pair.refused, *curve_lines(pair)])
    if redrawn is not None:
        verdicts, *others = _published_tables(redrawn)
        lines += [f"## {verdicts.title}", "", *verdicts.to_markdown()]
        for table in others:
            lines += [f"{table.title}:", "", *table.to_markdown()]
        lines += _markdown_list(_catalog_lines(redrawn))
    lines += _markdown_list(comparison.warnings)
    return "\n".join(lines).rstrip() + "\n"


def _markdown_list(items: Sequence[str]) -> list[str]:
    return [*(f"- {item}" for item in items), ""] if items else []


def _difference_table(comparison: Comparison, code: str) -> Table:
    """`code`: how the name of a condition is written."""
    rows = [
        (code.format(each.condition), *map(words.condition_value, each.values), words.effect(each))
        for each in comparison.differences
    ]
    columns = ("condition", *(side.name for side in comparison.sides), "bears on")
    return Table(title="What differs", columns=columns, rows=rows)


def _ratio_table(pair: Pair, group: words.RatioGroup, heading: str) -> Table:
    rows = [
        (
            f"{ratio.what}, {ratio.unit}" + (f" ({'; '.join(ratio.notes)})" if ratio.notes else ""),
            words.ratio_value(ratio, ratio.first),
            words.ratio_value(ratio, ratio.other),
            words.ratio_words(ratio),
            words.interval_words(ratio),
        )
        for ratio in group.ratios
    ]
    columns = (heading, pair.first, pair.other, words.column(group.ratios[0]), "95 % interval")
    return Table(title=f"{group.kind}: {pair.other} against {pair.first}", columns=columns, rows=rows)


def _published_tables(redrawn: Reanalysis) -> tuple[Table, Table, Table]:
    """Its claims; its sweeps and its other figures, with those of runs beside them."""
    sides = redrawn.comparison.sides
    claims = [("holds" if one.holds else "does not hold", one.of, one.claim, one.found) for one in redrawn.verdicts]
    figures = [(what, *(value or "–" for value in both)) for what, both in redrawn.figures.items()]
    swept = [
        (
            f"{count(each.input_tokens)} in, {count(each.output_tokens)} out",
            each.side,
            *("–" if value is None else decimal(value) for value in (each.ttft_ms, each.output_tokens_per_s)),
        )
        for each in redrawn.swept
    ]
    title = f"What {redrawn.title} says, and what its own figures say"
    return (
        Table(title=title, columns=("", "version", "says", "found"), rows=claims),
        Table(title="Its sweeps of rates", columns=words.SWEPT_COLUMNS, rows=swept),
        Table(title="What else it reports", columns=("", *(side.name for side in sides)), rows=figures),
    )


def _catalog_lines(redrawn: Reanalysis) -> list[str]:
    first, other = (side.name for side in redrawn.comparison.sides[:2])
    return [f"At the catalog's prices, {curve.way}: {curve.say(first, other)}" for curve in redrawn.at_catalog]


def csv_of(comparison: Comparison) -> str:
    """A line for each difference of each pair's sides and for each ratio, whole numbers as they are."""
    first, *others = comparison.sides
    rows: list[tuple[Any, ...]] = []
    for each in comparison.differences:
        values = list(map(words.condition_value, each.values))
        for side, value in zip(others, values[1:], strict=True):
            ends = (first.name, side.name, values[0], value)
            rows.append(("difference", "", each.condition, "", *ends, *[""] * 6, words.effect(each)))
    for pair in comparison.pairs:
        for ratio in pair.ratios:
            what = ("difference of scores" if ratio.is_difference else "ratio", ratio.kind, ratio.what, ratio.unit)
            numbers = (ratio.first, ratio.other, ratio.value, *(ratio.interval or ("", "")))
            lists = (" ".join(ratio.confounded_by), "; ".join(ratio.notes))
            rows.append((*what, pair.first, pair.other, *numbers, ratio.interval_of, ratio.is_headline, *lists))
    columns = "row kind what unit first other first_value other_value value low high".split()
    columns += ["interval_of", "headline", "confounded_by", "notes"]
    return Table(columns=columns, rows=rows).to_csv()
