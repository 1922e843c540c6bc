"""Patterns from rows and recipes, some of them hostile."""

from typing import Any

import pytest

from gemsmith.errors import DataError, ScorerError
from gemsmith.system import patterns
from gemsmith.tasks import regex
from gemsmith.tasks.base import Question, Verdict


def question(pattern: Any, expected: str = "") -> Question:
    return Question(messages=(), expected=expected, origin="rows.jsonl line 3", columns={"pattern": pattern})


def test_a_pattern_without_groups_is_found_anywhere_or_at_the_ends_where_it_says_so() -> None:
    assert regex.score(question("yes"), ["oh yes!", "no"]) == [
        Verdict(right=True),
        Verdict(right=False, reason="pattern not found"),
    ]
    assert [verdict.right for verdict in regex.score(question(r"(?i)\Ayes\Z"), ["Yes", "oh yes"])] == [True, False]


def test_groups_must_hold_what_they_hold_in_the_expected_answer() -> None:
    asked = question(r"The answer is (\d+)", "So. The answer is 42.")
    regex.check(asked)
    assert regex.score(asked, ["The answer is 42, I think", "The answer is 41", "42"]) == [
        Verdict(right=True),
        Verdict(right=False, reason="'41' instead of '42'"),
        Verdict(right=False, reason="pattern not found"),
    ]


def test_a_pattern_that_would_take_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIMEOUT_S", 0.2)
    with pytest.raises(ScorerError, match=r"^pattern too slow$"):
        regex.score(question(r"(?:a|aa|a?a)+\d(?:a|aa)+b"), [f"{'a' * 60}1{'a' * 60}c"])


@pytest.mark.parametrize(
    ("pattern", "expected", "said"),
    [
        (7, "", "pattern is 7; give a regular expression, as text"),
        ("(", "", "pattern '(' is no regular expression (missing ) at position 1)"),
        (r"is (\d+)", "forty", r"pattern 'is (\\d+)' has groups to compare, and is not found in the expected answer;"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_one_line_with_the_row(pattern: object, expected: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        regex.check(question(pattern, expected))
    assert str(error.value).startswith(f"rows.jsonl line 3: {said}")
