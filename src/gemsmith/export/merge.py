"""Merged weights: W + scale * B A in float32, rounded once to the base's dtype, straight from file to file.

The base and the result have the same dtypes and shapes, so each shard keeps its size, its header and every byte that no
adapter touches: a merge is a copy in which some ranges are computed. PEFT's merge does the same arithmetic in the same
order, and differs in these: with `safe_merge` it rounds B A to the base's dtype before adding; modules whose own alpha
or rank (alpha_pattern, rank_pattern) changes the scale, not by a power of two, have B scaled first here; and numpy's
BLAS may add up in another order than torch's. The last two change a few in 100,000 weights, in the last bit.
"""

import ctypes
import errno
import itertools
import math
import operator
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gemsmith.system.format as formats
from gemsmith.checkpoints.folder import INDEX, Checkpoint
from gemsmith.checkpoints.peft import Adapter, LoraPair, refuse_outside
from gemsmith.checkpoints.safetensors import FLOATS, SIZE_BITS, TensorPlace, count_nonfinite, numpy_dtype
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.export.adapters import check_values
from gemsmith.export.writer import FileWriter
from gemsmith.runs.records import FileSum
from gemsmith.system.files import fsync_path
from gemsmith.system.json import read_json
from gemsmith.system.workers import draw_ahead

# Values of a matrix, and bytes that are copied, at once: what a core's cache holds. benchmarks/merge.py.
_BLOCK_VALUES = 2**18
_BLOCK_BYTES = 2**20
# Blocks that are under way at once, for each thread. With 4, threads waited for the one that hashes: 7 % longer.
_AHEAD = 16
# Weights in other forms, which would be the base's: a merged folder must not carry them.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz")
# numpy's own wheels carry OpenBLAS with names of its functions like these.
_BLAS_THREADS = tuple(f"{name}_{{}}_num_threads{end}" for name in ("scipy_openblas", "openblas") for end in ("64_", ""))

FileStates = Mapping[Path, tuple[int, ...]]
_Read = Callable[[int, int], np.ndarray]  # where a part of a file begins and its length -> its bytes


def check_mergeable(base: Checkpoint, adapter: Adapter) -> None:
    """Raises CheckpointError where the adapter does not fit the base, or is not finite, or does nothing."""
    for module, (a, b) in adapter.shapes.items():
        name = f"{module}.weight"
        place, wrong = base.places.get(name), ""
        if place is None:
            wrong = f"has no {name}, which the adapter changes; is it another variant's adapter?"
        elif place.shape != (b[0], a[1]):
            wrong = f"{name} is {list(place.shape)}, the adapter is for {[b[0], a[1]]}; is it another variant's?"
        elif place.dtype not in FLOATS:
            wrong = f"{name} is {place.dtype}; allowed: {', '.join(FLOATS)}"
        if wrong:
            raise CheckpointError(f"checkpoint {base.folder}: {wrong}")
    check_values(adapter, source="to merge")
    files_to_write(base)


def write_merged(base: Checkpoint, adapter: Adapter, folder: Path) -> tuple[tuple[FileSum, ...], int]:
    """The base's files with the adapter merged in, written onto the disk, and how many tensors have the base's bytes.

    Others without an adapter are as training held them. The folder must be empty. Raises CheckpointError where a merged
    weight is not finite, or the base was changed meanwhile.
    """
    weights = {f"{module}.weight": module for module in adapter.modules}
    changed = weights.keys() | {name for name, place in base.places.items() if place.held}
    threads = max(1, len(os.sched_getaffinity(0)))
    buffers, before = _Buffers(), file_states(files_to_write(base))
    with (
        unchanged(before),
        one_blas_thread(),
        ExitStack() as opened,
        ThreadPoolExecutor(threads) as pool,
        FileWriter() as writer,
    ):

        def blocks() -> Iterator[tuple[Path, Future[np.ndarray]]]:
            for file in before:
                here = [name for name, place in base.places.items() if place.file == file and name in changed]
                here.sort(key=lambda name: base.places[name].begin)
                changes = [(name, base.places[name], weights.get(name)) for name in here]
                read = partial(buffers.read, opened.enter_context(file.open("rb")).fileno())
                yield from ((file, block) for block in _blocks(read, file.stat().st_size, changes, adapter, pool))

        # The next file's blocks are computed while the last of this one's go to the disk.
        for file, its_blocks in itertools.groupby(draw_ahead(blocks(), _AHEAD * threads), key=operator.itemgetter(0)):
            writer.begin(folder / file.name)
            for _, computed in its_blocks:
                block = computed.result()
                writer.append(block)
                buffers.give_back(block)
            writer.end()
        files = writer.sums()
    fsync_path(folder)
    return files, len(base.places) - len(changed)


def files_to_write(base: Checkpoint) -> list[Path]:
    """The base's files that a merged folder has: its shards, and whatever is beside them but weights in other forms.

    Links are followed to the checkpoint's own files, wherever these lie. Raises CheckpointError for one that leads to
    something else: the merged folder, which may be published, would hold a copy of it.
    """
    shards = {place.file for place in base.places.values()}
    beside = {
        file
        for file in base.folder.iterdir()
        if not file.name.startswith(".")
        and file.suffix not in _OTHER_WEIGHTS
        and (file.is_file() or (file.is_symlink() and not file.is_dir()))
    }
    files = sorted(shards | beside)
    # To open the checkpoint, these were read, and found to be a checkpoint's.
    known = {*shards, base.folder / "config.json", *(file for file in files if file.name == INDEX)}
    homes = {file.resolve().parent for file in known}
    for file in files:
        if file not in known and file.resolve().parent not in homes and not _is_tokenizer(file):
            refuse_outside(file, base.folder)
        if not file.is_file():
            raise CheckpointError(f"{file}: is a symbolic link to nothing; copy the checkpoint again")
    return files


def _is_tokenizer(file: Path) -> bool:
    if file.name != "tokenizer.json":
        return False
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model" in content


def file_states(files: Iterable[Path]) -> FileStates:
    """Of each file, what is another once it has been written or replaced; empty where it is gone."""
    found: dict[Path, tuple[int, ...]] = dict.fromkeys(files, ())
    for file in found:
        with suppress(FileNotFoundError):
            status = file.stat()
            found[file] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return found


@contextmanager
def unchanged(before: FileStates) -> Iterator[None]:
    """Raises CheckpointError at the end where a file is not as it was before, also in place of an error."""
    try:
        yield
    finally:
        if changed := [file for file, state in file_states(before).items() if state != before[file]]:
            raise CheckpointError(f"{changed[0]}: was changed while it was read; export again once nothing writes it")


def merged_bytes(base: Checkpoint) -> int:
    return sum(file.stat().st_size for file in files_to_write(base))


def merged_rows(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """W + scale * B A of some rows, in the weight's dtype and memory: one rounding, to nearest even."""
    delta, wide = _scratch.arrays(weight.shape)
    np.matmul(b, a, out=delta)
    if scale != 1:
        delta *= np.float32(scale)
    np.copyto(wide, weight, casting="same_kind")
    delta += wide
    with np.errstate(over="ignore"):  # float16 overflows to infinity, which the caller refuses
        np.copyto(weight, delta, casting="unsafe")
    return weight


class _Scratch(threading.local):
    """Two float32 arrays for each thread, kept: fresh memory costs as much as the arithmetic on it."""

    _memory = np.empty((2, 0), np.float32)

    def arrays(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        values = math.prod(shape)
        if self._memory.shape[1] < values:
            self._memory = np.empty((2, values), np.float32)
        return self._memory[0, :values].reshape(shape), self._memory[1, :values].reshape(shape)


_scratch = _Scratch()


class _Buffers:
    """Memory for blocks on their way from the source to the checksum, used again."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def read(self, descriptor: int, begin: int, length: int) -> np.ndarray:
        """That part of the file, in memory that is to be given back."""
        try:
            memory = self._free.get_nowait()
        except queue.Empty:
            memory = np.empty(_BLOCK_BYTES, np.uint8)
        block = memory[:length] if length <= len(memory) else np.empty(length, np.uint8)
        done = 0
        while done < length:
            if not (count := os.preadv(descriptor, [block[done:].data], begin + done)):
                raise CheckpointError("a file of the base ended early; it was changed while it was read")
            done += count
        return block

    def give_back(self, block: np.ndarray) -> None:
        self._free.put(block.base if block.base is not None else block)


def row_blocks(shape: tuple[int, ...], values: int = _BLOCK_VALUES) -> Iterator[slice]:
    """Blocks of rows that hold about that many values each."""
    rows = max(1, values // max(1, shape[1]))
    return (slice(begin, min(begin + rows, shape[0])) for begin in range(0, shape[0], rows))


def check_space(folder: Path, need_bytes: int) -> None:
    """Raises MachineError where the disk of the folder has less space free."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if (free_bytes := shutil.disk_usage(there).free) < need_bytes:
        raise MachineError(
            f"{folder}: the merged weights need {formats.size(need_bytes)}, {formats.size(free_bytes)} are free; make "
            "room, or name a place on another disk"
        )


@contextmanager
def no_space_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "make room and run export again"
        raise MachineError(f"{folder}: the disk became full while merged weights were written; {remedy}") from None


def _blocks(
    read: _Read,
    size: int,
    changes: list[tuple[str, TensorPlace, str | None]],
    adapter: Adapter,
    pool: ThreadPoolExecutor,
) -> Iterator[Future[np.ndarray]]:
    """The file's blocks in order, at least one, each being read and computed by a thread of the pool."""

    def copies(begin: int, end: int) -> Iterator[Future[np.ndarray]]:
        return (pool.submit(read, at, min(_BLOCK_BYTES, end - at)) for at in range(begin, end, _BLOCK_BYTES))

    here = 0
    for name, place, module in changes:
        yield from copies(here, place.begin)
        pair = adapter.modules[module] if module else None
        for rows in row_blocks(place.matrix):
            yield pool.submit(_merged_block, read, name, place, rows, pair, adapter.scale)
        here = place.end
    yield from copies(here, size)
    if not size:
        yield pool.submit(read, 0, 0)


def _merged_block(
    read: _Read, name: str, place: TensorPlace, rows: slice, pair: LoraPair | None, scale: float
) -> np.ndarray:
    dtype, width = numpy_dtype(place.dtype), place.shape[-1]
    begin = place.begin + rows.start * width * dtype.itemsize
    block = read(begin, (rows.stop - rows.start) * width * dtype.itemsize)
    merged = block.view(dtype).reshape(-1, width)
    if place.held:
        merged[:] = place.rows(rows)
    if pair is not None:
        merged_rows(merged, pair.a, pair.b[rows], scale)
    unsigned, size_bits, infinity = SIZE_BITS[place.dtype]
    if (merged.view(unsigned) & size_bits).max() >= infinity:
        if count_nonfinite(place):
            remedy = "copy the file again"
            raise CheckpointError(f"{place.file}: {name} holds NaN or infinity before the adapter is added; {remedy}")
        how = "with the adapter added" if pair is not None else "as trained"
        raise CheckpointError(f"{place.file}: {name} {how} has NaN or infinity in {place.dtype}")
    return block


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """OpenBLAS computes with one thread meanwhile: with several it lets one caller in at a time, and waits busily."""
    found = [(get(), put) for get, put in _openblas()]
    for _, put in found:
        put(1)
    try:
        yield
    finally:
        for threads, put in found:
            put(threads)


def _openblas() -> Iterator[tuple[Any, Any]]:
    """Getter and setter of the number of threads, of each OpenBLAS that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in sorted(set(re.findall(r"/\S*openblas\S*\.so\S*", maps))):
        library = ctypes.CDLL(path)
        for name in _BLAS_THREADS:
            getter, setter = (getattr(library, name.format(word), None) for word in ("get", "set"))
            if getter and setter:
                yield getter, setter
                break
