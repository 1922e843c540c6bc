"""Scores: every task with its intervals and its difference, problems, examples, and lm-evaluation-harness."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemsmith.eval_records import EvalRecord, LmEvalRecord, LmEvalScore, ModelResult, PassAt, Score, Share, TaskResult
from gemsmith.report import numbers
from gemsmith.report.examples import read_examples
from gemsmith.report.findings import Findings, verdict
from gemsmith.report.score_chart import score_chart
from gemsmith.run import Run


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A line of the table of scores: a measure of both models' answers to a task."""

    task: str
    """Empty where the line above has the same."""
    name: str
    base: str
    tuned: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with a name of its own: the shares of its answers that passed, and why others did not."""

    name: str
    base: float
    tuned: float
    passed: tuple[int, int]
    samples: tuple[int, int]
    reasons: dict[str, int]
    """Of the tuned model."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the evaluation with what the page makes of it."""

    result: TaskResult
    problems: list[Problem]
    moved: str
    """How many problems passed more and less often than with the base; empty without problems."""
    answers: list[tuple[str, str, str]]
    """What, base, tuned: of the answers, not of the scores."""


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """Chart, tables and examples of the evaluation, and the scores of lm-evaluation-harness."""
    scores = findings.eval
    return {
        "chart": score_chart(scores) if scores else None,
        "verdict": verdict(scores) if scores else None,
        "measures": list(_measures(scores)) if scores else [],
        "tasks": [_task(result) for result in scores.tasks] if scores else [],
        "examples": read_examples(scores) if scores else [],
        "lm_eval": list(_lm_eval(findings.lm_eval)) if findings.lm_eval else [],
    }


def _measures(scores: EvalRecord) -> Iterator[Measure]:
    for result in scores.tasks:
        yield Measure(
            task=result.task, name="score", base=_interval(result.base.score), tuned=_interval(result.tuned.score)
        )
        yield from _more_measures(result)
    if not scores.tasks:
        yield Measure(task=scores.scorer, name="score", base=_interval(scores.base), tuned=_interval(scores.tuned))


def _more_measures(result: TaskResult) -> Iterator[Measure]:
    """pass@k beyond the first, which is the score, and the scorer's other measures."""
    base, tuned = result.base, result.tuned
    for one, other in zip(base.pass_at, tuned.pass_at, strict=False):
        if one.k > 1 and one.k == other.k:
            yield Measure(task="", name=f"pass@{one.k}", base=_interval(one), tuned=_interval(other))
    for name, share in base.score.others.items():
        if name in tuned.score.others:
            yield Measure(task="", name=name, base=_interval(share), tuned=_interval(tuned.score.others[name]))


def _interval(score: Score | PassAt | Share) -> str:
    """A score, or one of its kin, with its 95 % interval."""
    return f"{numbers.fraction(score.score)} ({numbers.fraction(score.low)}–{numbers.fraction(score.high)})"


def _task(result: TaskResult) -> Task:
    problems = list(_problems(result))
    better, worse = sum(each.tuned > each.base for each in problems), sum(each.tuned < each.base for each in problems)
    moved = (
        f"{better} pass more often than with the base, {worse} less often, {len(problems) - better - worse} as often"
    )
    return Task(result=result, problems=problems, moved=moved if problems else "", answers=list(_answers(result)))


def _problems(result: TaskResult) -> Iterator[Problem]:
    """Those of both models, paired by name."""
    before = {problem.name: problem for problem in result.base.problems}
    for problem in result.tuned.problems:
        base = before.get(problem.name)
        if base is not None and base.samples and problem.samples:
            yield Problem(
                name=problem.name,
                base=base.passed / base.samples,
                tuned=problem.passed / problem.samples,
                passed=(base.passed, problem.passed),
                samples=(base.samples, problem.samples),
                reasons=problem.reasons,
            )


def _answers(result: TaskResult) -> Iterator[tuple[str, str, str]]:
    base, tuned = result.base, result.tuned
    yield "answers asked for", numbers.count(base.answers), numbers.count(tuned.answers)
    yield "cut at eval.max_tokens", numbers.count(base.score.cut), numbers.count(tuned.score.cut)
    yield "output tokens, mean", _mean_tokens(base), _mean_tokens(tuned)
    for what, one, other in (
        ("not answered", base.score.failed, tuned.score.failed),
        ("not judged", base.score.unscored, tuned.score.unscored),
        ("requests sent again", base.retries, tuned.retries),
    ):
        if one or other:
            yield what, _counts(one), _counts(other)


def _mean_tokens(model: ModelResult) -> str:
    return "not told" if model.mean_output_tokens is None else numbers.decimal(model.mean_output_tokens)


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{numbers.count(number)} {reason}" for reason, number in reasons.items()) or "0"


def _lm_eval(record: LmEvalRecord) -> Iterator[tuple[str, str, str, str, str]]:
    """Task, metric, base, tuned, rows."""
    for task, metrics in record.tuned.items():
        rows = numbers.count(record.rows[task]) if task in record.rows else "not told"
        for name, score in metrics.items():
            base = record.base.get(task, {}).get(name)
            yield task, name, "not told" if base is None else _with_error(base), _with_error(score), rows


def _with_error(score: LmEvalScore) -> str:
    """A score and its 95 % interval's half width, which is 1.96 standard errors."""
    value = numbers.decimal(score.value)
    return value if score.stderr is None else f"{value} ± {numbers.decimal(1.96 * score.stderr)}"
