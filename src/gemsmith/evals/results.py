"""What the record and the terminal say of a task, from the two models' answers to it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gemsmith.evals.generate import Answers, GradedAnswer
from gemsmith.evals.labels import label_scores, thumbnails
from gemsmith.evals.metrics import compare_paired, mean_interval, pass_at_each, wilson_interval
from gemsmith.evals.tasks import OpenTask
from gemsmith.images.check import count_resized_again
from gemsmith.runs.eval_records import EvalRecord, ModelResult, ProblemScore, Score, Share, TaskResult
from gemsmith.system.console import open_console
from gemsmith.system.format import counts
from gemsmith.tasks.base import Classifier, Question
from gemsmith.tasks.messages import BREAK, text_of

EXAMPLES, OF_A_KIND = 8, 2


@dataclass(frozen=True, kw_only=True)
class ScoredTask:
    """A task with both models' answers and what the record says of them."""

    task: OpenTask
    base: Answers
    tuned: Answers
    result: TaskResult


def score_task(task: OpenTask, base: Answers, tuned: Answers) -> ScoredTask:
    # Of questions that both models have answered and a scorer judged at least once. Without any, all count as wrong.
    pairs = list(zip(base.answers, tuned.answers, strict=True))
    whole = [pair for pair in pairs if all(any(not (one.failed or one.ungraded) for one in each) for each in pair)]
    shares = [[_share(answers) for answers in pair] for pair in whole or pairs]
    labels = None
    if task.held_out and isinstance(task.scorer, Classifier):
        labels = label_scores(task.scorer, task.questions, base.all(), tuned.all())
    result = TaskResult(
        **dict(task.asked),
        base=model_result(task, base),
        tuned=model_result(task, tuned),
        difference=compare_paired([one for one, _ in shares], [other for _, other in shares]),
        labels=labels,
    )
    return ScoredTask(task=task, base=base, tuned=tuned, result=result)


def model_result(task: OpenTask, answers: Answers) -> ModelResult:
    flat = answers.all()
    tokens = [answer.tokens for answer in flat if answer.tokens is not None]
    problems = () if task.held_out else tuple(map(problem_score, task.questions, answers.answers))
    return ModelResult(
        score=score(answers.answers),
        pass_at=pass_at_each(problems),
        problems=problems,
        answers=len(flat),
        mean_output_tokens=math.fsum(tokens) / len(tokens) if tokens else None,
        usage_missing=sum(answer.tokens is None and not answer.failed for answer in flat),
        retries=dict(answers.retries),
        prompts_compared=answers.prompts_compared,
    )


def score(answers: Sequence[Sequence[GradedAnswer]]) -> Score:
    """The share of right answers, or pass@1, with its interval over rows or questions; and what went wrong."""
    flat = [answer for each in answers for answer in each]
    shares = [_share(each) for each in answers]
    low, high = mean_interval(shares)
    others = Counter({name: 0 for answer in flat for name in answer.others})
    others.update(name for answer in flat for name, right in answer.others.items() if right)
    ends = {name: wilson_interval(count, len(flat)) for name, count in others.items()}
    return Score(
        score=sum(shares) / len(shares),
        low=low,
        high=high,
        n=len(shares),
        cut=sum(answer.cut for answer in flat),
        failed=dict(Counter(answer.failed for answer in flat if answer.failed)),
        ungraded=dict(Counter(answer.ungraded for answer in flat if answer.ungraded)),
        others={name: Share(score=others[name] / len(flat), low=low, high=high) for name, (low, high) in ends.items()},
    )


def _share(answers: Sequence[GradedAnswer]) -> float:
    return sum(answer.right for answer in answers) / len(answers)


def problem_score(question: Question, answers: Sequence[GradedAnswer]) -> ProblemScore:
    wrong = [answer for answer in answers if not answer.right]
    reasons = Counter(answer.reason or answer.ungraded or answer.failed or "wrong" for answer in wrong)
    details = [f"{answer.reason}: {answer.detail}" for answer in wrong if answer.detail]
    return ProblemScore(
        name=question.origin,
        samples=len(answers),
        passed=len(answers) - len(wrong),
        reasons=dict(sorted(reasons.items())),
        details=tuple(dict.fromkeys(details)),
    )


def generate_rows(scored: ScoredTask) -> Iterator[dict[str, Any]]:
    """For each answer to each question what was asked and expected and what both models wrote."""
    task = scored.task
    for number, pair in enumerate(zip(scored.base.all(), scored.tuned.all(), strict=True)):
        graded = list(zip(("base", "tuned"), pair, strict=True))
        question = task.question_of(number)
        named = {"problem": question.origin, "sample": number % task.asked.samples + 1}
        yield {
            "task": task.name,
            "row": number + 1,
            **({"origin": question.origin} if task.held_out else named),
            "prompt": "\n\n".join(text_of(message) for message in question.messages).replace(BREAK, ""),
            **({"images": [image.path or image.sha256 for image in question.images]} if question.images else {}),
            "expected": question.expected,
            **{role: answer.text for role, answer in graded},
            **{f"{role}_right": answer.right for role, answer in graded},
            **{f"{role}_cut": answer.cut for role, answer in graded},
            **{f"{role}_failed": answer.failed for role, answer in graded},
            **{f"{role}_reason": answer.reason or answer.ungraded for role, answer in graded},
        }


def make_examples(scored: ScoredTask) -> tuple[dict[str, Any], ...]:
    """The chosen rows with their images, small enough for a page."""
    rows = choose_examples(list(generate_rows(scored)))
    return tuple({**row, "thumbnails": list(thumbnails(scored.task.question_of(row["row"] - 1)))} for row in rows)


def choose_examples(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few rows that both have answered: some that training fixed, that stay wrong, that it made worse, and others.

    >>> outcomes = [(True, True), (False, True), (False, True), (False, True), (True, False), (False, False)]
    >>> rows = [{"row": row, "base_right": base, "tuned_right": tuned} for row, (base, tuned) in enumerate(outcomes, 1)]
    >>> [row["row"] for row in choose_examples(rows)]
    [2, 3, 6, 5, 1, 4]
    """
    rows = [row for row in rows if not row.get("base_failed") and not row.get("tuned_failed")]
    rows = [row for row in rows if row.get("sample", 1) == 1]
    chosen: list[Mapping[str, Any]] = []
    for outcome in ((False, True), (False, False), (True, False)):
        chosen += [row for row in rows if (row["base_right"], row["tuned_right"]) == outcome][:OF_A_KIND]
    return [*chosen, *[row for row in rows if row not in chosen][: EXAMPLES - len(chosen)]]


def answer_notices(scored: ScoredTask) -> Iterator[str]:
    """What must be known of the models' answers before their scores."""
    what = "rows" if scored.task.held_out else f"requests of {scored.task.name}"
    models = (("base", scored.base, scored.result.base), ("tuned", scored.tuned, scored.result.tuned))
    for role, answers, found in models:
        if failed := found.score.failed:
            text = f"The {role} model's server gave no answer to {sum(failed.values())} of {found.answers} {what}"
            yield f"{text} ({counts(failed)}); they count as not right."
        if ungraded := found.score.ungraded:
            text = f"The scorer could not judge {sum(ungraded.values())} of {found.answers} answers of the {role} model"
            yield f"{text} ({counts(ungraded)}); they count as not right."
        if empty := sum(not answer.text and not answer.failed for answer in answers.all()):
            text = f"{empty} of {found.answers} answers of the {role} model are empty"
            yield f"{text}: it wrote nothing, or only what a reasoning or tool parser of vLLM takes out."
        if total := sum(found.retries.values()):
            text = f"{total} request{'s' * (total != 1)} of the {role} model had to be sent again"
            yield f"{text} ({counts(found.retries)}); each answer counts once."


def result_notices(scored: ScoredTask) -> Iterator[str]:
    """What must be known of a task before its scores: what was left out, and that they tell nothing."""
    task, result = scored.task, scored.result
    if result.drawn_from:
        asked = len(task.questions) + len(result.left_out)
        drawn = f"{asked:,} of {result.drawn_from:,} {'rows' if task.held_out else 'questions'}"
        yield f"{task.name}: eval.limit: {drawn} were scored, drawn by eval.limit_seed {result.limit_seed}."
    if left := len(result.left_out):
        out = f"{left} of {left + len(task.questions)} questions are left out"
        why = f"since {result.judged_by} cannot judge any answer to them"
        yield f"{task.name}: {out}, {why}; the scores are over the other {len(task.questions)}."
    if not result.difference.significant:
        yield f"{task.name}: {result.difference.summary}"


def image_notices(task: OpenTask) -> Iterator[str]:
    """That the server sees some images in pixels that differ a little from those of training, if it does."""
    images = [image for question in task.questions for image in question.images]
    if again := count_resized_again(images, task.patching) if task.patching else 0:
        text = f"{again:,} of {len(images):,} images have a shape that the server resizes itself, with torchvision"
        yield f"{text}: its values differ from the trained ones, which Pillow made, by up to 2 of 255."


def critical_warnings(scored: ScoredTask) -> Iterator[str]:
    """That generated code ran unguarded, or that a task is answered worse than by the base."""
    name, difference = scored.task.name, scored.result.difference
    if scored.result.sandbox is False:
        yield f"{name}: generated code ran without a sandbox, with the rights of whoever started it."
    if difference.significant and difference.mean < 0:
        yield f"{name}: {difference.summary} Do not use it for this task."


def describe_scores(found: ModelResult, label: str) -> str:
    """As in `eval: tuned: 75.0% right (…)`, or `eval: verilog: tuned: pass@1 64.1% [57.0%, 71.0%], pass@5 …`."""
    score = found.score
    cut = f", {score.cut} cut at the limit of tokens" if score.cut else ""
    failed = f", no answer to {sum(score.failed.values())}" if score.failed else ""
    ungraded = f", no verdict on {sum(score.ungraded.values())}" if score.ungraded else ""
    if not found.problems:
        interval = f"{score.low:.1%} to {score.high:.1%}, n = {score.n}"
        return f"eval: {label}: {score.score:.1%} right ({interval}{cut}{failed}{ungraded})"
    passes = [f"pass@{each.k} {each.score:.1%} (95 % {each.low:.1%} to {each.high:.1%})" for each in found.pass_at]
    return f"eval: {label}: {', '.join(passes)} over {score.n} problems, {found.answers} answers{cut}{failed}{ungraded}"


def print_comparisons(record: EvalRecord, *, table: bool = False) -> None:
    """Prints of each task whether the two models differ, and with `table` its questions side by side."""
    console = open_console()
    for result in record.tasks:
        if table and result.tuned.problems:
            console.print(problem_table(result))
        if left := len(result.left_out):
            questions = f"{left} question{'s' * (left != 1)}"
            console.print(f"{result.task}: {questions} left out, since {result.judged_by} cannot judge them")
        console.print(f"{result.task}: {result.difference.summary}")
        if found := result.labels:
            base, tuned, change = found.base, found.tuned, found.macro_f1_difference
            f1 = f"macro-F1 {base.macro_f1.value:.2f} → {tuned.macro_f1.value:.2f}"
            interval = f"{change.value:+.2f}, 95 % {change.low:+.2f} to {change.high:+.2f}"
            unknown = f"no label: {base.unknown.value:.1%} → {tuned.unknown.value:.1%} of the answers"
            console.print(f"{result.task}: {f1} ({interval}) over {len(found.labels)} labels; {unknown}")


def problem_table(result: TaskResult) -> Table:
    """A line a question: how many answers of each model passed, and why the others did not."""
    table = Table("problem", "base", "tuned", "not passed, base", "not passed, tuned", box=None, header_style="bold")
    for base, tuned in zip(result.base.problems, result.tuned.problems, strict=True):
        models = (base, tuned)
        reasons = [counts(each.reasons) for each in models]
        table.add_row(base.name, *(f"{each.passed} of {each.samples}" for each in models), *reasons)
    for name, why in result.left_out.items():
        table.add_row(name, "", "", "left out", why)
    return table
