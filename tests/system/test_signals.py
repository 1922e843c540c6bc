"""Signals while a block runs: sent by this process to itself, or to a process of its own."""

import ctypes
import os
import signal
import threading

import pytest

from gemsmith.system.signals import STOPS, handling, heard_later, listening


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_handlers_are_back_after_the_block_and_an_ignored_signal_stays_ignored() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(ZeroDivisionError), handling(dict.fromkeys(STOPS, lambda number, _: heard.append(number))):
        send(signal.SIGINT)
        send(signal.SIGTERM)
        raise ZeroDivisionError
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_off_the_main_thread_handlers_stay_as_they_are() -> None:
    found = []

    def look() -> None:
        with handling({signal.SIGTERM: signal.SIG_IGN}), listening(found.append), heard_later():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_signal_is_heard_once_the_block_is_done_whatever_that_raised() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), heard_later():
        send(signal.SIGINT)
        done.append(1)
    with pytest.raises(KeyboardInterrupt), heard_later():
        send(signal.SIGINT)
        raise ValueError("damaged")
    assert done == [1]


def test_a_second_signal_is_heard_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), heard_later():
        send(signal.SIGINT)
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("at once") from None
        pytest.fail("the second was not heard")


def test_a_signal_is_told_while_the_main_thread_is_not_in_python() -> None:
    out, into = os.pipe()
    never = threading.Timer(60, os.write, (into, b"never"))
    never.start()
    with (
        handling({signal.SIGTERM: lambda *_: None}),
        listening(lambda number: os.write(into, bytes([number]))),
    ):
        signal.siginterrupt(signal.SIGTERM, False)  # the read goes on, so Python's own handler waits
        threading.Timer(0.05, send, (signal.SIGTERM,)).start()
        heard = ctypes.create_string_buffer(1)
        ctypes.CDLL(None).read(out, heard, 1)
    never.cancel()
    assert heard.raw == bytes([signal.SIGTERM])
