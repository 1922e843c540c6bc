"""Processes that answer requests in pickle, over stdin and stdout: what they do may crash without ending this one.

`limited` bounds, inside such a process, the CPU and memory that somebody else's code may use. The kernel counts them:
one comparison of nested lists, or one power, is a single step of Python that can take for ever.
"""

import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Worker = subprocess.Popen[bytes]
Item = TypeVar("Item")


class WorkerEndedError(Exception):
    """A process ended before it had answered; `code` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def worker_command(module: str) -> tuple[str, ...]:
    """The command that runs the `main` of a module, which calls answer_requests."""
    # -P: in the working directory, a file or folder may have a library's name.
    return (sys.executable, "-P", "-c", f"from {module} import main; main()")


@contextmanager
def open_pool(
    command: tuple[str, ...],
    processes: int,
    *,
    explain: Callable[[int, Any], Exception],
    opening: object = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Callable[[Any], "Future[Any]"]]:
    """A function that has a request answered by one of so many processes, which end with the block.

    Each is sent `opening` first, where there is one, and another takes its place where it ends before it has answered:
    that request raises what `explain` makes of the return code and the request.
    """
    from concurrent.futures import ThreadPoolExecutor  # here: a tenth of the start of a worker, which has no use for it

    idle: SimpleQueue[Worker | None] = SimpleQueue()  # None: not started yet
    running: set[Worker] = set()
    closing = threading.Event()

    def start() -> Worker:
        worker = start_worker(command, environment, opening)
        running.add(worker)
        if closing.is_set():
            end_worker(worker)
        return worker

    def answer(request: Any) -> Any:
        worker = idle.get()
        try:
            worker = worker or start()
            return ask(worker, request)
        except WorkerEndedError as ended:
            if worker is not None:
                running.discard(worker)
                end_worker(worker)
            worker = None
            raise explain(ended.code, request) from None
        finally:
            idle.put(worker)

    for _ in range(processes):
        idle.put(None)
    with ThreadPoolExecutor(processes) as threads:
        try:
            yield lambda request: threads.submit(answer, request)
        finally:  # the threads end once the processes are gone
            threads.shutdown(wait=False, cancel_futures=True)
            closing.set()
            for worker in [*running]:
                end_worker(worker)


def draw_ahead(items: Iterable[Item], ahead: int) -> Iterator[Item]:
    """The items in order, each once `ahead` more have been drawn: of futures, as many are under way."""
    waiting: deque[Item] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > ahead:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def start_worker(command: tuple[str, ...], environment: dict[str, str] | None = None, opening: object = None) -> Worker:
    # Ctrl-C is this process's affair, so the worker is not in its group.
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, process_group=0)
    if opening is not None:
        with suppress(BrokenPipeError):  # where it cannot even start, `ask` says so
            send(worker, opening)
    return worker


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


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """CPU from one `restart_clock` to the next, and memory beyond what the process has when it comes under them."""

    cpu_s: float = 10.0
    memory_bytes: int = 512 * 2**20

    @property
    def killed_after_s(self) -> float:
        """CPU after which the kernel ends the process: OutOfTime can be raised only between two steps of Python."""
        return 2 * self.cpu_s


class OutOfTime(BaseException):
    """The CPU limit. No Exception: Jinja takes each of those for an expression that it cannot compute in advance."""


_current: ProcessLimits | None = None


@contextmanager
def limited(limits: ProcessLimits | None, *, extra_bytes: int = 0) -> Iterator[None]:
    """Inside, too much memory is a MemoryError, too much CPU an OutOfTime or SIGVTALRM; in the main thread only."""
    global _current  # noqa: PLW0603 - the kernel's timers and limits are the process's, too
    if limits is None:
        yield
        return

    def raise_out_of_time(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"{limits.cpu_s:g} s")

    handler = signal.signal(signal.SIGPROF, raise_out_of_time)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([in_use + limits.memory_bytes + extra_bytes, *bounds]), hard))
    _current = limits
    restart_clock()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _current = None
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)


def restart_clock() -> None:
    """The CPU limit counts from here; takes a microsecond. Does nothing where no limits hold."""
    if _current is not None:
        signal.setitimer(signal.ITIMER_PROF, _current.cpu_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, _current.killed_after_s)
