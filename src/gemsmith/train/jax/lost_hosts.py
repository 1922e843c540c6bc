"""Passes on what a process writes to stderr; of a lost host one line, in place of what JAX says before it aborts.

A script of its own (`python lost_hosts.py HOSTS`), which outlives the process. Standard library only.
"""

import os
import re
import signal
import sys
from threading import Timer

_FIRST = re.compile(
    rb"[EF]\d{4} .*(coordination_service\w*\.cc|client\.h):\d+\]"
    rb"|ERROR:absl:\[process=\d+\] Failed to run \d+ Handler Commit"  # a save that waits for the lost one
)
_PATIENCE_S = 5
_ABORTS = "Terminating process because the JAX distributed service"
_TWICE = re.compile(r"(\d+) unexpectedly tried to connect with a different incarnation|a newer incarnation")
_SILENT = re.compile(r"Task (\d+) heartbeat timeout|stopped sending heartbeats\):\s*(\d+)")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # One that hangs in C may hold Python's lock, without which it does not end.
    end = Timer(_PATIENCE_S, os.kill, (os.getppid(), signal.SIGKILL))
    held: list[bytes] = []
    for line in sys.stdin.buffer:
        if held or _FIRST.match(line):
            held.append(line)
            if _ABORTS.encode() in line and not end.is_alive():
                end.start()
        else:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
    end.cancel()
    text = b"".join(held).decode(errors="replace")
    if _ABORTS in text and (twice := _TWICE.search(text)):
        again = f"host {twice[1]}" if twice[1] else "this host"
        text = (
            f"error: training: {again} of {sys.argv[1]} was started twice, or again before the others had ended; start "
            "each once, with the same command\n"
        )
    elif _ABORTS in text and "/RegisterTask" in text:
        text = f"error: training: not all {sys.argv[1]} hosts have come; start each with the same command\n"
    elif _ABORTS in text:
        found = _SILENT.search(text)
        host = found[1] or found[2] if found else 0  # where the first is lost, nobody is left to say so
        text = (
            f"error: training: host {host} of {sys.argv[1]} is lost: it was killed or suspended, has failed, or cannot "
            "be reached; all hosts end, and continue from the last saved step with the same command on each\n"
        )
    sys.stderr.write(text)


if __name__ == "__main__":
    main()
