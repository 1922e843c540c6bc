"""Rendering in processes of their own: a template is a program, which must not bring down or hold up this one.

Several of them where there is much to render: a template renders in Python, whose lock lets only one thread do so at a
time. They run `main`, and start in a third of the time without what reads recipes and rows.
"""

import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemsmith.data.chat_template import ChatTemplate, find_template
from gemsmith.data.documents import Document
from gemsmith.data.tokenize import (
    Rendered,
    Renderer,
    check_prompts,
    open_renderer,
    raise_row_error,
    render_documents,
    written_answers,
)
from gemsmith.errors import DataError, GemsmithError, MachineError, RowError
from gemsmith.images.check import ImageInfo
from gemsmith.system.workers import ProcessLimits, answer_requests, draw_ahead, open_pool, worker_command
from gemsmith.tasks.messages import text_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gemsmith.recipe.schema import Data

_CHUNK = 512
# Fewer characters a process than this are rendered before it has read its tokenizer.
_FEWEST_CHARACTERS = 8_000_000
_COMMAND = worker_command("gemsmith.data.workers")
LIMITS = ProcessLimits()  # what a template may use


class Packed(NamedTuple):
    """Rendered documents end to end: a pickle of many small arrays takes as long as making them."""

    ids: np.ndarray
    trained: np.ndarray
    lengths: list[int]
    origins: list[str]
    images: list[tuple[ImageInfo, ...]]
    bad: list[tuple[str, RowError]]  # where rows stand that were left out, and why


def main() -> None:
    """In a process: reads what opens a renderer, then makes calls with it until stdin ends or whoever asked is gone."""
    # What is imported stays, and rows are many objects: few of either are garbage in a cycle.
    gc.freeze()
    gc.set_threshold(20_000)
    renderer: Callable[[], Renderer] = cache(pickle.load(sys.stdin.buffer))  # noqa: S301 - from our own process
    answer_requests(lambda call: call(renderer()), errors=(GemsmithError,))


def render_packed(renderer: Renderer, documents: Sequence[Document]) -> Packed:
    """What render_documents gives, and the rows that it cannot render."""
    bad: list[tuple[str, RowError]] = []
    rendered = render_documents(renderer, documents, on_bad=lambda *one: bad.append(one))
    ids = np.concatenate([np.empty(0, np.int32), *(each.ids for each in rendered)])
    trained = np.concatenate([np.empty(0, bool), *(each.trained for each in rendered)])
    lengths, origins = [len(document.ids) for document in rendered], [document.origin for document in rendered]
    return Packed(ids, trained, lengths, origins, [document.images for document in rendered], bad)


def count_processes(documents: Sequence[Document]) -> int:
    """As many as there are cores for this process and work enough for; 1: not worth a second."""
    characters = sum(len(text_of(message)) for document in documents for message in document.messages)
    return max(1, min(len(os.sched_getaffinity(0)), characters // _FEWEST_CHARACTERS))


def render_in_processes(
    folder: Path,
    template: ChatTemplate,
    documents: Iterable[Document],
    processes: int,
    *,
    on_bad: Callable[[str, RowError], object] = raise_row_error,
) -> Iterator[Rendered]:
    """What render_documents gives and raises, by so many processes. Raises DataError where the template crashes."""
    rest = iter(documents)
    chunks = iter(lambda: list(islice(rest, _CHUNK)), [])
    calls = (partial(render_packed, documents=chunk) for chunk in chunks)
    with _open_workers(folder, template, processes) as ask:
        for reply in draw_ahead(map(ask, calls), 2 * processes):
            ids, trained, lengths, origins, images, bad = reply.result()
            for origin, error in bad:
                on_bad(origin, error)
            for end, length, origin, seen in zip(np.cumsum(lengths), lengths, origins, images, strict=True):
                part = slice(end - length, end)
                yield Rendered(ids=ids[part], trained=trained[part], origin=origin, images=seen)


def check_prompts_in_process(folder: Path, data: "Data", rows: Sequence[tuple[Document, int]]) -> list[np.ndarray]:
    """What check_prompts gives, from another process. Raises what that raises, and DataError as render_in_processes."""
    with _open_workers(folder, find_template(folder, data), 1) as ask:
        found: list[np.ndarray] = ask(partial(check_prompts, rows=rows)).result()
        return found


def written_answers_in_process(folder: Path, data: "Data", documents: Sequence[Document]) -> list[str]:
    """What written_answers gives, likewise."""
    with _open_workers(folder, find_template(folder, data), 1) as ask:
        found: list[str] = ask(partial(written_answers, documents=documents)).result()
        return found


def _open_workers(
    folder: Path, template: ChatTemplate, processes: int
) -> AbstractContextManager[Callable[[Any], "Future[Any]"]]:
    # Several leave the other cores to each other.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true" if processes == 1 else "false"}
    opening = partial(open_renderer, folder, template, limits=LIMITS)
    explain = partial(_explain, f"chat template {template.source}")
    return open_pool(_COMMAND, processes, explain=explain, opening=opening, environment=environment)


def _explain(template: str, code: int, call: "partial[Any]") -> Exception:
    documents = call.keywords.get("documents") or [document for document, _ in call.keywords["rows"]]
    rows, mend = f"{documents[0].origin} to {documents[-1].origin}", "mend it, or set data.template to another"
    if code == -signal.SIGVTALRM:
        seconds = f"{LIMITS.killed_after_s:g} s of CPU"
        return DataError(f"{template} takes more than {seconds} in one step, at one of {rows}; {mend}")
    if code == -signal.SIGKILL:
        remedy = "where memory ran out, free some and run it again"
        return MachineError(f"{rows}: the process that rendered them was killed; {remedy}")
    if code < 0:
        return DataError(f"{template} crashes Python ({signal.Signals(-code).name}), at one of {rows}; {mend}")
    return RuntimeError(f"{' '.join(_COMMAND)} ended with {code}; its traceback is above")
