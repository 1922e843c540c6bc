"""The scorer `labels`: classification by what the model writes; an answer is right where it is the expected label.

White space, case, quotes, emphasis and a full stop at the ends do not count. `labels` lists what a classifier may
answer: of a folder of images it is known, for other rows `eval.options` or a column gives it, or else the expected
answers of all rows are taken. Beside the score stands the share of answers that name the expected label and no other
anywhere in their text: a base model often writes a sentence.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from gemsmith.errors import DataError
from gemsmith.tasks.base import Question, Verdict

COLUMNS: tuple[str, ...] = ()
OPTIONAL_COLUMNS = ("labels",)
NAMED = "named in the answer"
_AROUND = " \t*_`\"'“”‘’«»"


def check(question: Question) -> None:
    """Raises DataError where the labels are no list of different texts, or the expected answer is none of them."""
    labels = question.columns.get("labels")
    if labels is None:
        return
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) and normalize(label) for label in labels):
        raise DataError(f"{question.origin}: labels is {labels!r:.80}; give a list of texts")
    if len({normalize(label) for label in labels}) < len(labels):
        why = "two of its labels differ in nothing but case, spaces or signs at the ends"
        raise DataError(f"{question.origin}: {why}; change one")
    if find_label(question.expected, labels) is None:
        raise DataError(f"{question.origin}: the expected answer {question.expected!r:.80} is none of the labels")


def list_labels(questions: Sequence[Question]) -> tuple[str, ...]:
    """All labels that the questions list, or, of one that lists none, expect; each once, in order."""
    listed = (question.columns.get("labels") or (question.expected,) for question in questions)
    found = {normalize(label): label for labels in dict.fromkeys(map(tuple, listed)) for label in labels}
    return tuple(sorted(found.values(), key=str.casefold))


def find_label(answer: str, labels: Sequence[str]) -> str | None:
    """The label that the answer is; None where it is none of them.

    >>> find_label("**great dane.**", ["Great Dane", "Sphynx"])
    'Great Dane'
    """
    return _by_normal_form(tuple(labels)).get(normalize(answer))


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    labels, expected = question.columns.get("labels"), normalize(question.expected)
    verdicts = []
    for answer in answers:
        plain = normalize(answer)
        right = plain == expected
        if labels is None:
            verdicts.append(Verdict(right=right, reason=None if right else "not the label"))
            continue
        reason = None if right else "no label" if find_label(answer, labels) is None else "another label"
        named = set(_any_of(tuple(labels)).findall(plain)) == {expected}
        verdicts.append(Verdict(right=right, reason=reason, others={NAMED: named}))
    return verdicts


def normalize(text: str) -> str:
    r"""The text as labels are compared.

    >>> normalize(' "St.  Bernard."\n')
    'st. bernard'
    """
    plain = " ".join(unicodedata.normalize("NFC", text).split()).strip(_AROUND)
    return plain.removesuffix(".").strip(_AROUND).casefold()


@lru_cache
def _any_of(labels: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the words of labels in a text; of those within each other, such as cat and cat fish, the longer."""
    longest_first = sorted(_by_normal_form(labels), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


@lru_cache
def _by_normal_form(labels: tuple[str, ...]) -> dict[str, str]:
    return {normalize(label): label for label in labels}
