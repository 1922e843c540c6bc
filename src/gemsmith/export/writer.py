"""Files written from first byte to last, each with its SHA-256, past the page cache where that can be.

A merge writes as many bytes as the model has and reads none of them again. In the page cache they would cost a core the
time to copy them and to find memory for them, and push out what is read.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gemsmith.runs.records import FileSum

# Bytes that are written at once, and how many such chunks are filled and written in turn.
_CHUNK_BYTES, _CHUNKS = 8 * 2**20, 4
# Of a direct write's place in the file and in memory, and of its length.
_ALIGNMENT_BYTES = 4096
# Systems that have no such writes write through the page cache.
_DIRECT = getattr(os, "O_DIRECT", 0)


class FileWriter(AbstractContextManager["FileWriter"]):
    """Writes one file after the other, on the disk when `sums` returns: the caller's thread hashes, another writes."""

    def __init__(self) -> None:
        self._disk = ThreadPoolExecutor(1)
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(_CHUNKS):
            self._free.put(np.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), np.uint8))
        self._begun: list[_File] = []
        self._under_way: deque[Future[None]] = deque()

    def __exit__(self, *_: object) -> None:
        self._disk.shutdown()
        for file in self._begun:
            file.close()

    def begin(self, path: Path) -> None:
        """A new file, empty so far; FileExistsError where there is one."""
        self._begun.append(_File(path))
        self._chunk, self._filled = self._free.get(), 0

    def append(self, block: np.ndarray) -> None:
        """Bytes that follow in the file; the array is free again afterwards."""
        file = self._begun[-1]
        file.checksum.update(block.data)
        while len(block):
            count = min(len(block), _CHUNK_BYTES - self._filled)
            self._chunk[self._filled : self._filled + count] = block[:count]
            self._filled += count
            block = block[count:]
            if self._filled == _CHUNK_BYTES:
                self._send(file)
                self._chunk, self._filled = self._free.get(), 0

    def end(self) -> None:
        """The file is complete; it is on the disk once `sums` returns."""
        self._send(self._begun[-1])
        self._under_way.append(self._disk.submit(self._begun[-1].finish))

    def sums(self) -> tuple[FileSum, ...]:
        """Size and SHA-256 of every file, in order, once all are on the disk; OSError if one could not be written."""
        for written in self._under_way:
            written.result()
        return tuple(
            FileSum(name=file.path.name, bytes=file.size, sha256=file.checksum.hexdigest()) for file in self._begun
        )

    def _send(self, file: "_File") -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        self._under_way.append(self._disk.submit(self._put, file, self._chunk, self._filled))

    def _put(self, file: "_File", chunk: np.ndarray, length: int) -> None:
        try:
            file.write(chunk, length)
        finally:
            self._free.put(chunk)


@dataclass
class _File:
    path: Path
    checksum: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    size: int = 0  # of what is written so far

    def __post_init__(self) -> None:
        self._file = self.path.open("xb", buffering=0)
        try:
            self._set_direct(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def write(self, chunk: np.ndarray, length: int) -> None:
        """Writes the chunk's beginning, and zeros up to a multiple of the alignment; only a last chunk is not full."""
        padded = length + -length % _ALIGNMENT_BYTES
        chunk[length:padded] = 0
        done = 0
        while done < padded:
            done += self._write_at(self.size + done, chunk[done:padded])
        self.size += length

    def finish(self) -> None:
        os.ftruncate(self._file.fileno(), self.size)
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()

    def _write_at(self, place: int, block: np.ndarray) -> int:
        try:
            return os.pwrite(self._file.fileno(), block.data, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._set_direct(0)  # the file system wants another alignment
        return os.pwrite(self._file.fileno(), block.data, place)

    def _set_direct(self, flag: int) -> None:
        flags = fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(self._file.fileno(), fcntl.F_SETFL, flags & ~_DIRECT | flag)
