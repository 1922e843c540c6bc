"""Runs a command and leaves nothing of it behind, whoever is told to stop or is killed.

A script of its own (`python supervisor.py PARENT_PID GRACE_S COMMAND…`), since a killed process can clean up nothing.
Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(arguments: Sequence[str]) -> int:
    """The command's exit code, once it and everything that it started are gone."""
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), list(arguments[2:])
    told: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become our children, so that they can be found
    follow = partial(_prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    # preexec_fn is safe here: this process has one thread.
    # vLLM leaves sockets and files there. A short name: a socket's path may have no more than 100 bytes.
    with tempfile.TemporaryDirectory(prefix="g", ignore_cleanup_errors=True) as scratch:
        given: dict[str, Any] = {"env": os.environ | {"TMPDIR": scratch}, "preexec_fn": follow}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, **given)
        while child.poll() is None and not told and os.getppid() == parent:
            time.sleep(POLL_S)
        _end_group(child, grace_s, told)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the process group alone is what is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_group(child: subprocess.Popen[bytes], grace_s: float, told: Sequence[int]) -> None:
    """Ends the group: SIGTERM, and after the grace, or at a second signal, SIGKILL for the rest and its orphans."""
    deadline_s = time.monotonic() + grace_s
    _signal_group(child.pid, signal.SIGTERM)
    while _is_left(child):
        if time.monotonic() > deadline_s or len(told) > 1:
            _signal_group(child.pid, signal.SIGKILL)
            for stray in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
        time.sleep(POLL_S)


def _is_left(child: subprocess.Popen[bytes]) -> bool:
    ended = child.poll() is not None
    if ended:  # only then: waiting for any child would take the command's exit code away
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return not ended or bool(_children()) or _signal_group(child.pid, 0)


def _signal_group(group: int, number: int) -> bool:
    """Whether the group still has a process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return False
    return True


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # no /proc, as on macOS
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
