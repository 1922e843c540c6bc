"""A process answers requests one by one, errors among the answers; one that ends says with which code."""

import sys

import pytest

from gemsmith.system.workers import WorkerEndedError, ask, end_worker, start_worker

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
