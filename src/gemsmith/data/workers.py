"""Rendering in several processes: a template renders in Python, whose lock lets only one thread do so at a time."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from gemsmith.data.render import Rendered, Renderer, open_renderer, render_documents
from gemsmith.data.rows import Document

_CHUNK = 512
# Fewer characters a process than this are rendered before it has read its tokenizer.
_FEWEST_CHARACTERS = 8_000_000

_renderer: Renderer | None = None
_Packed = tuple[np.ndarray, np.ndarray, list[int], list[str]]


def count_processes(documents: Sequence[Document]) -> int:
    """As many as there are cores for this process and work enough for; 1: not worth a second."""
    characters = sum(len(message["content"]) for document in documents for message in document.messages)
    return max(1, min(len(os.sched_getaffinity(0)), characters // _FEWEST_CHARACTERS))


def render_in_processes(folder: Path, template: str | None, documents: Iterable[Document], processes: int) -> Iterator[Rendered]:
    """What render_documents gives, in its order, made by so many processes; raises what it raises, for the first such document."""
    chunks = iter(documents)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_open, initargs=(folder, template))
    try:
        waiting: deque[Future[_Packed]] = deque()
        while chunk := list(islice(chunks, _CHUNK)):
            waiting.append(pool.submit(_render, chunk))
            if len(waiting) > 2 * processes:
                yield from _unpack(*waiting.popleft().result())
        while waiting:
            yield from _unpack(*waiting.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)


def _open(folder: Path, template: str | None) -> None:
    global _renderer  # noqa: PLW0603 - a process has one, opened once
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have processes of their own
    _renderer = open_renderer(folder, template)


def _render(documents: list[Document]) -> _Packed:
    """All of a chunk in two arrays: a pickle of many small ones takes as long as making them."""
    assert _renderer is not None, "_open comes first"
    rendered = list(render_documents(_renderer, documents))
    ids, trained = (np.concatenate([getattr(document, name) for document in rendered]) for name in ("ids", "trained"))
    return ids, trained, [len(document.ids) for document in rendered], [document.origin for document in rendered]


def _unpack(ids: np.ndarray, trained: np.ndarray, lengths: list[int], origins: list[str]) -> Iterator[Rendered]:
    ends = np.cumsum(lengths)
    for end, length, origin in zip(ends, lengths, origins, strict=True):
        yield Rendered(ids=ids[end - length : end], trained=trained[end - length : end], origin=origin)
