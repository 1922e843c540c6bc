"""Rows that are held out and trained on as well: a score on them does not show what the model does with new ones.

Compared are hashes, so that a million rows take seconds, and evaluation needs neither data.train nor what was dropped
from it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemsmith.data.documents import Document
from gemsmith.errors import RunError
from gemsmith.messages import ImagePart, text_of

FILE = "answers.npy"
_HASH_BYTES = 8
_WHITE_SPACE = b"\t\n\v\f\r\x1c\x1d\x1e\x1f"
_SPACES = bytes.maketrans(_WHITE_SPACE, b" " * len(_WHITE_SPACE))
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How many held-out rows are trained on as well."""

    rows: int
    """All that were looked at."""
    prompts: int
    """Those whose prompt is trained on."""
    answers: int
    """Of these, those whose answer is the trained one."""
    first: tuple[str, ...]
    """Where the first of them stand."""


def write_answers(folder: Path, documents: Iterable[Document]) -> np.ndarray:
    """The hashes of the documents that are trained on, which are written for read_answers."""
    hashes = hash_answers(documents)
    np.save(folder / FILE, hashes, allow_pickle=False)
    return hashes


def read_answers(folder: Path) -> np.ndarray | None:
    """The hashes of the answers that a run is trained on; None where its data stage left none.

    Raises RunError for a damaged file.
    """
    file = folder / FILE
    try:
        found = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):
        found = None
    if found is None or found.dtype != np.uint64 or found.ndim != 2 or found.shape[1] != 2:
        raise RunError(
            f"{file}: is damaged; copy it again, or delete it, and eval does not tell which held-out rows were trained "
            "on"
        )
    return np.asarray(found)


def hash_answers(documents: Iterable[Document]) -> np.ndarray:
    """uint64 of shape (answers, 2): of each assistant turn a hash of all before it, and one with it.

    Any stretch of white space counts as one space.
    """
    hashes = b"".join(digest for document in documents for pair in _hash_turns(document) for digest in pair)
    return np.frombuffer(hashes, np.uint64).reshape(-1, 2)


def find_overlap(trained: np.ndarray, held_out: Sequence[Document]) -> Overlap:
    """What of the held-out rows' last answers is among the trained ones, which are as hash_answers gives them."""
    asked = np.frombuffer(b"".join(digest for row in held_out for digest in _hash_turns(row)[-1]), np.uint64).reshape(
        -1, 2
    )
    prompts, answers = np.isin(asked[:, 0], trained[:, 0]), np.isin(asked[:, 1], trained[:, 1])
    first = tuple(held_out[row].origin for row in np.flatnonzero(prompts)[:_NAMED])
    return Overlap(rows=len(held_out), prompts=int(prompts.sum()), answers=int(answers.sum()), first=first)


def count_shared_pictures(trained: Iterable[Document], held_out: Sequence[Document]) -> int | None:
    """Held-out rows with a picture that is trained on, by the SHA-256 of its file; None where they have no picture."""
    if not any(document.pictures for document in held_out):
        return None
    known = {picture.sha256 for document in trained for picture in document.pictures}
    return sum(any(picture.sha256 in known for picture in document.pictures) for document in held_out)


def overlap_notices(overlap: Overlap | None) -> tuple[str, ...]:
    """What a reader must know of held-out rows that are trained on, if any are; or that it is not known."""
    if overlap is None:
        return (
            "data.eval: whether held-out rows are also trained on is not known, because the run's data folder has no "
            f"{FILE}",
        )
    if not overlap.prompts:
        return ()
    named = ", ".join(overlap.first) + (", …" if overlap.prompts > len(overlap.first) else "")
    same = f"{overlap.answers:,}" if overlap.answers else "none"
    text = (
        f"data.eval: held-out rows whose prompt is also trained on: {overlap.prompts:,} of {overlap.rows:,} ({named}), "
        f"{same} of them with the same answer; a score on such rows does not show how the model does on new ones: "
        "take them out of data.train or data.eval"
    )
    return (text,)


def _hash_turns(document: Document) -> list[tuple[bytes, bytes]]:
    total, found = hashlib.blake2b(digest_size=_HASH_BYTES), []
    pictures = iter(document.pictures)
    for message in document.messages:
        before = total.digest()
        # None of the separators can be in the text: they are white space.
        total.update(b"%b\x1f%b\x1e" % (message.role.encode(), _spaced(text_of(message))))
        for place, part in enumerate(message.parts):
            if isinstance(part, ImagePart):
                total.update(b"%d\x1d%b\x1e" % (place, next(pictures).sha256.encode()))
        if message.role == "assistant":
            found.append((before, total.digest()))
    return found


def _spaced(text: str) -> bytes:
    """The text with one space for any white space, and none at its ends; three times as fast as by split and join."""
    spaced = text.encode().translate(_SPACES)
    while b"  " in spaced:
        spaced = spaced.replace(b"  ", b" ")
    return spaced.strip(b" ")
