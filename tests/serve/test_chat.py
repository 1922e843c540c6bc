"""What is an answer, and what is none."""

import json
from typing import Any

import pytest

from gemsmith.serve.client.chat import Failure, Reply, read_chat, read_object
from support.cases import each


def chat(content: Any, finish_reason: Any = "stop", **message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": content} | message, "finish_reason": finish_reason}]
    }


@pytest.mark.parametrize(("found", "reply"), [
    (chat("yes"), Reply(text="yes", cut=False)),
    (chat(""), Reply(text="", cut=False)),
    ({"choices": [{"text": "yes", "finish_reason": "stop"}]}, Reply(text="yes", cut=False)),
    (chat("ye", "length"), Reply(text="ye", cut=True)),
    (chat(None, "length", reasoning="I wonder"), Reply(text="", cut=True)),
    (chat(None, "stop", reasoning="I wonder"), Reply(text="", cut=False)),
    (chat(None, "tool_calls", tool_calls=[{"function": {"name": "f"}}]), Reply(text="", cut=False)),
    (chat("a\ud800b"), Reply(text="a?b", cut=False)),
])  # fmt: skip
def test_what_a_model_ended_is_an_answer_even_where_it_holds_no_text(found: dict[str, Any], reply: Reply) -> None:
    assert read_chat(found) == reply


@each(("found", "reason"), [
    ({}, "no choices"),
    ({"choices": None}, "no choices"),
    ({"choices": []}, "no choices"),
    ({"choices": ["yes"]}, "no choices"),
    (chat("half an ans", "abort"), "finish_reason abort"),
    (chat("half an ans", None), "finish_reason None"),
    (chat("half an ans", ["stop"]), "finish_reason ['stop']"),
    (chat(None), "no text"),
    (chat(["yes"]), "no text"),
    (chat({"text": "yes"}), "no text"),
    (chat(3), "no text"),
    ({"choices": [{"message": None, "finish_reason": "stop"}]}, "no text"),
    ({"choices": [{"message": None, "finish_reason": "length"}]}, "no text"),
    ({"choices": [{"text": ["yes"], "finish_reason": "stop"}]}, "no text"),
])  # fmt: skip
def test_anything_else_is_a_failure_with_a_reason(found: dict[str, Any], reason: str) -> None:
    failure = read_chat(found)
    assert isinstance(failure, Failure) and failure.reason == reason
    assert "\n" not in failure.detail and len(failure.detail) <= 300


@pytest.mark.parametrize(("status", "body", "reason"), [
    (500, b"no", "http 500"),
    (204, b"", "http 204"),
    (200, b"<html>\n<h1>busy</h1>", "not JSON"),
    (200, b"", "not JSON"),
    (200, b"\xff\xfe{}", "not JSON"),
    (200, b"[" * 100_000, "not JSON"),
    (200, json.dumps(chat("yes")).encode()[:-9], "not JSON"),
    (200, b"[]", "not an object"),
    (200, b"null", "not an object"),
])  # fmt: skip
def test_only_a_json_object_with_status_200_is_read(status: int, body: bytes, reason: str) -> None:
    failure = read_object(status, body)
    assert isinstance(failure, Failure) and failure.reason == reason
    assert read_object(200, b'{"a": 1}') == {"a": 1}
