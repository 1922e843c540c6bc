"""Decoding in processes of their own: a decoder that crashes must not end this one, and several decode at a time."""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from gemsmith.errors import DataError, MachineError
from gemsmith.images.check import ImageInfo
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig, Patches, scale
from gemsmith.images.worker import Check, Cut
from gemsmith.system.workers import Worker, WorkerEndedError, ask, end_worker, start_worker

Item = TypeVar("Item")
# -P: in the working directory, a file or folder may have a library's name.
_COMMAND = (sys.executable, "-P", "-c", "from gemsmith.images.worker import main; main()")
_AT_ONCE = 4
"""Images that wait for each process."""


def count_processes(images: int) -> int:
    """As many as there are cores for this process, and images."""
    return max(1, min(len(os.sched_getaffinity(0)), images))


def check_images(
    sources: Sequence[str | bytes], patching: PatchConfig, *, processes: int
) -> Iterator[ImageInfo | InvalidImageError]:
    """What each of the images is, in order, or what is wrong with it."""
    with open_workers(processes) as ask:
        waiting: deque[Future[Any]] = deque()
        for source in sources:
            waiting.append(ask(Check(source, patching)))
            if len(waiting) > _AT_ONCE * processes:
                yield _found(waiting.popleft())
        while waiting:
            yield _found(waiting.popleft())


def decode_ahead(
    steps: Iterable[tuple[Item, Sequence[ImageInfo]]], patching: PatchConfig, *, processes: int, ahead: int = 2
) -> Iterator[tuple[Item, list[Patches]]]:
    """Each step's item, with the patches of its images, which are decoded while `ahead` earlier steps run.

    Of so many steps, and of no more, patches are in memory: as bytes, a quarter of what they take as float32. Raises
    DataError where a file is not what it was when it was looked at.
    """
    with open_workers(processes) as ask:
        waiting: deque[tuple[Item, list[Future[Any]]]] = deque()
        for item, images in steps:
            waiting.append((item, [ask(Cut(image, patching)) for image in images]))
            if len(waiting) > ahead:
                yield _decoded(*waiting.popleft(), patching)
        while waiting:
            yield _decoded(*waiting.popleft(), patching)


@contextmanager
def open_workers(processes: int) -> Iterator[Callable[[Check | Cut], Future[Any]]]:
    """A function that has a request answered by one of so many processes, which end with the block."""
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        running: set[Worker] = set()
        stack.callback(_end, running)  # those that a thread has started for one that was ended below
        # The threads end once the processes are gone, so they are entered before these and left after them.
        threads = stack.enter_context(ThreadPoolExecutor(processes))
        stack.callback(_end, running)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        for _ in range(processes):
            idle.put(_start(running))
        yield lambda request: threads.submit(_answer, idle, running, request)


def _start(running: set[Worker]) -> Worker:
    worker = start_worker(_COMMAND)
    running.add(worker)
    return worker


def _end(running: set[Worker]) -> None:
    while running:
        end_worker(running.pop())


def _answer(idle: "SimpleQueue[Worker]", running: set[Worker], request: Check | Cut) -> Any:
    worker = idle.get()
    try:
        return ask(worker, request)
    except WorkerEndedError as end:
        running.discard(worker)
        end_worker(worker)
        worker = _start(running)
        raise _why_it_ended(end.code, request) from None
    finally:
        idle.put(worker)


def _why_it_ended(code: int, request: Check | Cut) -> Exception:
    path = request.source if isinstance(request, Check) else request.image.path
    name = path if isinstance(path, str) and path else "a image"
    if code == -signal.SIGKILL:
        return MachineError(
            f"{name}: the process that decoded it was killed; where memory ran out, free some and run it again"
        )
    if code < 0:
        line = f"crashes its decoder ({signal.Signals(-code).name})"
        return (
            InvalidImageError("damaged", line)
            if isinstance(request, Check)
            else DataError(f"{name}: {line}; take it out")
        )
    return RuntimeError(f"{' '.join(_COMMAND)} ended with {code}; its traceback is above")


def _found(answer: Future[Any]) -> ImageInfo | InvalidImageError:
    try:
        image: ImageInfo = answer.result()
        return image
    except InvalidImageError as bad:
        return bad


def _decoded(item: Item, answers: list[Future[Any]], patching: PatchConfig) -> tuple[Item, list[Patches]]:
    return item, [scale(answer.result(), patching) for answer in answers]
