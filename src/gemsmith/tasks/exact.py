"""The scorer `exact`: an answer is right where it is the expected text, white space at both ends aside."""

from collections.abc import Sequence

from gemsmith.tasks.base import Question, Verdict

COLUMNS: tuple[str, ...] = ()


def score(question: Question, answers: Sequence[str]) -> list[Verdict]:
    return [Verdict(right=answer.strip() == question.expected.strip()) for answer in answers]
