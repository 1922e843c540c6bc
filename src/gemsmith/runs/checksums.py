"""A folder's files against the sizes and SHA-256 that were recorded of them."""

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gemsmith.runs.records import FileSum

# More at once than this no disk reads faster.
_MOST_THREADS = 8
_READ_BYTES = 8 * 2**20


def changed_files(folder: Path, files: Sequence[FileSum]) -> list[str]:
    """What of a recorded folder is gone, too much, or not what was written; files are read once, several at a time."""
    recorded = {file.name: file for file in files}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    problems = [f"{name} is missing" for name in sorted(recorded.keys() - there)]
    problems += [f"{name} was not exported" for name in sorted(there - recorded.keys())]
    both = sorted(there & recorded.keys())
    stopped = threading.Event()
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            same = list(pool.map(lambda name: _is_same(folder / name, recorded[name], stopped), both))
        except BaseException:  # Ctrl-C too: leaving the block waits for the threads, and a shard takes seconds
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    problems += [f"{name} was changed since" for name, is_same in zip(both, same, strict=True) if not is_same]
    return [f"{folder.name}/{problem}" for problem in problems]


def _is_same(path: Path, recorded: FileSum, stopped: threading.Event) -> bool:
    if not path.is_file() or path.stat().st_size != recorded.bytes:  # no file: a link to nothing, a pipe
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not stopped.is_set() and (block := file.read(_READ_BYTES)):
            digest.update(block)
    return digest.hexdigest() == recorded.sha256
