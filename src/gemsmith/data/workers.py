"""Rendering in processes of their own: a template is a program, which must not bring down or hold up this one.

Several of them where there is much to render: a template renders in Python, whose lock lets only one thread do so at a
time.
"""

import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from gemsmith.data.chat_template import ChatTemplateSource
from gemsmith.data.documents import Document
from gemsmith.data.tokenize import Rendered
from gemsmith.data.worker import Opening, Packed, Prompts
from gemsmith.errors import DataError, MachineError
from gemsmith.system.workers import Limits, Worker, WorkerEndedError, ask, end_worker, send, start_worker
from gemsmith.tasks.messages import text_of

_CHUNK = 512
# Fewer characters a process than this are rendered before it has read its tokenizer.
_FEWEST_CHARACTERS = 8_000_000
# -P: in the working directory, a file or folder may have a library's name.
_COMMAND = (sys.executable, "-P", "-c", "from gemsmith.data.worker import main; main()")


def count_processes(documents: Sequence[Document]) -> int:
    """As many as there are cores for this process and work enough for; 1: not worth a second."""
    characters = sum(len(text_of(message)) for document in documents for message in document.messages)
    return max(1, min(len(os.sched_getaffinity(0)), characters // _FEWEST_CHARACTERS))


def render_in_processes(
    folder: Path,
    template: ChatTemplateSource,
    documents: Iterable[Document],
    processes: int,
    *,
    limits: Limits | None = None,
) -> Iterator[Rendered]:
    """What render_documents gives, in its order, made by so many processes.

    Raises what that raises, for the first such document, and DataError where the template crashes or needs more than
    the limits.
    """
    opening = Opening(folder=folder, template=template, limits=limits or Limits())
    chunks = iter(documents)
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        # The threads end once the processes are gone, so it is entered first and left last.
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        for _ in range(processes):
            idle.put(_start(opening, processes, stack))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting: deque[Future[Packed]] = deque()
        while chunk := list(islice(chunks, _CHUNK)):
            waiting.append(pool.submit(_render, idle, opening, chunk))
            if len(waiting) > 2 * processes:
                yield from _unpack(waiting.popleft().result())
        while waiting:
            yield from _unpack(waiting.popleft().result())


def check_prompts_in_process(
    folder: Path, template: ChatTemplateSource, rows: Sequence[tuple[Document, int]], *, limits: Limits | None = None
) -> list[np.ndarray]:
    """What check_prompts gives, from another process. Raises what that raises, and DataError as render_in_processes."""
    opening = Opening(folder=folder, template=template, limits=limits or Limits())
    with ExitStack() as stack:
        worker, documents = _start(opening, 1, stack), [document for document, _ in rows]
        found: list[np.ndarray] = _ask(worker, opening, Prompts(tuple(rows)), documents)
        return found


def _start(opening: Opening, processes: int, stack: ExitStack) -> Worker:
    # Several leave the other cores to each other.
    worker = start_worker(_COMMAND, {**os.environ, "TOKENIZERS_PARALLELISM": "true" if processes == 1 else "false"})
    stack.callback(end_worker, worker)
    with suppress(BrokenPipeError):  # where it cannot even start, _ask says so
        send(worker, opening)
    return worker


def _render(idle: "SimpleQueue[Worker]", opening: Opening, documents: list[Document]) -> Packed:
    worker = idle.get()
    try:
        packed: Packed = _ask(worker, opening, documents, documents)
        return packed
    finally:
        idle.put(worker)


def _ask(worker: Worker, opening: Opening, request: object, documents: Sequence[Document]) -> Any:
    """The worker's answer. Raises the error that it answers with, or why it ended; `documents` are the request's."""
    try:
        return ask(worker, request)
    except WorkerEndedError as end:
        raise _why_it_ended(end.code, opening, documents) from None


def _why_it_ended(code: int, opening: Opening, documents: Sequence[Document]) -> Exception:
    template, rows = f"chat template {opening.template.source}", f"{documents[0].origin} to {documents[-1].origin}"
    mend = "mend it, or set data.template to another"
    if code == -signal.SIGVTALRM:
        seconds = f"{opening.limits.killed_after_s:g} s of CPU"
        return DataError(f"{template} takes more than {seconds} in one step, at one of {rows}; {mend}")
    if code == -signal.SIGKILL:
        return MachineError(
            f"{rows}: the process that rendered them was killed; where memory ran out, free some and run it again"
        )
    if code < 0:
        return DataError(f"{template} crashes Python ({signal.Signals(-code).name}), at one of {rows}; {mend}")
    return RuntimeError(f"{' '.join(_COMMAND)} ended with {code}; its traceback is above")


def _unpack(packed: Packed) -> Iterator[Rendered]:
    ids, trained, lengths, origins, images = packed
    ends = np.cumsum(lengths)
    for end, length, origin, seen in zip(ends, lengths, origins, images, strict=True):
        yield Rendered(ids=ids[end - length : end], trained=trained[end - length : end], origin=origin, images=seen)
