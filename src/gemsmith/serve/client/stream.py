"""An answer as an OpenAI server streams it, with the times that a reader feels."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from gemsmith.errors import EngineError
from gemsmith.serve.client.chat import excerpt, read_count
from gemsmith.serve.client.endpoint import ask_until_ready, key_headers
from gemsmith.serve.settings import client_options

_LONGEST_EVENT_BYTES = 2**20
CONNECT_S, IDLE_TIMEOUT_S = 5.0, 600.0  # a first token may take minutes on a CPU that reads a long prompt


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """A model that can be talked to: what it is called here, and the server's address and name for it."""

    label: str
    url: str
    model: str
    max_model_len: int | None = None  # tokens of a prompt and its answer together, where the server says so
    # What a request has of a conversation, its messages or its prompt's ids; raises EngineError.
    prompt_of: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = lambda turns: {"messages": list(turns)}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an answer is drawn; greedy by default. `max_tokens` are fewer where the server has no room for them."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class StreamedAnswer:
    """What has come of an answer so far. `tokens` are chunks until the server has said how many tokens they were."""

    text: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    elapsed_s: float = 0.0
    ended: str | None = None  # the server's finish_reason; None while the answer is still coming

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None before there are two."""
        if self.ttft_s is None or self.tokens < 2 or self.elapsed_s <= self.ttft_s:
            return None
        return (self.tokens - 1) / (self.elapsed_s - self.ttft_s)


def stream_answer(
    voice: ChatModel, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams
) -> Iterator[StreamedAnswer]:
    """The answer as it grows; the last one has `ended` set, and the server's own count of tokens where it gives one.

    Raises EngineError where the server does not exist, refuses, or breaks off. Closing the iterator ends the request.
    """
    headers, timeout = {"Content-Type": "application/json"}, httpx.Timeout(IDLE_TIMEOUT_S, connect=CONNECT_S)
    client = httpx.Client(timeout=timeout, headers=headers | key_headers(), **client_options(voice.url))
    prompt = voice.prompt_of(messages)
    url = f"{voice.url}/v1/{'chat/' if 'messages' in prompt else ''}completions"
    begin_s = time.monotonic()
    asked = {"model": voice.model, **prompt, "stream": True, "stream_options": {"include_usage": True}}
    asked |= {name: value for name, value in asdict(sampling).items() if value is not None}
    try:
        with client, contextlib.ExitStack() as stack:

            def post() -> httpx.Response:
                # json.dumps, since httpx's own refuses texts with half a surrogate pair.
                return stack.enter_context(client.stream("POST", url, content=json.dumps(asked)))

            response = ask_until_ready(post)
            if response.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
                # It may have no room for so many tokens after the prompt; not told a number, it gives what is left.
                del asked["max_tokens"]
                response = ask_until_ready(post)
            if response.status_code != httpx.codes.OK:
                shown = excerpt(next(response.iter_bytes(4096), b""))
                raise EngineError(f"{voice.model} at {voice.url} answered {response.status_code}: {shown}")
            yield from _grow(response, begin_s, voice)
    except httpx.HTTPError as error:
        raise EngineError(
            f"{voice.model} at {voice.url}: {type(error).__name__}: {error or 'no more bytes came'}; is the server up?"
        ) from None


def describe_speed(answer: StreamedAnswer) -> str:
    """The speed in a line.

    >>> describe_speed(StreamedAnswer(text="ab", tokens=11, ttft_s=0.5, elapsed_s=1.5, ended="stop"))
    'TTFT 500 ms · 10.0 tokens/s · 11 tokens in 1.5 s'
    """
    if answer.ttft_s is None:
        return "no token" if answer.ended else f"waiting for the first token: {answer.elapsed_s:.1f} s"
    rate = "" if answer.tokens_per_s is None else f" · {answer.tokens_per_s:.1f} tokens/s"
    cut = " · stopped at the limit of tokens" if answer.ended == "length" else ""
    count = f"{answer.tokens} token{'' if answer.tokens == 1 else 's'}"
    return f"TTFT {1000 * answer.ttft_s:.0f} ms{rate} · {count} in {answer.elapsed_s:.1f} s{cut}"


def _grow(response: httpx.Response, begin_s: float, voice: ChatModel) -> Iterator[StreamedAnswer]:
    answer = StreamedAnswer()
    for line in _lines(response):
        field, _, value = line.partition(b":")
        if field == b"data" and value.strip() == b"[DONE]":
            break
        if field != b"data" and len(line) <= _LONGEST_EVENT_BYTES:
            continue
        try:
            piece, ended, counted = _read_event(json.loads(value.decode("utf-8", "replace")))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise EngineError(f"{voice.model} at {voice.url} broke off: {excerpt(value)}") from None
        elapsed_s = time.monotonic() - begin_s
        if piece:
            ttft_s = elapsed_s if answer.ttft_s is None else answer.ttft_s
            answer = replace(
                answer, text=answer.text + piece, tokens=answer.tokens + 1, ttft_s=ttft_s, elapsed_s=elapsed_s
            )
        answer = replace(answer, ended=ended or answer.ended, tokens=answer.tokens if counted is None else counted)
        if not answer.ended:
            yield answer
    if answer.ended is None:
        raise EngineError(f"{voice.model} at {voice.url} broke off after {answer.tokens} tokens, without an end")
    yield answer


def _read_event(event: Any) -> tuple[str, str | None, int | None]:
    """Text, reason of the end, and number of tokens; raises ValueError and the like where it is none, or an error."""
    if event.get("error"):
        raise ValueError
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    piece = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    ended = choice.get("finish_reason")
    counted = read_count((event.get("usage") or {}).get("completion_tokens"))
    return piece.encode("utf-8", "replace").decode(), str(ended) if ended else None, counted


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines as events have them, the last perhaps too long for one; httpx's end at U+2028, which JSON has as it is."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > _LONGEST_EVENT_BYTES:
            break
    yield rest
