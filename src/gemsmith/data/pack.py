"""Documents to rows of one length: several in a row, kept apart by segments; never a document over two rows."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gemsmith.data.render import Rendered

ARRAYS: dict[str, np.dtype] = {
    "tokens": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Packed rows, all or those of a batch: arrays of shape (B, L), of the types in ARRAYS. A row of zeros is padding.

    documents [2 5 6 | 2 7], max_length 6  →  tokens    2 5 6 2 7 0
                                              segments  1 1 1 2 2 0      0 = padding
                                              positions 0 1 2 0 1 0      restart with each document
                                              loss_mask 0 1 1 0 1 0      1 where this token is a target
    """

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the order of ARRAYS; none is copied."""
        return {name: getattr(self, name) for name in ARRAYS}

    def take(self, places: Sequence[int | None]) -> "Rows":
        """[[a], [b], [c]], places [2, 0, None] → [[c], [a], [0]]"""
        return Rows(**{name: _take(array, places) for name, array in self.arrays().items()})

    def documents(self, row: int) -> list[slice]:
        """The places of each document of a row: segments 1 1 1 2 2 0 → 0:3, 3:5."""
        segments = np.asarray(self.segments[row])
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        return [slice(begin, end) for begin, end in pairwise(borders) if segments[begin]]


def assign_rows(lengths: Sequence[int], max_length: int, *, packing: bool = True) -> list[list[int]]:
    """The documents of each row, by index: best-fit decreasing, or one document a row.

    Each document, the longest first, goes into the row where it leaves the least room; ties go to the earlier document
    and the later row.

    >>> assign_rows([2, 5, 4, 3], 6)
    [[1], [2, 0], [3]]
    """
    assert all(0 < length <= max_length for length in lengths)
    if not packing:
        return [[index] for index in range(len(lengths))]
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room -> rows
    rooms: list[int] = []  # sorted keys of with_room
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), max_length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(row)
    return rows


def pack_rows(documents: Sequence[Rendered], rows: Sequence[Sequence[int]], max_length: int) -> Iterator[Rows]:
    """The rows as arrays, some hundred at a time, so that the whole is never in memory twice."""
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        yield _fill(documents, rows[begin : begin + _ROWS_AT_ONCE], max_length)


def _fill(documents: Sequence[Rendered], rows: Sequence[Sequence[int]], max_length: int) -> Rows:
    arrays = {name: np.zeros((len(rows), max_length), dtype) for name, dtype in ARRAYS.items()}
    counting = np.arange(max_length, dtype=np.int32)
    for row, members in enumerate(rows):
        begin = 0
        for segment, index in enumerate(members, start=1):
            document = documents[index]
            end = begin + len(document.ids)
            arrays["tokens"][row, begin:end] = document.ids
            arrays["segments"][row, begin:end] = segment
            arrays["positions"][row, begin:end] = counting[: end - begin]
            # A document's first token has nothing before it to be predicted from.
            arrays["loss_mask"][row, begin + 1 : end] = document.trained[1:]
            begin = end
    return Rows(**arrays)


def _take(array: np.ndarray, places: Sequence[int | None]) -> np.ndarray:
    taken = np.zeros((len(places), *array.shape[1:]), array.dtype)
    for row, place in enumerate(places):
        if place is not None:
            taken[row] = array[place]
    return taken
