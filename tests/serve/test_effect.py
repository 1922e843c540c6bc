"""An adapter that is loaded and not applied is noticed; one that changes next to nothing is not taken for that."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemsmith.errors import EngineError
from gemsmith.runs.records import ServerFacts
from gemsmith.serve.stage import ANSWER_TOKENS, PROMPTS, check_adapter_applied
from support.hostile_server import Deed, Hostile, chat


def likely(first: float, count: int = 1, last: float | None = None) -> Deed:
    """A completion of so many tokens, with this log-probability of the likeliest; `last`: of the last token's."""
    values = [*[first] * (count - 1), first if last is None else last]
    top = [{"token_id:7": value, "token_id:8": -2.0} for value in values]
    found = {"tokens": ["token_id:7"] * count, "top_logprobs": top}
    return 200, json.dumps({"choices": [{"text": "", "finish_reason": "length", "logprobs": found}]}).encode()


@pytest.fixture
def effect(hostile: Hostile, tmp_path: Path) -> Callable[..., float]:
    """Returns what is measured where the tuned model's log-probabilities are `by` from the base's, whose own are
    `strayed` from what it says alone once it is asked beside the tuned model."""

    def measure(by: float, *, strayed: float = 0.0, dtype: str = "float32", expected: float | None = None) -> float:
        alone = [0]

        def deed(asked: dict) -> Deed:
            if asked["model"] == "demo":
                return likely(-0.5 - by, ANSWER_TOKENS)
            alone[0] += 1
            return likely(-0.5 - strayed * (alone[0] > len(PROMPTS)), ANSWER_TOKENS)

        hostile.deed = deed
        tuned = replace(hostile.server(tmp_path, name="demo"), facts=ServerFacts(dtype=dtype))
        return check_adapter_applied(replace(tuned, model="demo-base"), tuned, expected=expected)

    return measure


def test_an_adapter_that_is_applied_has_its_effect(effect: Callable[..., float]) -> None:
    assert effect(0.25) == pytest.approx(0.25)
    assert effect(0.25, dtype="bfloat16") == pytest.approx(0.25)


@pytest.mark.parametrize("told", [
    {"by": 0.0}, {"by": 5e-4}, {"by": 0.01, "dtype": "bfloat16"}, {"by": 0.0, "expected": 4.0},
])  # fmt: skip
def test_no_more_than_rounding_is_an_adapter_ignored(told: dict, effect: Callable[..., float]) -> None:
    with pytest.raises(EngineError, match=r"loaded the adapter demo and ignores it .*41754.*serve.weights to merged"):
        effect(**told)


def test_a_base_that_gets_the_adapter_too_is_an_error(effect: Callable[..., float]) -> None:
    with pytest.raises(EngineError, match=r"applies the adapter demo to the base, too: .* by 0\.4 .*to merged"):
        effect(0.5, strayed=0.4)
    assert effect(0.5, strayed=5e-4) == pytest.approx(0.5), "rounding"
    assert effect(3.0, strayed=0.1, dtype="bfloat16") == pytest.approx(3.0), "rounding of bfloat16"


def test_the_base_is_asked_alone_and_then_beside_the_tuned_model(hostile: Hostile, tmp_path: Path) -> None:
    hostile.deed = lambda asked: likely(-0.5 - (asked["model"] == "demo"), asked["max_tokens"])
    tuned = hostile.server(tmp_path, name="demo")
    check_adapter_applied(replace(tuned, model="demo-base"), tuned, expected=None)
    asked = [one["model"] for one in hostile.asked]
    assert asked[:8] == ["demo"] * 4 + ["demo-base"] * 4 and sorted(asked[8:]) == ["demo"] * 4 + ["demo-base"] * 4


def test_an_adapter_that_verify_saw_change_next_to_nothing_is_let_through(effect: Callable[..., float]) -> None:
    assert effect(5e-4, expected=2e-3) == pytest.approx(5e-4)


@pytest.mark.parametrize(("deed", "said"), [
    (chat("a"), "no log-probabilities"), ((500, b"busy"), "http 500: busy"), ((200, b"x"), "not JSON"),
    (likely(-0.5, ANSWER_TOKENS - 1), "other tokens"),
])  # fmt: skip
def test_a_server_that_does_not_say_is_an_error_that_shows_its_answer(
    deed: Deed, said: str, hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemsmith.serve.client.batch.WAITS_S", ())
    hostile.deed = lambda asked: deed
    server = hostile.server(tmp_path)
    with pytest.raises(EngineError, match=f"answered demo with {said}"):
        check_adapter_applied(server, server, expected=None)
