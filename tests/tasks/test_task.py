"""What a task's module is given, and what it gives back."""

import dataclasses

import pytest

from gemsmith.tasks.base import Question, Verdict
from gemsmith.tasks.messages import text_message


def question(**columns: object) -> Question:
    return Question(messages=(text_message("user", "a"),), expected="yes", origin="rows.jsonl line 1", **columns)


def test_a_question_without_other_columns_has_none_and_shares_none():
    one, other = question(), question()
    assert one == other and one.columns == {} and one.columns is not other.columns


@pytest.mark.parametrize("made", [question(), Verdict(right=True)], ids=["question", "verdict"])
def test_what_scorers_share_between_threads_cannot_be_changed(made):
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)


def test_a_verdict_needs_no_reason_and_differs_by_one():
    assert Verdict(right=False).reason is None
    assert Verdict(right=False) != Verdict(right=False, reason="timeout")
