"""Conversations as an OpenAI API takes them, and its answers, read strictly: text, tokens, or why there is none."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.images.check import ImageInfo, to_data_url
from gemsmith.images.patches import PatchConfig
from gemsmith.tasks.messages import ImagePart, Message, images_of, text_of

# Of vLLM's own reasons these end an answer; `abort` and `error` end a request that has none.
_ENDED = ("stop", "length", "tool_calls", "repetition")
# Where vLLM puts what a reasoning or tool parser took out of the text; a model that wrote nothing else has answered.
_BESIDE_TEXT = ("reasoning", "reasoning_content", "tool_calls", "refusal")
_SHOWN = 300
MOST_BYTES = 2**26  # of an answer; one of 8,192 tokens with the likeliest of each has 8 MB
TOP = 20  # of the likeliest tokens, as many as vLLM gives by default


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model answered. `cut`: it reached the limit of tokens before it had ended."""

    text: str
    cut: bool
    tokens: int | None = None  # how many tokens it wrote, where the server says so


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why there is no answer: in two or three words, by which failures are counted, and in detail."""

    reason: str
    detail: str


def read_object(status: int, body: bytes) -> dict[str, Any] | Failure:
    """The JSON object that a request was answered with."""
    if status != 200:
        return Failure(reason=f"http {status}", detail=excerpt(body))
    if len(body) > MOST_BYTES:
        return Failure(reason="too long", detail=f"more than {MOST_BYTES:,} bytes: {excerpt(body)}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return Failure(reason="not JSON", detail=excerpt(body))
    return found if isinstance(found, dict) else Failure(reason="not an object", detail=excerpt(body))


def read_choice(found: Mapping[str, Any] | Failure) -> dict[str, Any] | Failure:
    """The first choice of a completion that has ended; a failure stays one."""
    if isinstance(found, Failure):
        return found
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Failure(reason="no choices", detail=excerpt(json.dumps(found).encode()))
    choice: dict[str, Any] = choices[0]
    if choice.get("finish_reason") not in _ENDED:
        reason = f"finish_reason {str(choice.get('finish_reason'))[:20]}"
        return Failure(reason=reason, detail=excerpt(json.dumps(choice).encode()))
    return choice


def read_chat(found: Mapping[str, Any] | Failure) -> Reply | Failure:
    """The text of a chat completion, empty where all of it was taken out (_BESIDE_TEXT); a failure stays one."""
    if isinstance(found, Failure):
        return found
    choice = read_choice(found)
    if isinstance(choice, Failure):
        return choice
    cut, message, usage = choice["finish_reason"] == "length", choice.get("message"), found.get("usage")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    tokens = read_count(usage.get("completion_tokens")) if isinstance(usage, dict) else None
    if isinstance(text, str):
        # Half of a surrogate pair is no text, and no file would take it.
        return Reply(text=text.encode("utf-8", "replace").decode(), cut=cut, tokens=tokens)
    if isinstance(message, dict) and text is None and (cut or any(message.get(name) for name in _BESIDE_TEXT)):
        return Reply(text="", cut=cut, tokens=tokens)
    return Failure(reason="no text", detail=excerpt(json.dumps(choice).encode()))


def read_count(said: Any) -> int | None:
    """A number of tokens that a server tells; None where it cannot be one."""
    return said if type(said) is int and 0 <= said < 2**31 else None


def excerpt(body: bytes) -> str:
    """The beginning of what came, on one line."""
    return " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN] or "(empty)"


def api_messages(
    messages: Sequence[Message], images: Sequence[ImageInfo] = (), patching: PatchConfig | None = None
) -> list[dict[str, Any]]:
    """The messages of a request; content that is text alone is a string. `patching`: see to_data_url.

    `images` are what was found of theirs, in order; bytes that have changed since are a DataError.
    """
    hashes: Iterator[str | None] = iter([image.sha256 for image in images])
    found: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                content.append(image_content(to_data_url(part.source, patching, sha256=next(hashes, None))))
            else:
                content.append({"type": "text", "text": part.text})
        found.append({"role": message.role, "content": content if images_of([message]) else text_of(message)})
    return found


def image_content(url: str) -> dict[str, Any]:
    """The part of a message's content that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, kw_only=True)
class AnswerTokens:
    """A greedy answer's tokens, and the log-probabilities of the likeliest at each place."""

    tokens: tuple[str, ...]
    top: tuple[Mapping[str, float], ...]


def read_tokens(choice: Mapping[str, Any] | Failure) -> AnswerTokens | Failure:
    """Tokens and log-probabilities of a choice of a completion or a chat; a failure stays one."""
    if isinstance(choice, Failure):
        return choice
    found: Any = choice.get("logprobs")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if "tokens" in found:
            tokens, tops = found["tokens"], [dict(top) for top in found["top_logprobs"]]
        else:
            tokens = [entry["token"] for entry in found["content"]]
            tops = [{other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in found["content"]]
        if all(math.isfinite(top[token]) for token, top in zip(tokens, tops, strict=True)):
            return AnswerTokens(tokens=tuple(tokens), top=tuple(tops))
    return Failure(reason="no log-probabilities", detail=json.dumps(choice)[:300])


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The most by which two lists of the likeliest differ; a token that one lacks counts as its least likely.

    >>> difference({"a": -0.1, "b": -3.0}, {"a": -0.2, "c": -2.0})
    1.0
    """
    if not one or not other:
        return 0.0
    lows = min(one.values()), min(other.values())
    return max(abs(one.get(token, lows[0]) - other.get(token, lows[1])) for token in {*one, *other})
