"""Which choice counts as the likeliest, by the sum and by the character."""

import json
from typing import Any

import pytest

from gemsmith.errors import DataError
from gemsmith.tasks.base import Question
from gemsmith.tasks.multiple_choice import NORMALIZED, check, list_choices, score


def question(choices: Any, expected: str = "a") -> Question:
    return Question(messages=(), expected=expected, origin="rows.jsonl line 3", columns={"choices": choices})


def judged(expected: str, **logprobs: float) -> tuple[bool, bool, str | None]:
    """Raw, length-normalized, reason."""
    answer = json.dumps([{"choice": name, "logprob": value, "tokens": 1} for name, value in logprobs.items()])
    [verdict] = score(question(list(logprobs), expected), [answer])
    return verdict.right, verdict.others[NORMALIZED], verdict.reason


def test_the_sum_and_the_sum_per_character_may_disagree() -> None:
    assert judged("a", a=-1.0, longer=-3.0) == (True, False, None)
    assert judged("longer", a=-1.0, longer=-3.0) == (False, True, "'a' is likelier")
    assert judged("longer", a=-4.0, longer=-3.0) == (True, True, None)


def test_a_choice_as_likely_as_another_is_not_the_likeliest() -> None:
    assert judged("a", a=-1.0, b=-1.0) == (False, False, "another is as likely")


def test_the_choices_are_the_rows() -> None:
    asked = question(["a", "b c"])
    check(asked)
    assert list_choices(asked) == ["a", "b c"]


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ("a", "choices is 'a'; give a list of texts"),
        (["a", 1], "choices is ['a', 1]; give a list of texts"),
        (["a"], "choices must be two or more different texts"),
        (["a", "b", "a"], "choices must be two or more different texts"),
        (["a", " b"], "the choice ' b' is empty, or has white space at an end; change it"),
        (["a", ""], "the choice '' is empty, or has white space at an end; change it"),
        (["b", "c"], "the expected answer 'a' is none of the choices; it must be one, to the letter"),
    ],
)
def test_choices_that_cannot_be_compared_are_one_line(choices: object, said: str) -> None:
    with pytest.raises(DataError) as error:
        check(question(choices))
    assert str(error.value) == f"rows.jsonl line 3: {said}"
