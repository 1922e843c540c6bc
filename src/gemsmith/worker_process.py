"""Processes that answer requests in pickle, over stdin and stdout: what they do may crash without ending this one."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Worker = subprocess.Popen[bytes]


class WorkerEndedError(Exception):
    """A process ended before it had answered; `code` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def start_worker(command: tuple[str, ...], environment: dict[str, str] | None = None) -> Worker:
    """A process that runs `command`, which calls answer_requests."""
    # Ctrl-C is this process's affair, so the worker is not in its group.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def send(worker: Worker, request: object) -> None:
    """Raises BrokenPipeError where the process is gone."""
    assert worker.stdin is not None, "asked for"
    pickle.dump(request, worker.stdin, pickle.HIGHEST_PROTOCOL)
    worker.stdin.flush()


def ask(worker: Worker, request: object) -> Any:
    """The answer. Raises it where it is an exception, and WorkerEndedError."""
    try:
        send(worker, request)
        assert worker.stdout is not None, "asked for"
        reply = pickle.load(worker.stdout)  # noqa: S301 - from our own process
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # the last: it ended in the middle
        raise WorkerEndedError(worker.wait()) from None
    if isinstance(reply, Exception):
        raise reply
    return reply


def end_worker(worker: Worker) -> None:
    worker.kill()
    with suppress(BrokenPipeError), worker:  # closing its stdin sends what was left
        pass


def answer_requests(answer: Callable[[Any], Any], *, errors: tuple[type[Exception], ...]) -> None:
    """In the process: answers until stdin ends, or whoever asked is gone; `errors` are answers, others end it."""
    # A machine that is about to be taken away sends it to all processes; whoever asked ends this one in its own time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not come between the replies
    while True:
        try:
            request = pickle.load(requests)  # noqa: S301 - from the process that started this one
        except EOFError:
            return
        try:
            reply = answer(request)
        except errors as error:
            reply = error
        try:
            pickle.dump(reply, replies, pickle.HIGHEST_PROTOCOL)
            replies.flush()
        except BrokenPipeError:
            return
