"""Processes that end with the block that started them."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gemsmith.errors import MachineError, explain_os_error

SUPERVISOR = Path(__file__).with_name("supervisor.py")
GRACE_S = 15.0
_ROOM_TO_SAY_SO_BYTES = 16 * 1024


@contextlib.contextmanager
def supervised(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, grace_s: float | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A running command with its output in `log`; it and all its children are gone when the block ends.

    `grace_s`: how long they may take to end by themselves, by default GRACE_S. The process is that of supervisor.py,
    which has a session of its own: Ctrl-C in a terminal reaches it through us alone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)  # a server that another command keeps up may still write the old one
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid())]
    guarded = [*supervisor, str(GRACE_S if grace_s is None else grace_s), *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process, grace_s=GRACE_S)


def stop(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Ends a guarded command, and kills what is left of it after the grace."""
    process.terminate()
    # To supervisor.py, a second signal means the end of its patience.
    for insist in (process.terminate, process.kill):
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def kill_tree(process: int) -> None:
    """Kills a process and all that it has started; where there is no /proc, as on macOS, it alone."""
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGSTOP)  # so that it starts no more
        lists = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
        os.kill(process, signal.SIGKILL)
        for child in " ".join(lists).split():
            kill_tree(int(child))


def last_lines(log: Path, count: int = 15) -> str:
    """The last lines of a log that are not empty, each cut at 300 characters, after the first that names an error."""
    text = log.read_text(encoding="utf-8", errors="replace")
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)  # vLLM colors its process names
    lines = [line.rstrip()[:300] for line in plain.splitlines() if line.strip()]
    last = lines[-count:]
    # vLLM ends with "see root cause above", and what is above is a hundred lines up.
    cause = next((line for line in lines if re.search(r"\b\w+(Error|Exception): ", line)), None)
    if cause and cause not in last:
        last = [cause, "...", *last]
    return "\n".join(last) or "(empty)"


def describe_exit(code: int) -> str:
    """A guarded command's exit code, and of SIGKILL who mostly sends it and what to do."""
    killed = (
        ": killed by SIGKILL, as the kernel does where the machine's memory, not the GPU's, runs out; free some, or "
        "take a machine with more"
    )
    return f"{code}{killed if code in (-signal.SIGKILL, 128 + signal.SIGKILL) else ''}"


def refuse_full_disk(log: Path) -> None:
    """Raises MachineError where a process failed since the disk is full: its log says so, or had no room to."""
    full = os.strerror(errno.ENOSPC) in log.read_text(encoding="utf-8", errors="replace")
    if full or shutil.disk_usage(log.parent).free < _ROOM_TO_SAY_SO_BYTES:
        raise MachineError(explain_os_error(OSError(errno.ENOSPC, "", str(log.parent))))
