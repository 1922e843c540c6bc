"""The scorer `contained-label`: as `labels`, but an answer is the longest label that stands anywhere in it.

`not a pug but a great_dane` is `great_dane`. Beside the score stands the share of answers that are the expected label
and nothing else, which `labels` has as its score.
"""

from collections.abc import Sequence

from gemsmith.errors import DataError
from gemsmith.tasks import classification
from gemsmith.tasks.base import Question, Verdict
from gemsmith.tasks.classification import COLUMNS, OPTIONAL_COLUMNS, list_labels, normalize

__all__ = ["COLUMNS", "OPTIONAL_COLUMNS", "check", "find_label", "list_labels", "score"]
EXACT = "the label and nothing else"


def check(question: Question) -> None:
    """Raises DataError as `labels` does, and for a row without labels: which is the longest needs all of them."""
    if question.columns.get("labels") is None:
        raise DataError(f"{question.origin}: has no labels; give all of them in that column, or in eval.options")
    classification.check(question)


def find_label(answer: str, labels: Sequence[str]) -> str | None:
    """The longest label in the answer, of equally long ones the first; None where there is none.

    >>> find_label("I see a **Cat fish**.", ["cat", "cat fish"])
    'cat fish'
    """
    plain = normalize(answer)
    found = (label for label in labels if normalize(label) in plain)
    return max(found, key=lambda label: len(normalize(label)), default=None)


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    labels, verdicts = question.columns["labels"], []
    for answer, exact in zip(answers, classification.score(question, answers), strict=True):
        found = find_label(answer, labels)
        right = found is not None and normalize(found) == normalize(question.expected)
        reason = None if right else "no label" if found is None else "another label"
        verdicts.append(Verdict(right=right, reason=reason, others={EXACT: exact.right}))
    return verdicts
