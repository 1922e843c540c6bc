"""Requests to a server that may hang, drip, break off or answer with rubbish: each gets an answer or a counted failure.

In one event loop, not in threads: a thread that waits for a server cannot be stopped, so Ctrl-C would wait, too.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import httpx

from gemsmith.errors import EngineError, InputError
from gemsmith.serve.client.chat import Failure, excerpt, read_object
from gemsmith.serve.client.endpoint import KEY_VARIABLES, WAITS_S, AnyServer, ask_whole, retry_after_s
from gemsmith.serve.server import Server
from gemsmith.serve.settings import client_options
from gemsmith.system.signals import handling

CONNECT_S = 10.0
# A request is given up after PROMPT_S, in which the prompts of all requests under way are read, and TOKEN_S for each
# token that it may write. The server is on this machine, so what takes time is the model; one that writes less than a
# token a second in each of its streams is not evaluated but debugged.
PROMPT_S, TOKEN_S = 120.0, 1.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is posted to `path`, such as /v1/chat/completions; `body` has max_tokens where text is to be written."""

    path: str
    body: Mapping[str, Any]

    @property
    def timeout_s(self) -> float:
        return PROMPT_S + TOKEN_S * float(self.body.get("max_tokens", 0))


def ask_all(
    server: AnyServer,
    requests: Iterable[Request],
    heard: Callable[[int, dict[str, Any] | Failure], None],
    *,
    concurrency: int,
    retried: Callable[[int, str], None] = lambda _number, _reason: None,
) -> None:
    """Calls `heard` with each request's index and the JSON object that answers it, in the order in which they come.

    A request is taken when there is room for it, so that those of an iterator are made one by one. Ends at once at
    Ctrl-C, at SIGTERM, and where `heard` raises. Raises EngineError where the server has died, InputError where it
    asks for another key. A request that cannot connect, is cut off, or is answered with 429 or 5xx is tried again a few
    times, each after a call of `retried` with its index and the reason, and no sooner than a Retry-After of at most
    MOST_WAIT_S says; one that takes too long not.
    """
    numbered = iter(enumerate(requests))

    async def work(client: httpx.AsyncClient) -> None:
        for number, request in numbered:  # shared: each takes the next
            for wait_s in (*WAITS_S, None):
                found, asked_s = await _post(client, request)
                if not isinstance(found, Failure):
                    break
                server.check()
                if wait_s is None or asked_s is None:
                    break
                retried(number, found.reason)
                await asyncio.sleep(max(wait_s, asked_s))
            heard(number, found)

    async def ask() -> None:
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        # The whole request's is kept in _post: a read's would not end a server that drips.
        timeout, options = httpx.Timeout(None, connect=CONNECT_S), client_options(server.url)
        async with httpx.AsyncClient(
            base_url=server.url, headers=server.headers, timeout=timeout, limits=limits, **options
        ) as client:
            workers = [asyncio.create_task(work(client)) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    _run_until_stopped(ask())


def ask_each(
    server: Server,
    requests: Iterable[Request],
    read: Callable[[dict[str, Any] | Failure], Answer | Failure],
    *,
    to: str,
    concurrency: int = 1,
) -> list[Answer]:
    """What `read` makes of each answer, in order; `to` is what was asked. Raises EngineError for a failure of any."""
    answers: dict[int, Answer] = {}

    def heard(number: int, found: dict[str, Any] | Failure) -> None:
        answer = read(found)
        if isinstance(answer, Failure):
            raise EngineError(
                f"vLLM at {server.url} answered {to} with {answer.reason}: {answer.detail}; its log is {server.log}"
            )
        answers[number] = answer

    ask_all(server, requests, heard, concurrency=concurrency)
    return [answers[number] for number in sorted(answers)]


async def _post(client: httpx.AsyncClient, request: Request) -> tuple[dict[str, Any] | Failure, float | None]:
    """What one try finds, and how long the server asks to be left alone; None where another would find the same.

    Raises InputError where the server asks for another key.
    """
    try:
        async with asyncio.timeout(request.timeout_s):
            # json.dumps, since httpx's own refuses texts with half a surrogate pair.
            content, headers = json.dumps(request.body), {"Content-Type": "application/json"}
            response = await ask_whole(client, "POST", request.path, content=content, headers=headers)
    except TimeoutError:
        return Failure(reason="timeout", detail=f"no whole answer within {request.timeout_s:.0f} s"), None
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.DecodingError) as error:
        return Failure(reason="cut off", detail=f"{type(error).__name__}: {error}"), 0.0
    except httpx.HTTPError as error:
        return Failure(reason="no connection", detail=f"{type(error).__name__}: {error}"), 0.0
    if response.status_code == 401:  # as all that are still to be asked
        raise InputError(
            f"{client.base_url} refuses a request with http 401 ({excerpt(response.content)}); earlier answers are "
            f"kept: set ${' or $'.join(KEY_VARIABLES)}, and run the same command again"
        )
    may_pass = response.status_code == 429 or response.status_code >= 500
    return read_object(response.status_code, response.content), retry_after_s(response) if may_pass else None


def _run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine, which Ctrl-C and SIGTERM cancel; what they raise elsewhere is raised once it has ended.

    asyncio does that for Ctrl-C alone. What a handler of SIGTERM raises in the loop would be lost in some callback.
    """
    told: list[int] = []

    async def stoppable() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop(number: int, _frame: FrameType | None) -> None:
            told.append(number)
            loop.call_soon_threadsafe(task.cancel)

        with handling({signal.SIGTERM: stop}):
            await work

    try:
        asyncio.run(stoppable())
    finally:
        if told:
            signal.raise_signal(signal.SIGTERM)
