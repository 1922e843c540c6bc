"""Scores of every task, examples with the words marked that were not expected, and what is taken for what."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.summary import RunRecords, score_words
from gemsmith.report.charts import score_chart
from gemsmith.report.tables import Table
from gemsmith.runs import eval_records as records
from gemsmith.system.format import count, counts, decimal, p_value, signed

MOST_CHARACTERS = 2_000  # of one text of an example. A page must stay small enough to send, whatever the rows hold
MOST_EXAMPLES = 12
MODELS = ("base", "tuned")
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
_OUTCOMES: dict[tuple[bool | None, bool | None], str] = {
    (False, True): "fixed",
    (False, False): "still wrong",
    (True, False): "made worse",
    (True, True): "right before and after",
}
"""Whether base and tuned are right -> what training did."""
_NUMBERS = ("questions", "difference", "95 % interval", "chance alone", "better", "worse")
MOST_LABELS = 12
OTHERS, NO_LABEL = "others", "no label"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, cut to what the page has room for, in parts: whether one is as in what it is held against, its words."""

    parts: tuple[tuple[bool, str], ...]
    omitted: int = 0


def read_examples(scores: records.EvalRecord) -> list[dict[str, Any]]:
    """The record's examples, at most MOST_EXAMPLES: what was asked and expected, and what each model wrote.

    A wrong answer is held against what was expected; where nothing is, base and tuned against each other.
    """
    examples = []
    for number, example in enumerate(scores.examples[:MOST_EXAMPLES], 1):
        expected, base, tuned = (str(example.get(name) or "") for name in ("expected", *MODELS))
        answers: list[dict[str, Any]] = []
        for name, text, other in (("base", base, tuned), ("tuned", tuned, base)):
            right = example.get(f"{name}_right")
            answer = {"name": name, "right": right, "cut": example.get(f"{name}_cut") is True}
            answer["reason"] = str(example.get(f"{name}_reason") or "")
            marked = not expected or right is False
            answers.append(answer | {"text": marked_text(text, expected or other) if marked else plain_text(text)})
        examples.append(
            {
                "number": number,
                "prompt": plain_text(str(example.get("prompt") or "")),
                "images": list(map(str, example.get("thumbnails") or ())),  # as small data: URLs
                "outcome": _OUTCOMES.get((answers[0]["right"], answers[1]["right"]), ""),
                "expected": plain_text(expected) if expected else None,
                "answers": answers,
            }
        )
    return examples


def plain_text(text: str) -> Text:
    return Text(parts=((True, text[:MOST_CHARACTERS]),), omitted=max(0, len(text) - MOST_CHARACTERS))


def marked_text(text: str, against: str) -> Text:
    """A text with the words marked that another one does not have in their place.

    >>> marked_text("y = a - b;", "y = a + b;").parts
    ((True, 'y = a '), (False, '-'), (True, ' '), (True, 'b;'))
    """
    shown = _WORDS.findall(text[:MOST_CHARACTERS])
    other = _WORDS.findall(against[: 2 * MOST_CHARACTERS])
    parts: list[tuple[bool, str]] = []
    for tag, start, end, _, _ in difflib.SequenceMatcher(None, shown, other).get_opcodes():
        part = "".join(shown[start:end])
        if tag == "equal":
            parts.append((True, part))
        elif part:
            # White space after the last word is not marked.
            bare = part.rstrip() or part
            parts.append((False, bare))
            if bare != part:
                parts.append((True, part[len(bare) :]))
    return Text(parts=tuple(parts), omitted=max(0, len(text) - MOST_CHARACTERS))


def make_scores(findings: RunRecords) -> dict[str, Any]:
    """Chart, tables and examples of the evaluation, and the scores of lm-evaluation-harness."""
    scores, lm_eval = findings.eval, _lm_eval(findings.lm_eval) if findings.lm_eval else None
    if scores is None:
        return {"lm_eval": lm_eval}
    return {
        "chart": score_chart(scores),
        "measures": Table(
            title="Scores of each task",
            columns=("task", "measure, 95 % interval", "base", "tuned"),
            rows=list(_measures(scores)),
            right=MODELS,
        ),
        "differences": Table(
            title="Differences of each task",
            columns=("tuned less base", *_NUMBERS, "told apart"),
            rows=[
                (
                    result.task,
                    count(found.questions),
                    signed(found.mean),
                    f"{signed(found.low)} to {signed(found.high)}",
                    p_value(found.p_value),
                    count(found.better),
                    count(found.worse),
                    "yes" if found.significant else "no",
                )
                for result in scores.tasks
                for found in [result.difference]
            ],
            right=_NUMBERS,
        ),
        "tasks": [_task(result) for result in scores.tasks],
        "examples": read_examples(scores),
        "lm_eval": lm_eval,
    }


def _measures(scores: records.EvalRecord) -> Iterator[tuple[str, str, str, str]]:
    """Task, named in its first line alone, measure, base, tuned: the score, pass@k beyond 1, the scorer's others."""
    for result in scores.tasks:
        base, tuned = result.base, result.tuned
        yield result.task, "score", score_words(base.score), score_words(tuned.score)
        for one, other in zip(base.pass_at, tuned.pass_at, strict=False):
            if one.k > 1 and one.k == other.k:
                yield "", f"pass@{one.k}", score_words(one), score_words(other)
        for name, share in base.score.others.items():
            if name in tuned.score.others:
                yield "", name, score_words(share), score_words(tuned.score.others[name])


def _task(result: records.TaskResult) -> dict[str, Any]:
    """Its problems by name, with the base and tuned; how many moved, in words; and what is said of the answers."""
    before = {problem.name: problem for problem in result.base.problems if problem.samples}
    problems = [(before[each.name], each) for each in result.tuned.problems if each.name in before and each.samples]
    changes = [tuned.passed * base.samples - base.passed * tuned.samples for base, tuned in problems]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    alike = len(problems) - better - worse
    moved = f"{better} pass more often than with the base, {worse} less often, {alike} as often"
    said = [_answers(result.base), _answers(result.tuned)]
    rows = [(what, *(each[what] or "0" for each in said)) for what in said[0] if any(each[what] for each in said)]
    answers = Table(title=f"Answers to {result.task}", columns=("answers", *MODELS), rows=rows, right=MODELS)
    return {"result": result, "problems": problems, "moved": moved if problems else "", "answers": answers}


def _answers(model: records.ModelResult) -> dict[str, str]:
    """What is said of a model's answers; empty where there is none of that."""
    tokens = model.mean_output_tokens
    return {
        "answers asked for": count(model.answers),
        "cut at eval.max_tokens": count(model.score.cut),
        "output tokens, mean": "not told" if tokens is None else decimal(tokens),
        "not answered": counts(model.score.failed),
        "not judged": counts(model.score.ungraded),
        "requests sent again": counts(model.retries),
    }


def _lm_eval(record: records.LmEvalRecord) -> Table:
    """Beside a score its 95 % interval's half width, which is 1.96 standard errors."""

    def written(score: records.LmEvalScore | None) -> str:
        if score is None:
            return "not told"
        return decimal(score.value) + ("" if score.stderr is None else f" ± {decimal(1.96 * score.stderr)}")

    rows = []
    for task, metrics in record.tuned.items():
        number = count(record.rows[task]) if task in record.rows else "not told"
        for name, score in metrics.items():
            rows.append((task, name, written(record.base.get(task, {}).get(name)), written(score), number))
    columns = ("task", "metric", *MODELS, "rows")
    return Table(title="Scores of lm-evaluation-harness", columns=columns, rows=rows, right=columns[2:])


def make_labels(findings: RunRecords) -> dict[str, Any]:
    tasks = findings.eval.tasks if findings.eval else ()
    return {"tasks": [(each, [label_matrix(each.labels, model) for model in MODELS]) for each in tasks if each.labels]}


def label_matrix(found: records.LabelsResult, model: str) -> dict[str, Any]:
    """Expected labels by row, answered ones by column, of a model, base or tuned, in the order of the labels.

    `lines`: label, and for each answer the rows, their share of the label's, and whether that answer is right. Where
    there are more than MOST_LABELS, those with the most rows, and `others`.
    """
    largest = sorted(found.labels, key=lambda label: -found.rows.get(label, 0))[:MOST_LABELS]
    shown = tuple(label for label in found.labels if label in largest)
    names = (*shown, *((OTHERS,) if len(shown) < len(found.labels) else ()))
    cells, right = Counter[tuple[str, str]](), Counter[str]()
    for each in getattr(found, model).confusion:
        line = each.expected if each.expected in shown else OTHERS
        column = NO_LABEL if each.answered is None else each.answered if each.answered in shown else OTHERS
        cells[line, column] += each.rows
        right[line] += each.rows if each.expected == each.answered else 0
    lines = []
    answered = (*names, NO_LABEL)
    for line in names:
        if total := sum(cells[line, column] for column in answered):
            rows = [(cells[line, column], line == column and right[line] == cells[line, column]) for column in answered]
            lines.append((line, tuple((number, number / total, is_right) for number, is_right in rows)))
    return {"model": model, "answered": answered, "lines": tuple(lines)}
