"""Merged weights: W + scale * B A in float32, rounded once to the base's dtype, straight from file to file.

The base and the result have the same dtypes and shapes, so each shard keeps its size, its header and every byte that no adapter touches:
a merge is a copy in which some ranges are computed. PEFT's merge does the same arithmetic in the same order; where its `safe_merge` is
asked for, it rounds B A to the base's dtype before adding, and differs.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gemsmith.checkpoint import Checkpoint, TensorPlace
from gemsmith.checkpoint.adapter import Adapter, LowRank
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.export.adapters import check_values
from gemsmith.records import FileSum
from gemsmith.run import replacing_folder

# Values of a matrix, and bytes that are copied, at once. Measured on 1.1 GB: 2**20 values take 3.8 s of CPU, 2**22 take 5.4 s.
_BLOCK_VALUES = 2**20
_BLOCK_BYTES = 4 * 2**20
# Weights in other forms, which would be the base's: a merged folder must not carry them.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge wrote."""

    files: tuple[FileSum, ...]
    merged_tensors: int
    copied_tensors: int


def merge(base: Checkpoint, adapter: Adapter, folder: Path) -> Merged:
    """Writes the base with the adapter merged in, whole or not at all: an existing folder is replaced once the new one is complete.

    Raises CheckpointError where the adapter does not fit the base or its values are not finite, MachineError where space runs out.
    """
    check_values(adapter, source="to merge")
    changes = {f"{module}.weight": pair for module, pair in adapter.modules.items()}
    _check_fit(base, changes)
    files = files_to_write(base)
    _check_space(folder, sum(file.stat().st_size for file in files))
    with _no_space_named(folder), replacing_folder(folder) as beside:
        sums = [_write_file(file, beside / file.name, _changes_in(file, base.places, changes), adapter.scale) for file in files]
        _sync(beside)
    return Merged(files=tuple(sums), merged_tensors=len(changes), copied_tensors=len(base.places) - len(changes))


def files_to_write(base: Checkpoint) -> list[Path]:
    """The base's files that a merged folder has: its shards, and whatever is beside them but weights in other forms."""
    shards = {place.file for place in base.places.values()}
    beside = [file for file in base.folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    return sorted(shards | {file for file in beside if file.suffix not in _OTHER_WEIGHTS})


def merged_rows(weight: np.ndarray, pair: LowRank, rows: slice, scale: float) -> np.ndarray:
    """Those rows of W + scale * B A, in the weight's dtype: one rounding, to nearest even."""
    delta: np.ndarray = pair.b[rows] @ pair.a
    delta *= np.float32(scale)
    delta += weight.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):  # float16 overflows to infinity, which the caller refuses
        return delta.astype(weight.dtype)


def row_blocks(shape: tuple[int, ...], values: int = _BLOCK_VALUES) -> Iterator[slice]:
    """Slices of rows that hold about that many values each."""
    rows = max(1, values // shape[1])
    return (slice(begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows))


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of safetensors' BF16, F16 or F32."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "BF16" else DTYPES[name])


def _check_fit(base: Checkpoint, changes: Mapping[str, LowRank]) -> None:
    for name, pair in changes.items():
        place = base.places.get(name)
        if place is None:
            raise CheckpointError(f"checkpoint {base.folder}: has no {name}, which the adapter changes; is it another variant's adapter?")
        if place.shape != (pair.b.shape[0], pair.a.shape[1]):
            raise CheckpointError(
                f"checkpoint {base.folder}: {name} is {list(place.shape)}, the adapter is for {[pair.b.shape[0], pair.a.shape[1]]}; "
                "is it another variant's?"
            )
        if place.dtype not in DTYPES:
            raise CheckpointError(f"checkpoint {base.folder}: {name} is {place.dtype}; allowed: {', '.join(DTYPES)}")


def _check_space(folder: Path, need_bytes: int) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < need_bytes:
        raise MachineError(
            f"{folder}: the merged weights need {need_bytes / 1e9:.2f} GB, {free_bytes / 1e9:.2f} GB are free; make room, or put the run "
            "elsewhere with --run"
        )


@contextmanager
def _no_space_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MachineError(f"{folder}: the disk became full while merged weights were written; make room and run export again") from None


def _changes_in(file: Path, places: Mapping[str, TensorPlace], changes: Mapping[str, LowRank]) -> list[tuple[str, TensorPlace, LowRank]]:
    """The file's tensors that an adapter changes, in the order of their bytes."""
    here = [(name, places[name], pair) for name, pair in changes.items() if places[name].file == file]
    return sorted(here, key=lambda item: item[1].begin)


def _write_file(source: Path, target: Path, changes: list[tuple[str, TensorPlace, LowRank]], scale: float) -> FileSum:
    """Copies the file, with the changed tensors computed; returns its size and checksum, taken from what was written."""
    with source.open("rb") as reader, target.open("xb") as file, ThreadPoolExecutor(1) as worker:
        writer = _Writer(file, worker)
        for name, place, pair in changes:
            _copy(reader, writer, place.begin)
            for rows in row_blocks(place.shape):
                block = merged_rows(_read_rows(reader, place, rows), pair, rows, scale)
                if not np.isfinite(block).all():
                    raise CheckpointError(f"{source}: {name} with the adapter added has NaN or infinity in {place.dtype}")
                writer.write(block.view(np.uint8).data)
        _copy(reader, writer, os.fstat(reader.fileno()).st_size)
        return writer.finish(target.name)


class _Writer:
    """Writes and hashes in another thread while the next block is computed; hashing costs as much as all the rest."""

    def __init__(self, file: BinaryIO, worker: ThreadPoolExecutor) -> None:
        self._file, self._worker = file, worker
        self._sum, self._bytes = hashlib.sha256(), 0
        self._pending: Future[None] | None = None

    def write(self, block: bytes | memoryview) -> None:
        self._wait()
        self._pending = self._worker.submit(self._put, block)

    def finish(self, name: str) -> FileSum:
        self._wait()
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSum(name=name, bytes=self._bytes, sha256=self._sum.hexdigest())

    def _put(self, block: bytes | memoryview) -> None:
        self._file.write(block)
        self._sum.update(block)
        self._bytes += memoryview(block).nbytes

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None


def _copy(reader: BinaryIO, writer: _Writer, end: int) -> None:
    """Copies bytes from where the reader stands up to `end`."""
    while (left := end - reader.tell()) > 0:
        block = reader.read(min(left, _BLOCK_BYTES))
        if not block:
            raise CheckpointError(f"{reader.name}: ended early; it was changed while it was read")
        writer.write(block)


def _read_rows(reader: BinaryIO, place: TensorPlace, rows: slice) -> np.ndarray:
    """Those rows of a matrix; the reader stands at their first byte, and is left behind their last."""
    dtype = numpy_dtype(place.dtype)
    raw = reader.read((rows.stop - rows.start) * place.shape[1] * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(rows.stop - rows.start, place.shape[1])


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
