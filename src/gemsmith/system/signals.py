"""Other handlers of signals while a block runs."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
STOPS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """These handlers in place of others. What is ignored stays so: a shell's background jobs have no Ctrl-C."""
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number, handler in handlers.items():
                if (present := signal.getsignal(number)) != signal.SIG_IGN:
                    before[number] = present
                    signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def heard_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM are heard once the block is done, and a second one at once.

    For Orbax: raised while it reads, they come out as damage; raised while it begins a save, it forgets that save.
    """
    before = {number: handler for number in STOPS if callable(handler := signal.getsignal(number))}
    caught: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            before[signal.Signals(number)](number, frame)

    try:
        with handling(dict.fromkeys(before, later)):
            yield
    finally:
        if caught:
            before[signal.Signals(caught[0])](caught[0], None)


def leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def listening(heard: Callable[[int], None]) -> Iterator[None]:
    """Calls `heard` with the number of each signal that has a handler, in a thread; on the main thread alone.

    At once: handlers themselves wait until the main thread is back in Python, which a step may keep it out of.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while number := os.read(reading, 1):
            heard(number[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
        os.close(reading)
