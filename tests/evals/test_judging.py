"""Scorers that take long, fail, and give many verdicts."""

import threading
from collections.abc import Callable, Sequence

import pytest

from gemsmith.errors import MachineError, ScorerError
from gemsmith.evals.judging import judge, judge_all
from gemsmith.serve.chat import Failure
from gemsmith.tasks import Question, Verdict


class Judged:
    """A scorer of one's own."""

    COLUMNS: tuple[str, ...] = ()

    def __init__(self, score: Callable[[Question, Sequence[str]], Sequence[Verdict]]) -> None:
        self.score = score


def question(number: int = 0) -> Question:
    return Question(messages=(), expected=str(number), origin=f"row {number}")


def fails(error: BaseException) -> Judged:
    def score(_question: Question, _answers: Sequence[str]) -> Sequence[Verdict]:
        raise error

    return Judged(score)


def same(question: Question, answers: Sequence[str]) -> list[Verdict]:
    return [Verdict(right=answer == question.expected, reason=None if answer else "empty") for answer in answers]


def test_every_answer_of_every_row_has_its_verdict_in_order() -> None:
    rows = [(question(number), [str(number), "", str(number + 1)][: number % 4]) for number in range(50)]
    assert judge_all(Judged(same), rows) == [tuple(same(*row)) for row in rows]


def test_a_scorer_runs_beside_this_thread() -> None:
    threads = set()

    def score(_question: Question, answers: Sequence[str]) -> list[Verdict]:
        threads.add(threading.current_thread())
        return [Verdict(right=True)] * len(answers)

    judge_all(Judged(score), [(question(), ["a"])] * 3)
    assert threads and threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ScorerError("no end"), Failure(reason="no end", detail="no end")),
        (ValueError("bad\ntext"), Failure(reason="ValueError", detail="bad text")),
        (RecursionError(), Failure(reason="RecursionError", detail="")),
    ],
)
def test_what_a_scorer_raises_over_an_answer_is_its_reason(error: Exception, expected: Failure) -> None:
    assert judge(fails(error), question(), ["a"]) == expected


@pytest.mark.parametrize("error", [MachineError("simulator: is not installed; install it"), KeyboardInterrupt()])
def test_what_no_row_could_be_judged_for_ends_the_stage(error: BaseException) -> None:
    with pytest.raises(type(error)):
        judge_all(fails(error), [(question(), ["a"])] * 3)


def test_a_verdict_too_few_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="1 verdicts on 2 answers"):
        judge(Judged(lambda _question, _answers: [Verdict(right=True)]), question(), ["a", "b"])
