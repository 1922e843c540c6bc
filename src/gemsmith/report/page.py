"""The report's HTML, from the records of a run: what stands above the sections, the sections, one file.

The first screen: did it work, how good, how fast, what did it cost.
"""

import base64
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.analysis.cost import ActualCost, actual_cost
from gemsmith.analysis.summary import (
    RunRecords,
    cheapest_machine,
    count_checks,
    fastest_cell,
    find_notices,
    middle_cell,
    read_findings,
    total_s,
)
from gemsmith.errors import MachineError
from gemsmith.runs.eval_records import EvalRecord
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES
from gemsmith.system import format as numbers


@dataclass(frozen=True, kw_only=True)
class SummaryTile:
    """A question with its answer; `answer` None: no record says, and `lines` tell which is missing."""

    question: str
    answer: str | None
    lines: tuple[str, ...]
    before: str | None = None
    """What it was at first, where the answer is a change."""
    unit: str = ""
    mood: str = ""
    """good, bad or mild, where the answer is one of these."""
    estimated: bool = False


def headlines(findings: RunRecords) -> list[SummaryTile]:
    """The four, in the order in which a stranger asks."""
    return [_worked(findings), _good(findings), _fast(findings), _cost(findings)]


def _worked(findings: RunRecords) -> SummaryTile:
    critical = any(notice.critical for notice in find_notices(findings))
    whole = not findings.problems and not findings.stale
    undone = findings.verify is not None and any(check.passed is None for check in findings.verify.checks)
    answer, mood = ("✕ no", "bad") if critical else ("✓ yes", "good") if whole and not undone else ("! in part", "mild")
    if not findings.records():
        answer, mood = "– not begun", "mild"
    return SummaryTile(question="Did it work?", answer=answer, mood=mood, lines=tuple(_work_lines(findings)))


def _work_lines(findings: RunRecords) -> Iterator[str]:
    asked = [stage for stage in STAGES if stage not in findings.left_out]
    yield f"{len(findings.records())} of {len(asked)} stages have a record"
    if findings.verify:
        yield f"exported weights: {count_checks(findings.verify)}"
    if findings.train and findings.train.steps:
        first, last = findings.train.steps[0], findings.train.steps[-1]
        begin = f"{numbers.decimal(first.loss)} → " if last.step != first.step else ""
        yield f"loss {begin}{numbers.decimal(last.loss)} in {numbers.count(last.step)} steps"
    else:
        yield "no train record"


def _good(findings: RunRecords) -> SummaryTile:
    scores, question = findings.eval, "How good?"
    if scores is None:
        return SummaryTile(question=question, answer=None, lines=(findings.left_out.get("eval", "no eval record"),))
    base, tuned = scores.base, scores.tuned
    ranges = [f"{numbers.fraction(score.low)}–{numbers.fraction(score.high)}" for score in (base, tuned)]
    return SummaryTile(
        question=question,
        answer=numbers.fraction(tuned.score),
        before=numbers.fraction(base.score),
        unit="pass@1" if _sampled(scores) else "right",
        lines=(
            f"{scores.scorer}, {numbers.count(tuned.n)} {'problems' if _sampled(scores) else 'held-out rows'}",
            f"95 % intervals {ranges[0]} and {ranges[1]}",
            *_difference_lines(scores),
        ),
    )


def _difference_lines(scores: EvalRecord) -> Iterator[str]:
    if scores.tasks:
        found = scores.tasks[0].difference
        low, high = numbers.signed(found.low), numbers.signed(found.high)
        yield f"difference {numbers.signed(found.mean)} ({low} to {high}), {numbers.p_value(found.p_value)}"
    elif scores.p_value is not None:
        yield f"base against tuned: {numbers.p_value(scores.p_value)}"
    if len(scores.tasks) > 1:
        yield f"and {len(scores.tasks) - 1} more task{'s' if len(scores.tasks) > 2 else ''} below"


def _sampled(scores: EvalRecord) -> bool:
    return bool(scores.tasks) and bool(scores.tasks[0].tuned.problems)


def _fast(findings: RunRecords) -> SummaryTile:
    train = findings.train
    return SummaryTile(
        question="How fast?",
        answer=numbers.decimal(train.real_tokens_per_s) if train else None,
        unit="real tokens/s" if train else "",
        lines=tuple(_speed_lines(findings)),
    )


def _speed_lines(findings: RunRecords) -> Iterator[str]:
    if findings.train is None:
        yield "no train record"
    fastest, middle = (fastest_cell(findings.bench), middle_cell(findings.bench)) if findings.bench else (None, None)
    if fastest is None:
        yield "no bench record" if findings.bench is None else "no request completed"
    else:
        where = (
            f"{numbers.count(fastest.input_tokens)} in, {numbers.rate(fastest.request_rate, fastest.max_concurrency)}"
        )
        yield f"served: at most {numbers.decimal(fastest.output_tokens_per_s)} output tokens/s ({where})"
    if middle is not None:
        yield (
            f"TTFT p50 {numbers.decimal(middle.ttft_ms.p50)} ms ({numbers.count(middle.input_tokens)} tokens in, "
            f"{numbers.count(middle.output_tokens)} out, {numbers.rate(middle.request_rate, middle.max_concurrency)})"
        )
    if findings.records():
        yield f"{numbers.duration(total_s(findings))} for all stages"


def _cost(findings: RunRecords) -> SummaryTile:
    question, found = "What did it cost?", actual_cost(findings)
    if found is not None:
        return SummaryTile(
            question=question, answer=numbers.usd(found.total), estimated=True, lines=tuple(_cost_lines(found))
        )
    if findings.plan is None:
        return SummaryTile(
            question=question, answer=None, estimated=True, lines=("no plan record, which has the prices",)
        )
    machine = cheapest_machine(findings.plan)
    if machine is None or machine.usd is None:
        return SummaryTile(
            question=question, answer=None, estimated=True, lines=("no machine that fits has a price in the plan",)
        )
    steps = f"{findings.plan.priced} on {machine.name}, the cheapest that fits"
    low, high = machine.usd
    trained_on = findings.train.machine if findings.train else None
    why = f"the plan has no price of {trained_on}" if trained_on else "which of the plan’s machines trained is not told"
    why = "no train record" if findings.train is None else why
    return SummaryTile(
        question=question,
        answer=numbers.span(numbers.usd(low), numbers.usd(high)),
        estimated=True,
        lines=(f"planned: {steps}", f"spent: not known, {why}"),
    )


def _cost_lines(found: ActualCost) -> Iterator[str]:
    price = found.price
    if not price.usd_per_hour:
        yield f"on {price.machine}, for which no rent is paid"
        return
    yield f"measured time on {price.machine} at {numbers.usd(price.usd_per_hour)}/h"
    yield f"training {numbers.usd(found.training)}"
    if found.per_million_trained_tokens is not None:
        yield f"{numbers.price(found.per_million_trained_tokens)} per million real tokens"
    if found.served is not None:
        tokens = price.usd_per_million_output_tokens(found.served)
        requests = price.usd_per_thousand_requests(found.served)
        if tokens is not None and requests is not None:
            yield f"{numbers.price(tokens)} per million output tokens, {numbers.price(requests)} per thousand requests"


_FOLDER = Path(__file__).parent / "templates"
_FILTERS = (
    numbers.count,
    numbers.decimal,
    numbers.duration,
    numbers.fraction,
    numbers.memory,
    numbers.mesh,
    numbers.moment,
    numbers.p_value,
    numbers.percent,
    numbers.plain,
    numbers.price,
    numbers.rate,
    numbers.rough,
    numbers.short_hash,
    numbers.signed,
    numbers.size,
    numbers.usd,
)


def render_page(run: Run) -> str:
    """The whole page. Raises MachineError where matplotlib or Jinja is not installed."""
    environment = open_environment()
    from gemsmith.report.sections import SECTIONS

    findings = read_findings(run)
    environment.globals |= {"recipe": run.recipe, "found": findings}
    rendered = (
        (section, environment.get_template(f"{section.id}.html").render(section.make(run, findings)))
        for section in SECTIONS
    )
    sections = [(section, html) for section, html in rendered if html.strip()]
    html = environment.get_template("page.html").render(sections=sections, **_frame(run, findings))
    return html.encode("utf-8", "replace").decode()


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
        finalize=_printable,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # What a browser runs of a page is this one text, whatever the records hold.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"span": numbers.span, "script": script, "script_sha256": digest}
    return environment


def _frame(run: Run, findings: RunRecords) -> dict[str, Any]:
    """What stands around the sections."""
    records = findings.records()
    return {
        "run_name": run.path.resolve().name,
        "model": findings.model(run.recipe),
        "stages": len(records),
        "started": min((record.origin.started for record in records.values()), default=None),
        "total_s": total_s(findings),
        "warnings": find_notices(findings),
        "headlines": headlines(findings),
    }


def _printable(value: Any) -> Any:
    """Control characters as images, and those that turn the order of letters as their names.

    HTML forbids some of the first; the others would let a text show itself, or what follows it, as something that it is
    not.
    """
    if type(value) is not str:
        return value
    value = re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f]",
        lambda found: "\u2421" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])),
        value,
    )
    return re.sub(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda found: f"[U+{ord(found[0]):04X}]", value)
