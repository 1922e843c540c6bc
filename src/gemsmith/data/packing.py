"""Documents to rows of one length: several in a row, kept apart by segments; never a document over two rows."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from gemsmith.data.tokenize import Rendered
from gemsmith.images.check import ImageInfo

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
    images: Sequence[tuple[ImageInfo, ...]] = ()
    """Of each row, in the order of their soft tokens; none at all where no row has any."""

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the order of ARRAYS; none is copied."""
        return {name: getattr(self, name) for name in ARRAYS}

    def take(self, places: Sequence[int | None]) -> "Rows":
        """What stands at the places: of [[a], [b], [c]], places [2, 0, None] give [[c], [a], [0]]."""
        images = tuple(() if place is None else self.images[place] for place in places) if self.images else ()
        arrays = {}
        for name, array in self.arrays().items():
            taken = arrays[name] = np.zeros((len(places), *array.shape[1:]), array.dtype)
            for row, place in enumerate(places):
                if place is not None:
                    taken[row] = array[place]
        return Rows(**arrays, images=images)

    def documents(self, row: int) -> list[slice]:
        """The places of each document of a row: segments 1 1 1 2 2 0 → 0:3, 3:5."""
        segments = np.asarray(self.segments[row])
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        return [slice(begin, end) for begin, end in pairwise(borders) if segments[begin]]


def assign_rows(
    lengths: Sequence[int],
    max_length: int,
    *,
    patches: Sequence[int] = (),
    max_patches: int = 0,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """The documents of each row, by index: best fit.

    Each document goes into the row where it leaves the least room; ties go to the row that was changed last. They come
    in `order`, or the longest first, ties by place. `patches` are of each document's images; a row holds max_patches.

    >>> assign_rows([2, 5, 4, 3], 6), assign_rows([2, 2, 2], 6, patches=[4, 4, 0], max_patches=4)
    ([[1], [2, 0], [3]], [[0], [1, 2]])
    >>> assign_rows([3, 3, 3, 3], 6, order=[2, 0, 3, 1])
    [[2, 0], [3, 1]]
    """
    patches = patches or [0] * len(lengths)
    assert all(0 < length <= max_length for length in lengths) and max(patches, default=0) <= max_patches
    rows: list[list[int]] = []
    patch_rooms: list[int] = []  # of each row
    fewest = min((count for count in patches if count), default=1)
    # Rows that may take another image are apart from those that may not, through which none need look.
    taking, full = _Rooms(), _Rooms()
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True) if order is None else order:
        length, count = lengths[index], patches[index]
        fits = [
            (*found, rooms)
            for rooms in ((taking,) if count else (full, taking))
            if (found := rooms.find(length, patch_rooms, count))
        ]
        if fits:
            room, row, rooms = min(fits, key=lambda fit: fit[0])
            rooms.remove(room, row)
        else:
            row, room = len(rows), max_length
            rows.append([])
            patch_rooms.append(max_patches)
        rows[row].append(index)
        patch_rooms[row] -= count
        if room > length:
            (taking if patch_rooms[row] >= fewest else full).add(room - length, row)
    return rows


def drawn_order(documents: int, seed: int) -> list[int]:
    """The documents in an order that the recipe's seed draws: the same on every machine."""
    drawn = [hashlib.sha256(f"documents {seed} {index}".encode()).digest() for index in range(documents)]
    return sorted(range(documents), key=drawn.__getitem__)


@dataclass(frozen=True, kw_only=True)
class _Rooms:
    """Rows by the room that is left in them."""

    sizes: list[int] = field(default_factory=list)  # sorted keys of `rows`
    rows: dict[int, list[int]] = field(default_factory=dict)

    def find(self, length: int, patch_rooms: Sequence[int], patches: int) -> tuple[int, int] | None:
        """The least room of that length or more, and the row last put there that has room for so many patches."""
        for size in islice(self.sizes, bisect_left(self.sizes, length), None):
            for row in reversed(self.rows[size]):
                if patch_rooms[row] >= patches:
                    return size, row
        return None

    def add(self, size: int, row: int) -> None:
        if size not in self.rows:
            insort(self.sizes, size)
        self.rows.setdefault(size, []).append(row)

    def remove(self, size: int, row: int) -> None:
        rows = self.rows[size]
        del rows[len(rows) - 1 - rows[::-1].index(row)]
        if not rows:
            del self.rows[size], self.sizes[bisect_left(self.sizes, size)]


def pack_rows(documents: Sequence[Rendered], rows: Sequence[Sequence[int]], max_length: int) -> Iterator[Rows]:
    """The rows as arrays, some hundred at a time, so that the whole is never in memory twice."""
    counting = np.arange(max_length, dtype=np.int32)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        chunk = rows[first : first + _ROWS_AT_ONCE]
        arrays = {name: np.zeros((len(chunk), max_length), dtype) for name, dtype in ARRAYS.items()}
        images = tuple(tuple(seen for index in members for seen in documents[index].images) for members in chunk)
        for row, members in enumerate(chunk):
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
        yield Rows(**arrays, images=images if any(images) else ())
