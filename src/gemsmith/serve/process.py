"""Processes that end with the block that started them."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 15.0


@contextlib.contextmanager
def guarded(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running command with its output in `log`; it and all its children are gone when the block ends, however it ends.

    The process is that of guard.py, which has a session of its own: Ctrl-C in a terminal reaches it through us alone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(GRACE_S)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )
    try:
        yield process
    finally:
        _stop(process)


def last_lines(log: Path, count: int = 15) -> str:
    """The last lines of a log that are not empty, each cut at 300 characters; before them the first that names an error.

    vLLM ends with "see root cause above", and what is above is a hundred lines up.
    """
    lines = [line.rstrip()[:300] for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-count:]
    cause = next((line for line in lines if re.search(r"\b\w+(Error|Exception): ", line)), None)
    if cause and cause not in last:
        last = [cause, "...", *last]
    return "\n".join(last) or "(empty)"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S + 10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
