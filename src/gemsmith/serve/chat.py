"""What the answer to a request holds, read strictly: text of the model, or why there is none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Of vLLM's own reasons these end an answer; `abort` and `error` end a request that has none.
_ENDED = ("stop", "length", "tool_calls", "repetition")
# Where vLLM puts what a reasoning or tool parser took out of the text; a model that wrote nothing else has answered,
# with no text.
_BESIDE_TEXT = ("reasoning", "reasoning_content", "tool_calls", "refusal")
_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model answered. `cut`: it reached the limit of tokens before it had ended."""

    text: str
    cut: bool
    tokens: int | None = None
    """How many tokens it wrote, where the server says so."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no answer: in two or three words, by which failures are counted, and in detail."""

    reason: str
    detail: str


def read_object(status: int, body: bytes) -> dict[str, Any] | Failure:
    """The JSON object that a request was answered with."""
    if status != 200:
        return Failure(reason=f"http {status}", detail=_shown(body))
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return Failure(reason="not JSON", detail=_shown(body))
    return found if isinstance(found, dict) else Failure(reason="not an object", detail=_shown(body))


def read_choice(found: Mapping[str, Any]) -> dict[str, Any] | Failure:
    """The first choice of a completion that has ended."""
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Failure(reason="no choices", detail=_shown(json.dumps(found).encode()))
    choice: dict[str, Any] = choices[0]
    if choice.get("finish_reason") not in _ENDED:
        return Failure(
            reason=f"finish_reason {str(choice.get('finish_reason'))[:20]}", detail=_shown(json.dumps(choice).encode())
        )
    return choice


def read_chat(found: Mapping[str, Any]) -> Reply | Failure:
    """The text of a chat completion.

    Empty where the model wrote only what a reasoning or tool parser of vLLM takes out.
    """
    choice = read_choice(found)
    if isinstance(choice, Failure):
        return choice
    cut, message = choice["finish_reason"] == "length", choice.get("message")
    text, tokens = message.get("content") if isinstance(message, dict) else None, _written(found)
    if isinstance(text, str):
        # Half of a surrogate pair is no text, and no file would take it.
        return Reply(text=text.encode("utf-8", "replace").decode(), cut=cut, tokens=tokens)
    if isinstance(message, dict) and text is None and (cut or any(message.get(name) for name in _BESIDE_TEXT)):
        return Reply(text="", cut=cut, tokens=tokens)
    return Failure(reason="no text", detail=_shown(json.dumps(choice).encode()))


def _written(found: Mapping[str, Any]) -> int | None:
    usage = found.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and tokens >= 0 else None


def _shown(body: bytes) -> str:
    """The beginning of what came, on one line."""
    return " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN] or "(empty)"
