"""Scorers that take long, fail, and give many verdicts."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gemsmith.errors import MachineError, ScorerError
from gemsmith.evals.generate import judge, judging
from gemsmith.serve.client.chat import Failure
from gemsmith.tasks.base import Question, Verdict


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


def test_every_answer_has_its_own_verdict() -> None:
    for answer in ("0", "", "1"):
        assert [judge(Judged(same), question(), answer)] == same(question(), [answer])
    with judging(Judged(same)) as submit:
        waiting = [submit(question(number), str(number % 3)) for number in range(50)]
        assert [judged.result().right for judged in waiting] == [number < 3 for number in range(50)]


def test_a_scorer_runs_beside_this_thread() -> None:
    threads = set()

    def score(_question: Question, answers: Sequence[str]) -> list[Verdict]:
        threads.add(threading.current_thread())
        return [Verdict(right=True)] * len(answers)

    with judging(Judged(score)) as submit:
        submit(question(), "a").result()
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
    assert judge(fails(error), question(), "a") == expected


@pytest.mark.parametrize("error", [MachineError("simulator: is not installed; install it"), KeyboardInterrupt()])
def test_what_no_row_could_be_judged_for_ends_the_stage(error: BaseException) -> None:
    with pytest.raises(type(error)), judging(fails(error)) as submit:
        submit(question(), "a").result()


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([Verdict(right=True)] * 2, Failure(reason="wrong count", detail="score returned 2 verdicts on one answer")),
        (
            [True],
            Failure(reason="no verdict", detail="score returned True in place of a gemsmith.tasks.Verdict"),
        ),
    ],
)
def test_what_is_no_verdict_on_each_answer_is_counted(returned: list[Any], expected: Failure) -> None:
    assert judge(Judged(lambda _question, _answers: returned), question(), "a") == expected


def test_a_scorer_that_would_end_the_program_is_counted() -> None:
    assert judge(fails(SystemExit(0)), question(), "a") == Failure(reason="SystemExit", detail="0")


def test_what_has_not_begun_when_the_block_ends_is_never_judged() -> None:
    begun, going = [], threading.Event()

    def score(question: Question, _answers: Sequence[str]) -> list[Verdict]:
        begun.append(question.expected)
        going.wait(10)
        return [Verdict(right=True)]

    with judging(Judged(score)) as submit:
        waiting = [submit(question(number), "a") for number in range(200)]
    going.set()
    assert waiting[-1].cancelled() and len(begun) < 200
