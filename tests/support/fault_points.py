"""Commands to which something happens at a named place, each in a process of its own: a server that imports once.

It reads lines of JSON: the command line, where its stderr goes, and $GEMSMITH_FAULT, such as
`KILL 2 gemsmith.train.loop:TrainSession.finish`: a signal that the process gets at that call of a function, or
`ENOSPC`, an error that this call and all after it raise, or `SLOW 500 os:fsync`: each call takes as many milliseconds
longer. Several stand with a comma between them. For each command it prints the number of the process, and what that
ended with.
"""

import errno
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def arm(fault: str) -> None:
    name, number, place = fault.split()
    module, _, path = place.partition(":")
    *owners, function = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    call, calls = getattr(owner, function), []

    @functools.wraps(call)
    def reached(*given, **options):
        if name == "SLOW":
            time.sleep(int(number) / 1000)
            return call(*given, **options)
        calls.append(1)
        if hasattr(errno, name) and len(calls) >= int(number):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), "/a/file")
        if len(calls) == int(number) and not hasattr(errno, name):
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        return call(*given, **options)

    setattr(owner, function, reached)


def serve(modules: list[str]) -> None:
    from gemsmith.cli import main

    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        arguments, err, fault = json.loads(line)
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            for one in filter(None, fault.split(",")):
                arm(one)
            main(arguments)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Commands:
    """The other side of the server, in the test's process."""

    def __init__(self, server: subprocess.Popen[str], err: Path) -> None:
        self._server, self._err = server, err

    def start(self, *arguments: object, fault: str = "") -> int:
        """The number of a process that runs `gemsmith …`."""
        line = json.dumps([[str(each) for each in arguments], str(self._err), fault])
        print(line, file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def wait(self) -> tuple[int, str]:
        """What it ended with, and what it wrote to stderr."""
        code = int(self._server.stdout.readline())
        return code, self._err.read_text(encoding="utf-8")

    def run(self, *arguments: object, fault: str = "") -> tuple[int, str]:
        self.start(*arguments, fault=fault)
        return self.wait()


def state(number: int) -> str:
    """T of a process that is suspended."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(condition: Callable[[], bool], number: int) -> None:
    """Waits for the condition as long as the process is there."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert state(number) not in "ZX" and time.monotonic() < deadline_s
        time.sleep(0.05)


@contextmanager
def commands(folder: Path, *modules: str) -> Iterator[Commands]:
    command = [sys.executable, "-W", "ignore", __file__, *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Commands(server, folder / "stderr")
        server.stdin.close()


if __name__ == "__main__":
    serve(sys.argv[1:])
