"""Batches of packed rows: each follows from the recipe and the step alone, so a run continues where it stopped."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gemsmith.data.pack import ARRAYS, Rows
from gemsmith.errors import DataError, RunError
from gemsmith.files import sha256_file
from gemsmith.pictures.check import Picture
from gemsmith.recipe import Train
from gemsmith.records import DataRecord
from gemsmith.run import Run, read_record

if TYPE_CHECKING:
    import grain


PICTURES = "pictures.jsonl"
"""The file beside the arrays that has a line with the pictures of each row; of rows of text alone there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batches:
    """`steps` batches.

    Each epoch has every row once, in an order of its own; a batch may hold the end of one and the start of the next.
    """

    steps: int
    rows_per_step: int
    total_rows: int
    """Rows of all steps; the last batch is filled up with rows of padding."""
    rows: Rows
    order: "grain.MapDataset[int]"

    def batch(self, step: int, rows: Sequence[int] | None = None) -> Rows:
        """The batch of a step, from 1; of it only `rows`, where they are given, and no others are read."""
        assert 1 <= step <= self.steps, f"step {step} of {self.steps}"
        begin = (step - 1) * self.rows_per_step
        places = [begin + row for row in (range(self.rows_per_step) if rows is None else rows)]
        chosen = [int(self.order[place]) if place < self.total_rows else None for place in places]
        return self.rows.take(chosen)


def count_steps(train: Train, packed_rows: int) -> int:
    """Optimizer steps: those of the recipe, or as many as all rows of all epochs need."""
    return train.optimizer_steps or math.ceil(train.epochs * packed_rows / train.rows_per_step)


def count_rows(train: Train, packed_rows: int) -> int:
    """Rows of all steps, without the padding that fills up the last."""
    return train.optimizer_steps * train.rows_per_step if train.optimizer_steps else train.epochs * packed_rows


def load_batches(run: Run) -> Batches:
    """The batches of the run's data stage.

    Raises RunError where that has not run, or its files are not what its record says; DataError for too few rows for
    one step.
    """
    record = read_record(run, DataRecord)
    train = run.recipe.train
    if record.packed_rows < train.rows_per_step:
        raise DataError(
            f"train.rows_per_step: {train.rows_per_step} is more than all data makes, {record.packed_rows} packed rows "
            f"of {run.recipe.data.max_length}; set {record.packed_rows} or less, or lower data.max_length"
        )
    rows, shape = open_rows(run), (record.packed_rows, run.recipe.data.max_length)
    if rows.tokens.shape != shape:
        raise RunError(
            f"{run.record_file('data')}: is damaged: it says rows of shape {shape}, the arrays are "
            f"{rows.tokens.shape}; write both again "
            f"with: gemsmith data {run.path} --force"
        )
    return Batches(
        steps=count_steps(train, record.packed_rows),
        rows_per_step=train.rows_per_step,
        total_rows=count_rows(train, record.packed_rows),
        rows=rows,
        order=shuffled_order(record.packed_rows, run.recipe.seed),
    )


def shuffled_order(rows: int, seed: int) -> "grain.MapDataset[int]":
    """Row numbers without end: element k is the row at place k, `rows` places to an epoch."""
    import grain

    # Grain adds the epoch to the seed: of two runs with neighbouring seeds, one would see the other's epochs.
    spread = int.from_bytes(hashlib.sha256(f"rows {seed}".encode()).digest()[:4], "big")
    return grain.MapDataset.range(rows).shuffle(seed=spread).repeat()


def open_rows(run: Run) -> Rows:
    """The run's packed rows, mapped from their files.

    Raises RunError where one is gone, or not what the data stage wrote.
    """
    record = read_record(run, DataRecord)
    remedy = f"write it again with: gemsmith data {run.path} --force"
    files = {name: run.data / f"{name}.npy" for name in ARRAYS}
    if PICTURES in record.files:
        files[PICTURES] = run.data / PICTURES
    found = {}
    for name, file in files.items():
        try:
            state = file.stat()
            found[name] = _sha256(file.absolute(), state.st_size, state.st_mtime_ns)
        except FileNotFoundError:
            raise RunError(f"{file}: is missing; {remedy}") from None
        if record.files and found[name] != record.files.get(name):
            raise RunError(f"{file}: is damaged: its SHA-256 is not the one in {run.record_file('data')}; {remedy}")
    if rows_sha256(found, run.data / PICTURES) != record.rows_sha256:
        raise RunError(
            f"{run.data}: is damaged: its arrays are not those that {run.record_file('data')} was written with; "
            f"{remedy}"
        )
    pictures = StoredPictures(lines=_lines(files.pop(PICTURES)), base=run.path) if PICTURES in files else ()
    return Rows(**{name: np.load(file, mmap_mode="r") for name, file in files.items()}, pictures=pictures)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPictures:
    """The pictures of each row, read from its line once they are asked for; relative paths count from `base`."""

    lines: list[bytes]
    base: Path

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[tuple[Picture, ...]]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> tuple[Picture, ...]:
        pictures = (Picture(**values) for values in json.loads(self.lines[row]))
        return tuple(replace(picture, path=str(self.base / picture.path)) for picture in pictures)


def rows_sha256(files: Mapping[str, str], pictures: Path) -> str:
    """One SHA-256 for what the rows are: of the arrays' files, and of what `pictures` says of each row's, if any.

    Where pictures lie is no part of it, so that the same rows have the same one on every machine. `files`: name ->
    SHA-256, in the order of ARRAYS, and PICTURES where there are any.
    """
    digests = [_pictures_sha256(pictures) if name == PICTURES else digest for name, digest in files.items()]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _pictures_sha256(file: Path) -> str:
    total = hashlib.sha256()
    for line in _lines(file):
        placeless = [{**picture, "path": ""} for picture in json.loads(line)]
        total.update(json.dumps(placeless).encode() + b"\n")
    return total.hexdigest()


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines()


@cache
def _sha256(file: Path, _size_bytes: int, _changed_ns: int) -> str:
    """Once a process, as long as the file stays as it is: 1.5 GB take a second."""
    return sha256_file(file)
