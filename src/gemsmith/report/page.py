"""The page of a run from its records, one file: did it work, how good, how fast, what did it cost; the sections."""

import base64
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemsmith.system.format as formats
from gemsmith.analysis import summary
from gemsmith.analysis.cost import ActualCost, actual_cost, why_no_cost
from gemsmith.analysis.summary import RunRecords
from gemsmith.errors import MachineError
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES
from gemsmith.system.files import write_text
from gemsmith.system.format import count, decimal, duration, fraction, interval, p_value, price, signed, span, usd

_FOLDER = Path(__file__).parent / "templates"
# Control characters as images, some of which HTML forbids; and as their names those that turn the order of letters, by
# which a text would show itself, or what follows it, as something that it is not.
_PRINTED = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
_PRINTED |= {code: f"[U+{code:04X}]" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A question with its answer; `answer` None: no record says, and `lines` tell which is missing."""

    question: str
    answer: str | None
    lines: tuple[str, ...]
    before: str | None = None  # what it was at first, where the answer is a change
    unit: str = ""
    mood: str = ""  # good, bad or mild, where the answer is one of these
    estimated: bool = False


def headlines(findings: RunRecords) -> list[Tile]:
    """The four, in the order in which a stranger asks."""
    return [_worked(findings), _good(findings), _fast(findings), _cost(findings)]


def _worked(findings: RunRecords) -> Tile:
    whole = not findings.problems and not findings.stale
    undone = findings.verify is not None and any(check.passed is None for check in findings.verify.checks)
    if not findings.records():
        answer, mood = "– not begun", "mild"
    elif any(notice.critical for notice in summary.find_notices(findings)):
        answer, mood = "✕ no", "bad"
    else:
        answer, mood = ("✓ yes", "good") if whole and not undone else ("! in part", "mild")
    lines = [f"{len(findings.records())} of {len(STAGES) - len(findings.left_out)} stages have a record"]
    if findings.verify:
        lines.append(f"exported weights: {summary.count_checks(findings.verify)}")
    if findings.train and findings.train.steps:
        first, last = findings.train.steps[0], findings.train.steps[-1]
        begin = f"{decimal(first.loss)} → " if last.step != first.step else ""
        lines.append(f"loss {begin}{decimal(last.loss)} in {count(last.step)} steps")
    else:
        lines.append("no train record")
    return Tile(question="Did it work?", answer=answer, mood=mood, lines=tuple(lines))


def _good(findings: RunRecords) -> Tile:
    scores, question = findings.eval, "How good?"
    if scores is None:
        return Tile(question=question, answer=None, lines=(findings.left_out.get("eval", "no eval record"),))
    base, tuned, (first, *others) = scores.base, scores.tuned, scores.tasks
    sampled, found = bool(first.tuned.problems), first.difference
    lines = [
        f"{scores.scorer}, {count(tuned.n)} {'problems' if sampled else 'held-out rows'}",
        f"95 % intervals {interval(base.low, base.high)} and {interval(tuned.low, tuned.high)}",
        f"difference {signed(found.mean)} ({signed(found.low)} to {signed(found.high)}), {p_value(found.p_value)}",
    ]
    if others:
        lines.append(f"and {len(others)} more task{'s' if len(others) > 1 else ''} below")
    before, answer, unit = fraction(base.score), fraction(tuned.score), "pass@1" if sampled else "right"
    return Tile(question=question, answer=answer, before=before, unit=unit, lines=tuple(lines))


def _fast(findings: RunRecords) -> Tile:
    train, bench = findings.train, findings.bench
    lines = [] if train else ["no train record"]
    fastest, middle = (summary.fastest_cell(bench.cells), summary.middle_cell(bench)) if bench else (None, None)
    if fastest is None:
        lines.append("no bench record" if bench is None else "no request completed")
    else:
        speed = decimal(fastest.output_tokens_per_s)
        lines.append(f"served: at most {speed} output tokens/s ({summary.load_words(fastest)})")
    if middle is not None:
        lines.append(f"TTFT p50 {decimal(middle.ttft_ms.p50)} ms ({summary.load_words(middle)})")
    if findings.records():
        lines.append(f"{duration(summary.total_s(findings))} for all stages")
    answer, unit = (decimal(train.real_tokens_per_s), "real tokens/s") if train else (None, "")
    return Tile(question="How fast?", answer=answer, unit=unit, lines=tuple(lines))


def _cost(findings: RunRecords) -> Tile:
    found, answer = actual_cost(findings), None
    machine = summary.cheapest_machine(findings.plan) if findings.plan else None
    if found is not None:
        answer, lines = usd(found.total), list(_cost_lines(found))
    elif findings.plan is None:
        lines = [why_no_cost(findings)]
    elif machine is None or machine.usd is None:
        lines = ["no machine that fits has a price in the plan"]
    else:
        answer = span(*map(usd, machine.usd))
        lines = [
            f"planned: {findings.plan.priced} on {machine.name}, the cheapest that fits",
            f"spent: not known, {why_no_cost(findings)}",
        ]
    return Tile(question="What did it cost?", answer=answer, estimated=True, lines=tuple(lines))


def _cost_lines(found: ActualCost) -> Iterator[str]:
    paid = found.price
    if not paid.usd_per_hour:
        yield f"on {paid.machine}, for which no rent is paid"
        return
    yield f"measured time on {paid.machine} at {usd(paid.usd_per_hour)}/h"
    yield f"training {usd(found.training)}"
    if found.per_million_trained_tokens is not None:
        yield f"{price(found.per_million_trained_tokens)} per million real tokens"
    if found.served is not None:
        tokens = paid.usd_of(1e6, found.served.output_tokens_per_s)
        requests = paid.usd_of(1e3, found.served.requests_per_s)
        if tokens is not None and requests is not None:
            yield f"{price(tokens)} per million output tokens, {price(requests)} per thousand requests"


def report(run: Run, file: Path | None = None) -> Path:
    """The path of the page, the same bytes of the same records; by default it is the run's report.html."""
    write_text(file or run.report, render_page(run))
    return file or run.report


def render_page(run: Run) -> str:
    """The whole page. Raises MachineError where matplotlib or Jinja is not installed."""
    environment = open_environment()
    from gemsmith.report.sections import SECTIONS

    findings = summary.read_findings(run)
    records = findings.records()
    environment.globals |= {"recipe": run.recipe, "found": findings, "summary": summary}
    rendered = (
        (name, title, environment.get_template(f"{name}.html").render(make(findings)))
        for name, (title, make) in SECTIONS.items()
    )
    return render(
        environment,
        "page.html",
        sections=[section for section in rendered if section[-1].strip()],
        run_name=run.path.resolve().name,
        model=findings.model,
        stages=len(records),
        started=min((record.provenance.started for record in records.values()), default=None),
        total_s=summary.total_s(findings),
        warnings=summary.find_notices(findings),
        headlines=headlines(findings),
    )


def render(environment: Any, template: str, **values: Any) -> str:
    """The page that the template makes of the values; half of a surrogate pair, which no file would take, is `?`."""
    return str(environment.get_template(template).render(**values)).encode("utf-8", "replace").decode()


def open_environment() -> Any:
    """Jinja's environment of the pages. Raises MachineError where matplotlib or Jinja is not installed."""
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"report: {name} is not installed; run: pip install 'gemsmith[report]'")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value.translate(_PRINTED) if type(value) is str else value,
    )
    ours = {name: value for name, value in vars(formats).items() if callable(value) and not name.startswith("_")}
    environment.filters |= {name: write for name, write in ours.items() if write.__module__ == formats.__name__}
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # What a browser runs of a page is this one text, whatever the records hold.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"span": span, "script": script, "script_sha256": digest}
    return environment
