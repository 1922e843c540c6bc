"""Batches of packed rows: each follows from the recipe and the step alone, so a run continues where it stopped.

Every row of a step is padded to a bucket: the same number of images, each of the same number of soft tokens. Were that
one for the whole run, its fullest row would set what every step costs; there are a few, so that as few programs run.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gemsmith.data.packing import ARRAYS, Rows
from gemsmith.errors import DataError, RunError
from gemsmith.images.check import ImageInfo
from gemsmith.recipe.backends import bucket_of
from gemsmith.recipe.schema import Recipe, Train
from gemsmith.runs.records import DataRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.system.files import sha256_file

if TYPE_CHECKING:
    import grain


EVAL_ROWS = "eval"
"""The folder beside the arrays that has the same files of the rows of data.eval, where training evaluates."""
IMAGES = "images.jsonl"
"""The file beside the arrays that has a line with the images of each row; of rows of text alone there is none."""
MOST_BUCKETS = 3  # programs of a run
_WORTH = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """Each epoch has every row once, in its own order; a batch may hold the end of one and the start of the next."""

    global_batch_size: int
    total_rows: int  # rows of all steps; the last batch is filled up with rows of padding
    rows: Rows
    order: "Sequence[int] | grain.MapDataset[int]"

    @property
    def steps(self) -> int:
        return math.ceil(self.total_rows / self.global_batch_size)

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Rows:
        """The batch of a step, from 1; of it only `rows`, where they are given, and no others are read."""
        assert 1 <= step <= self.steps, f"step {step} of {self.steps}"
        begin = (step - 1) * self.global_batch_size
        places = [begin + row for row in (range(self.global_batch_size) if rows is None else rows)]
        return self.rows.take([int(self.order[place]) if place < self.total_rows else None for place in places])


def count_steps(train: Train, packed_rows: int) -> int:
    """Optimizer steps: those of the recipe, or as many as all rows of all epochs need."""
    return math.ceil(count_rows(train, packed_rows) / train.global_batch_size)


def count_rows(train: Train, packed_rows: int) -> int:
    """Rows of all steps, without the padding that fills up the last."""
    return train.max_steps * train.global_batch_size if train.max_steps else train.epochs * packed_rows


def check_batch(recipe: Recipe, packed_rows: int) -> None:
    """Raises DataError for too few rows for one step."""
    if packed_rows < (size := recipe.train.global_batch_size):
        what = f"{size} is more than all data makes, {packed_rows} packed rows of {recipe.data.max_length}"
        raise DataError(f"train.global_batch_size: {what}; set {packed_rows} or less, or lower data.max_length")


def load_batches(run: Run) -> Batches:
    """The batches of the run's data stage. Raises RunError as open_rows, DataError as check_batch."""
    record = read_record(run, DataRecord)
    train = run.recipe.train
    check_batch(run.recipe, record.packed_rows)
    rows, shape = open_rows(run), (record.packed_rows, run.recipe.data.max_length)
    if rows.tokens.shape != shape:
        what = f"it says rows of shape {shape}, the arrays are {rows.tokens.shape}"
        remedy = f"write both again with: gemsmith data {run.path} --force"
        raise RunError(f"{run.record_file('data')}: is damaged: {what}; {remedy}")
    return Batches(
        global_batch_size=train.global_batch_size,
        total_rows=count_rows(train, record.packed_rows),
        rows=rows,
        order=shuffled_order(record.packed_rows, run.recipe.seed),
    )


def load_eval_batches(run: Run) -> Batches | None:
    """The rows of data.eval in order, once; None without train.eval_steps. Raises RunError as open_rows."""
    if run.recipe.train.eval_steps is None:
        return None
    rows, size = open_rows(run, EVAL_ROWS), run.recipe.train.global_batch_size
    return Batches(global_batch_size=size, total_rows=len(rows), rows=rows, order=range(len(rows)))


def shuffled_order(rows: int, seed: int) -> "grain.MapDataset[int]":
    """Row numbers without end: element k is the row at place k, `rows` places to an epoch."""
    import grain

    # Grain adds the epoch to the seed: of two runs with neighboring seeds, one would see the other's epochs.
    spread = int.from_bytes(hashlib.sha256(f"rows {seed}".encode()).digest()[:4], "big")
    return grain.MapDataset.range(rows).shuffle(seed=spread).repeat()


def write_rows(folder: Path, chunks: Iterable[Rows], shape: tuple[int, int], base: Path | None) -> dict[str, str]:
    """Writes a .npy file for each array of rows; returns the SHA-256 of each file.

    With `base` also the images' lines, where paths below it are written as seen from there. Plain writes: a memory map
    on a full disk ends the process instead of raising.
    """
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.npy").open("wb")) for name in ARRAYS}
        for name, file in files.items():
            descr = np.lib.format.dtype_to_descr(ARRAYS[name])
            np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        lines = stack.enter_context((folder / IMAGES).open("w", encoding="utf-8")) if base else None
        for chunk in chunks:
            for name, array in chunk.arrays().items():
                files[name].write(array.data)
            if lines:
                for images in chunk.images or [()] * len(chunk):
                    values = [asdict(image) | {"path": image.path.removeprefix(f"{base}/")} for image in images]
                    lines.write(json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n")
    hashes = {name: sha256_file(folder / f"{name}.npy") for name in ARRAYS}
    return hashes | ({IMAGES: sha256_file(folder / IMAGES)} if base else {})


def open_rows(run: Run, folder: str = "") -> Rows:
    """The run's packed rows, or those of EVAL_ROWS, mapped. Raises RunError where they are not as they were written."""
    data, remedy = read_record(run, DataRecord), f"write it again with: gemsmith data {run.path} --force"
    record = data.eval_rows if folder else data
    if record is None:
        raise RunError(f"{run.record_file('data')}: has no rows of data.eval; {remedy}")
    place = run.data / folder
    files = {name: place / f"{name}.npy" for name in ARRAYS}
    files |= {IMAGES: place / IMAGES} if IMAGES in record.files else {}
    found = {}
    for name, file in files.items():
        try:
            state = file.stat()
            found[name] = _sha256(file.absolute(), state.st_size, state.st_mtime_ns)
        except FileNotFoundError:
            raise RunError(f"{file}: is missing; {remedy}") from None
        if found[name] != record.files.get(name):
            raise RunError(f"{file}: is damaged: its SHA-256 is not the one in {run.record_file('data')}; {remedy}")
    # Not with images, of which it would take 12 µs each.
    if IMAGES not in found and rows_sha256(found, place) != record.rows_sha256:
        raise RunError(f"{run.record_file('data')}: is damaged: its rows_sha256 is not that of its files; {remedy}")
    lines = files.pop(IMAGES).read_bytes().splitlines() if IMAGES in files else []
    images = StoredImages(lines=lines, base=run.path) if lines else ()
    return Rows(**{name: np.load(file, mmap_mode="r") for name, file in files.items()}, images=images)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredImages(Sequence[tuple[ImageInfo, ...]]):
    """The images of each row, read from its line once they are asked for; relative paths count from `base`."""

    lines: list[bytes]
    base: Path

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> tuple[ImageInfo, ...]:  # type: ignore[override]  # no slices
        images = (ImageInfo(**values) for values in json.loads(self.lines[row]))
        return tuple(replace(image, path=str(self.base / image.path)) for image in images)


def rows_sha256(files: Mapping[str, str], folder: Path) -> str:
    """One SHA-256 for what the rows in the folder are: of the arrays' files, and of each row's images, if any.

    Where images lie is no part of it, so that the same rows have the same one on every machine. `files`: name ->
    SHA-256, in the order of ARRAYS, and IMAGES where there are any.
    """
    digests = dict(files)
    if IMAGES in digests:
        total = hashlib.sha256()
        for line in (folder / IMAGES).read_bytes().splitlines():
            placeless = [{**image, "path": ""} for image in json.loads(line)]
            total.update(json.dumps(placeless).encode() + b"\n")
        digests[IMAGES] = total.hexdigest()
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()


@cache
def _sha256(file: Path, _size_bytes: int, _changed_ns: int) -> str:
    """Once a process, as long as the file stays as it is: 1.5 GB take a second."""
    return sha256_file(file)


class BucketShape(NamedTuple):
    """Room of a row: so many images, each of so many soft tokens."""

    images: int
    soft_tokens: int

    @property
    def size(self) -> int:
        """Soft tokens that a row is padded to."""
        return self.images * self.soft_tokens

    def holds(self, other: "BucketShape") -> bool:
        return other.images <= self.images and other.soft_tokens <= self.soft_tokens


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Those of a run, the smallest first, and which of them each step takes: `of_step[0]` is the first step's."""

    buckets: tuple[BucketShape, ...]
    of_step: tuple[BucketShape, ...]

    def of(self, step: int) -> BucketShape:
        """The bucket of a step, from 1."""
        return self.of_step[step - 1]


def plan_buckets(recipe: Recipe, rows: Sequence[Sequence[int]]) -> Buckets:
    """The buckets of a training of the recipe on these rows, in its order; the soft tokens of each row's images."""
    order, train = shuffled_order(len(rows), recipe.seed), recipe.train
    total = count_rows(train, len(rows))
    return find_buckets(rows, order, total_rows=total, global_batch_size=train.global_batch_size)


def find_buckets(
    rows: Sequence[Sequence[int]], order: Sequence[int], *, total_rows: int, global_batch_size: int
) -> Buckets:
    """The buckets of a run; `rows` are the soft tokens of each row's images, `order[k]` is the row at place k."""
    needs = [room_for(row) for row in rows]
    alike = set(needs)
    if len(alike) == 1:  # as a folder's images often are: nothing is to be looked up, which takes 20 µs a row
        return Buckets(buckets=tuple(alike), of_step=(*alike,) * -(-total_rows // global_batch_size))
    placed = [needs[int(order[place])] for place in range(total_rows)]
    steps = [join(placed[begin : begin + global_batch_size]) for begin in range(0, total_rows, global_batch_size)]
    buckets = choose_buckets(steps)
    smallest = {need: next(one for one in buckets if one.holds(need)) for need in set(steps)}
    return Buckets(buckets=buckets, of_step=tuple(smallest[need] for need in steps))


def room_for(images: Sequence[int]) -> BucketShape:
    """The room of a row whose images have so many soft tokens each; of one without any, the least there is.

    >>> room_for([256, 266]), room_for([])
    (BucketShape(images=2, soft_tokens=288), BucketShape(images=1, soft_tokens=32))
    """
    return BucketShape(max(1, len(images)), bucket_of(max(images, default=1)))


def join(needs: Sequence[BucketShape]) -> BucketShape:
    """The least room that holds each of these."""
    return BucketShape(max(need.images for need in needs), max(need.soft_tokens for need in needs))


def choose_buckets(steps: Sequence[BucketShape]) -> tuple[BucketShape, ...]:
    """At most MOST_BUCKETS, the smallest first, for steps of which each takes the first that has room for it.

    The largest holds all of them. Of what the steps themselves need, the one that saves most comes to it, and once
    more, each where it saves a twentieth of the padded soft tokens: a program takes time to compile.

    >>> choose_buckets([BucketShape(1, 64)] * 9 + [BucketShape(4, 96)])
    (BucketShape(images=1, soft_tokens=64), BucketShape(images=4, soft_tokens=96))
    """
    counted = Counter(steps)
    chosen: tuple[BucketShape, ...] = (join(steps),)

    def padded(buckets: tuple[BucketShape, ...]) -> int:
        return sum(count * next(one.size for one in buckets if one.holds(need)) for need, count in counted.items())

    while len(chosen) < MOST_BUCKETS:
        more = (tuple(sorted((*chosen, need), key=lambda one: (one.size, one))) for need in sorted(counted))
        best = min(more, key=padded)
        if padded(best) > (1 - _WORTH) * padded(chosen):
            break
        chosen = best
    return chosen
