"""A process answers requests one by one, errors among the answers; one that ends says with which code."""

import sys

import pytest

from gemsmith.system.workers import WorkerEndedError, ask, draw_ahead, end_worker, open_pool, start_worker

PROGRAM = """
import os
from gemsmith.system.workers import answer_requests

def answer(request):
    if request == "leave":
        os._exit(7)
    print("this is no answer")
    return 1 / request

answer_requests(answer, errors=(ZeroDivisionError,))
"""


def test_requests_are_answered_in_order_errors_among_them_until_the_process_ends() -> None:
    worker = start_worker((sys.executable, "-P", "-c", PROGRAM))
    try:
        assert ask(worker, 4) == 0.25
        with pytest.raises(ZeroDivisionError):
            ask(worker, 0)
        assert ask(worker, 2) == 0.5
        with pytest.raises(WorkerEndedError) as ended:
            ask(worker, "leave")
        assert ended.value.code == 7
        with pytest.raises(WorkerEndedError) as ended:
            ask(worker, 1)
        assert ended.value.code == 7
    finally:
        end_worker(worker)
    assert worker.returncode == 7


def test_a_worker_leaves_sigterm_to_the_process_that_asks_it() -> None:
    """A machine that is taken away sends it to all: that the worker died of it would read like a crash."""
    worker = start_worker((sys.executable, "-P", "-c", PROGRAM))
    try:
        assert ask(worker, 4) == 0.25
        worker.terminate()
        assert ask(worker, 2) == 0.5
    finally:
        end_worker(worker)


def test_an_ended_worker_is_killed_and_its_pipes_are_closed() -> None:
    worker = start_worker((sys.executable, "-P", "-c", PROGRAM))
    end_worker(worker)
    assert worker.returncode == -9 and worker.stdin is not None and worker.stdin.closed


def test_a_pool_replaces_a_process_that_ends_and_says_why_of_its_request_alone() -> None:
    command = (sys.executable, "-P", "-c", PROGRAM)
    with open_pool(command, 2, explain=lambda code, request: RuntimeError(f"{request}: {code}")) as ask_one:
        replies = [ask_one(request) for request in (4, "leave", 2, 0, "leave", "leave", 5)]
        errors = [reply.exception() for reply in replies]
        assert [reply.result() for reply, error in zip(replies, errors, strict=True) if error is None] == [
            0.25,
            0.5,
            0.2,
        ]
    assert [str(error) for error in errors if isinstance(error, RuntimeError)] == ["leave: 7"] * 3
    assert isinstance(errors[3], ZeroDivisionError)


def test_so_many_more_are_drawn_before_the_first_is_given() -> None:
    drawn: list[int] = []
    ahead = draw_ahead((drawn.append(number) or number for number in range(5)), 2)
    assert (next(ahead), drawn) == (0, [0, 1, 2])
    assert [*ahead] == [1, 2, 3, 4]
