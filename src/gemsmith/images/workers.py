"""Decoding in processes of their own: a decoder that crashes must not end this one, and several decode at a time."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gemsmith.errors import DataError, GemsmithError, MachineError
from gemsmith.images.check import ImageInfo, patchify, validate_image
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig, Patches, scale
from gemsmith.system.workers import answer_requests, draw_ahead, open_pool, worker_command

if TYPE_CHECKING:
    from concurrent.futures import Future

Item = TypeVar("Item")
_COMMAND = worker_command("gemsmith.images.workers")

Call = partial[ImageInfo] | partial[np.ndarray]
"""A request: of validate_image or patchify, with their arguments."""


def main() -> None:
    """In a process: makes calls, of which InvalidImageError is an answer, until stdin ends or whoever asked is gone."""
    answer_requests(lambda call: call(), errors=(GemsmithError, InvalidImageError))


def count_processes(images: int) -> int:
    """As many as there are cores for this process, and images."""
    return max(1, min(len(os.sched_getaffinity(0)), images))


def check_images(
    sources: Sequence[str | bytes], patching: PatchConfig, *, processes: int
) -> Iterator[ImageInfo | InvalidImageError]:
    """What each of the images is, in order, or what is wrong with it."""
    with open_workers(processes) as ask:
        requests = (ask(partial(validate_image, source, patching)) for source in sources)
        for reply in draw_ahead(requests, 4 * processes):  # so many wait for each process
            fault = reply.exception()
            yield fault if isinstance(fault, InvalidImageError) else reply.result()


def decode_ahead(
    steps: Iterable[tuple[Item, Sequence[ImageInfo]]], patching: PatchConfig, *, processes: int, ahead: int = 2
) -> Iterator[tuple[Item, list[Patches]]]:
    """Each step's item, with the patches of its images, which are decoded while `ahead` earlier steps run.

    Of so many steps, and of no more, patches are in memory: as bytes, a quarter of what they take as float32. Raises
    DataError where a file is not what it was when it was looked at.
    """
    with open_workers(processes) as ask:
        requests = ((item, [ask(partial(patchify, image, patching)) for image in images]) for item, images in steps)
        for item, replies in draw_ahead(requests, ahead):
            yield item, [scale(reply.result(), patching) for reply in replies]


def open_workers(processes: int) -> AbstractContextManager[Callable[[Call], "Future[Any]"]]:
    """A function that has a call made by one of so many processes, which end with the block."""
    return open_pool(_COMMAND, processes, explain=_explain)


def _explain(code: int, call: Call) -> Exception:
    image = call.args[0]
    path = image.path if isinstance(image, ImageInfo) else image
    name = path if isinstance(path, str) and path else "an image"
    if code == -signal.SIGKILL:
        remedy = "where memory ran out, free some and run it again"
        return MachineError(f"{name}: the process that decoded it was killed; {remedy}")
    if code < 0:
        line = f"crashes its decoder ({signal.Signals(-code).name})"
        is_cut = isinstance(image, ImageInfo)
        return DataError(f"{name}: {line}; take it out") if is_cut else InvalidImageError("damaged", line)
    return RuntimeError(f"{' '.join(_COMMAND)} ended with {code}; its traceback is above")
