"""How far two answers' log-probabilities are apart; reading them is tested with verify's servers."""

import pytest

from gemsmith.serve.client.chat import AnswerTokens, Failure, difference, read_tokens


def test_both_ways_of_writing_log_probabilities_are_read() -> None:
    expected = AnswerTokens(tokens=("a",), top=({"a": -0.1, "b": -1.0},))
    likely = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -1.0}]
    assert read_tokens({"logprobs": {"content": [{"token": "a", "top_logprobs": likely}]}}) == expected
    assert read_tokens({"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -0.1, "b": -1.0}]}}) == expected


@pytest.mark.parametrize(
    "found", [None, {}, {"tokens": ["a"]}, {"tokens": ["a"], "top_logprobs": [{"a": float("nan")}]}]
)
def test_a_choice_without_them_is_a_failure(found: object) -> None:
    assert isinstance(read_tokens({"logprobs": found}), Failure)


def test_the_difference_is_the_largest_and_of_equal_lists_nothing() -> None:
    one = {"a": -0.1, "b": -3.0}
    assert difference(one, dict(one)) == 0
    assert difference(one, {"a": -0.4, "b": -3.1}) == pytest.approx(0.3)
    assert difference(one, {"c": -0.1, "b": -3.0}) == pytest.approx(2.9), "what one lacks is its least likely"
