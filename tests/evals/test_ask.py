"""Every request ends, as an answer or as a failure with a reason, and all of them end at once when we are told to
stop."""

import asyncio
import gzip
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

import pytest

from gemsmith.errors import EngineError, Terminated
from gemsmith.serve.client import batch as ask
from gemsmith.serve.client import chat, endpoint
from gemsmith.serve.client.batch import Request, ask_all
from gemsmith.serve.client.chat import Failure
from support.cases import each


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "WAITS_S", (0.01, 0.01, 0.01))


@pytest.fixture
def sigterm() -> Iterator[None]:
    """SIGTERM raises what it raises under the command line."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    yield
    assert signal.signal(signal.SIGTERM, before) is stop


@pytest.fixture
def deaf_url() -> Iterator[str]:
    """The address of a port where a connection is neither made nor refused, since its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for filler in fillers:
            filler.close()


def requests(count: int) -> list[Request]:
    return [Request(path="/v1/chat/completions", body={"number": number, "max_tokens": 8}) for number in range(count)]


def outcomes(server: Any, count: int, *, concurrency: int = 3, retried: Any = lambda *_: None) -> dict[int, Any]:
    """Index -> the object that came, or the reason why none did."""
    found: dict[int, Any] = {}
    ask_all(
        server,
        requests(count),
        lambda number, came: found.__setitem__(number, came.reason if isinstance(came, Failure) else came),
        concurrency=concurrency,
        retried=retried,
    )
    return found


def test_each_request_is_answered_under_its_own_index(hostile: Any) -> None:
    hostile.deed = lambda asked: (200, b'{"number": %d}' % asked["number"])
    assert outcomes(hostile.server(), 20) == {number: {"number": number} for number in range(20)}
    assert len(hostile.asked) == 20


def test_no_more_requests_are_under_way_than_allowed(hostile: Any) -> None:
    together, now, most, changing = threading.Barrier(3, timeout=60), 0, 0, threading.Lock()

    def deed(_asked: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal now, most
        with changing:
            now += 1
            most = max(most, now)
        together.wait()
        time.sleep(0.05)
        with changing:
            now -= 1
        return 200, b"{}"

    hostile.deed = deed
    outcomes(hostile.server(), 9, concurrency=3)
    assert most == 3


@each(("deed", "reason", "tries"), [
    ((500, b"no"), "http 500", 4),
    ((503, b"no"), "http 503", 4),
    ((429, b"no"), "http 429", 4),
    ("cut", "cut off", 4),
    ((400, b"no"), "http 400", 1),
    ((404, b"no"), "http 404", 1),
    ((302, b""), "http 302", 1),
    ((200, b"<html>"), "not JSON", 1),
    ((200, b"[]"), "not an object", 1),
    ((200, b"no gzip", {"Content-Encoding": "gzip"}), "cut off", 4),
    ((200, b" " * 1001), "too long", 1),
    ((200, gzip.compress(b" " * 100_000), {"Content-Encoding": "gzip"}), "too long", 1),
])  # fmt: skip
def test_only_what_may_pass_is_tried_again_and_not_without_end(
    deed: Any, reason: str, tries: int, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.forget()
    hostile.deed = lambda _asked: deed
    for module in (chat, endpoint):
        monkeypatch.setattr(module, "MOST_BYTES", 1000)
    assert outcomes(hostile.server(), 1) == {0: reason}
    assert len(hostile.asked) == tries


@pytest.mark.parametrize("deed", [(500, b"no"), (429, b"no"), "cut"])
def test_one_failure_that_passes_costs_nothing(deed: Any, hostile: Any) -> None:
    hostile.deed = lambda _asked: deed if len(hostile.asked) == 1 else (200, b'{"a": 1}')
    assert outcomes(hostile.server(), 2, concurrency=1) == {0: {"a": 1}, 1: {"a": 1}}


def test_each_try_after_the_first_is_told_with_its_reason_and_no_other(hostile: Any) -> None:
    deeds: list[Any] = [(429, b"no"), "cut", (500, b"no"), (200, b"{}"), (200, b"<html>")]
    hostile.deed = lambda _asked: deeds[len(hostile.asked) - 1]
    told: list[tuple[int, str]] = []
    assert outcomes(hostile.server(), 2, concurrency=1, retried=lambda *what: told.append(what)) == {
        0: {},
        1: "not JSON",
    }
    assert told == [(0, "http 429"), (0, "cut off"), (0, "http 500")]


@each(
    ("header", "waits_s"),
    [
        ("0.4", 0.4),
        ("3600", 0.5),
        ("-5", 0),
        ("soon", 0),
        ("nan", 0),
        ("Fri, 21 Oct 2095 07:28:00 GMT", 0.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 99 Dec 99999999999 99:59:59 GMT", 0),
    ],
)
def test_a_retry_after_is_waited_for_up_to_a_bound(
    header: str, waits_s: float, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MOST_WAIT_S", 0.5)
    hostile.forget()
    hostile.deed = lambda _asked: (429, b"", {"Retry-After": header}) if len(hostile.asked) == 1 else (200, b"{}")
    begin_s = time.monotonic()
    assert outcomes(hostile.server(), 1) == {0: {}}
    assert waits_s <= time.monotonic() - begin_s < waits_s + 60


@pytest.mark.parametrize("deed", ["hang", "drip"])
def test_a_request_that_hangs_or_drips_is_given_up_and_the_others_are_not(
    deed: str, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask.Request, "timeout_s", property(lambda asked: 0.3 if asked.body["number"] == 1 else 60))
    hostile.deed = lambda asked: deed if asked["number"] == 1 else (200, b"{}")
    assert outcomes(hostile.server(), 4) == {0: {}, 1: "timeout", 2: {}, 3: {}}
    assert len(hostile.asked) == 4


def test_the_time_a_request_is_given_follows_from_the_tokens_that_it_may_write() -> None:
    assert Request(path="/", body={"max_tokens": 512}).timeout_s == pytest.approx(632)


def test_a_connection_that_is_neither_made_nor_refused_is_given_up(
    deaf_url: str, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "CONNECT_S", 0.1)
    hostile.url = deaf_url
    assert outcomes(hostile.server(), 1) == {0: "no connection"}


def test_a_server_that_has_died_is_an_error_with_the_end_of_its_log(hostile: Any, tmp_path: Any) -> None:
    def deed(_asked: dict[str, Any]) -> str:
        hostile.died.set()
        return "cut"

    hostile.deed = deed
    (tmp_path / "log").write_text("RuntimeError: out of memory\n")
    with pytest.raises(EngineError, match=r"vLLM died \(exit code 3\)(.|\n)*out of memory"):
        outcomes(hostile.server(log=tmp_path / "log"), 1)


def test_what_is_raised_on_an_answer_ends_the_others(hostile: Any) -> None:
    hostile.deed = lambda asked: "hang" if asked["number"] else (200, b"{}")

    def heard(_number: int, _came: Any) -> None:
        raise EngineError("enough")

    begin_s = time.monotonic()
    with pytest.raises(EngineError, match="enough"):
        ask_all(hostile.server(), requests(4), heard, concurrency=4)
    assert time.monotonic() - begin_s < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("trouble", ["hang", "drip", "connect", "retry"])
def test_a_signal_ends_it_at_once_whatever_the_server_does(
    number: int, trouble: str, hostile: Any, deaf_url: str, sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "WAITS_S", (600.0,))
    hostile.deed = lambda _asked: (500, b"") if trouble == "retry" else trouble
    hostile.url = deaf_url if trouble == "connect" else hostile.url
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        ask_all(hostile.server(), requests(8), lambda _number, _came: None, concurrency=4)
    assert time.monotonic() - begin_s < 60
    timer.join()


def test_a_handler_of_sigterm_that_lets_the_program_go_on_does_not_make_half_the_answers_all(hostile: Any) -> None:
    def deed(_asked: dict[str, Any]) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "hang"

    hostile.deed = deed
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with pytest.raises(asyncio.CancelledError):
            ask_all(hostile.server(), requests(1), lambda _number, _came: None, concurrency=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_it_works_outside_the_main_thread_too(hostile: Any) -> None:
    with ThreadPoolExecutor() as pool:
        assert set(pool.submit(outcomes, hostile.server(), 2).result(10)) == {0, 1}
