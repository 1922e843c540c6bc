"""The first screen: did it work, how good, how fast, what did it cost."""

from collections.abc import Iterator
from dataclasses import dataclass

from gemsmith.eval_records import EvalRecord
from gemsmith.report import numbers
from gemsmith.report.cost import Spent, spent
from gemsmith.report.findings import (
    Findings,
    cheapest_machine,
    count_checks,
    fastest_cell,
    find_notices,
    middle_cell,
    total_s,
)
from gemsmith.stages import STAGES


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A question with its answer; `answer` None: no record says, and `lines` tell which is missing."""

    question: str
    answer: str | None
    lines: tuple[str, ...]
    before: str | None = None
    """What it was at first, where the answer is a change."""
    unit: str = ""
    mood: str = ""
    """good, bad or mild, where the answer is one of these."""
    modelled: bool = False


def headlines(findings: Findings) -> list[Headline]:
    """The four, in the order in which a stranger asks."""
    return [_worked(findings), _good(findings), _fast(findings), _cost(findings)]


def _worked(findings: Findings) -> Headline:
    grave = any(notice.grave for notice in find_notices(findings))
    whole = not findings.problems and not findings.stale
    undone = findings.verify is not None and any(check.passed is None for check in findings.verify.checks)
    answer, mood = ("✕ no", "bad") if grave else ("✓ yes", "good") if whole and not undone else ("! in part", "mild")
    if not findings.records():
        answer, mood = "– not begun", "mild"
    return Headline(question="Did it work?", answer=answer, mood=mood, lines=tuple(_work_lines(findings)))


def _work_lines(findings: Findings) -> Iterator[str]:
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


def _good(findings: Findings) -> Headline:
    scores, question = findings.eval, "How good?"
    if scores is None:
        return Headline(question=question, answer=None, lines=(findings.left_out.get("eval", "no eval record"),))
    base, tuned = scores.base, scores.tuned
    ranges = [f"{numbers.fraction(score.low)}–{numbers.fraction(score.high)}" for score in (base, tuned)]
    return Headline(
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


def _fast(findings: Findings) -> Headline:
    train = findings.train
    return Headline(
        question="How fast?",
        answer=numbers.decimal(train.real_tokens_per_s) if train else None,
        unit="real tokens/s" if train else "",
        lines=tuple(_speed_lines(findings)),
    )


def _speed_lines(findings: Findings) -> Iterator[str]:
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


def _cost(findings: Findings) -> Headline:
    question, found = "What did it cost?", spent(findings)
    if found is not None:
        return Headline(
            question=question, answer=numbers.usd(found.total), modelled=True, lines=tuple(_cost_lines(found))
        )
    if findings.plan is None:
        return Headline(question=question, answer=None, modelled=True, lines=("no plan record, which has the prices",))
    machine = cheapest_machine(findings.plan)
    if machine is None or machine.usd is None:
        return Headline(
            question=question, answer=None, modelled=True, lines=("no machine that fits has a price in the plan",)
        )
    steps = f"{findings.plan.priced} on {machine.name}, the cheapest that fits"
    low, high = machine.usd
    trained_on = findings.train.machine if findings.train else None
    why = f"the plan has no price of {trained_on}" if trained_on else "which of the plan’s machines trained is not told"
    why = "no train record" if findings.train is None else why
    return Headline(
        question=question,
        answer=numbers.span(numbers.usd(low), numbers.usd(high)),
        modelled=True,
        lines=(f"planned: {steps}", f"spent: not known, {why}"),
    )


def _cost_lines(found: Spent) -> Iterator[str]:
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
