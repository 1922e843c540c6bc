"""Rows that are trained on and tested on: a score on them does not show what the model does with new ones.

Held-out rows are compared by hashes, so that a million take seconds, and evaluation needs neither data.train nor what
was dropped from it. With a benchmark's problems, by normalized tokens: exact is the same tokens in the same order,
near at least a stated share of a problem's n-grams. N-grams that many problems have (`I would like you to implement a
module named TopModule`) say nothing and do not count; a problem with few others is compared exactly alone.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemsmith.data.documents import Document
from gemsmith.data.prepare import SharedRow
from gemsmith.errors import RunError
from gemsmith.runs.records import HeldOut
from gemsmith.tasks.messages import ImagePart, text_of

FILE = "answers.npy"
_HASH_BYTES = 8
_SPACES = bytes.maketrans(b"\t\n\v\f\r\x1c\x1d\x1e\x1f", b" " * 9)
_NAMED = 3


class Overlap(NamedTuple):
    """How many held-out rows are trained on as well, and where the first of those whose prompt is stand."""

    counts: HeldOut
    first: tuple[str, ...]


def write_answers(folder: Path, digests: Iterable[bytes]) -> np.ndarray:
    """The hashes of what is trained on, of which `digests` are each document's; they are written for read_answers."""
    hashes = _as_pairs(digests)
    np.save(folder / FILE, hashes, allow_pickle=False)
    return hashes


def read_answers(folder: Path) -> np.ndarray | None:
    """The hashes that write_answers wrote; None where there are none. Raises RunError for a damaged file."""
    file = folder / FILE
    try:
        found = np.load(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):
        found = None
    if found is None or found.dtype != np.uint64 or found.ndim != 2 or found.shape[1] != 2:
        remedy = "copy it again, or delete it, and eval does not tell which held-out rows were trained on"
        raise RunError(f"{file}: is damaged; {remedy}")
    return np.asarray(found)


def find_overlap(hashes: np.ndarray, held_out: Sequence[Document], trained: Iterable[Document] = ()) -> Overlap:
    """What of the held-out rows' last answers is among the trained ones, whose hashes are as write_answers gives them.

    Where they have images: how many have one of the `trained` rows', by the SHA-256 of its file.
    """
    asked = _as_pairs(hash_turns(row)[-2 * _HASH_BYTES :] for row in held_out)
    prompts, answers = np.isin(asked[:, 0], hashes[:, 0]), np.isin(asked[:, 1], hashes[:, 1])
    known = {image.sha256 for document in trained for image in document.images}
    same_image = sum(any(image.sha256 in known for image in document.images) for document in held_out)
    counts = HeldOut(
        rows=len(held_out),
        same_prompt=int(prompts.sum()),
        same_answer=int(answers.sum()),
        same_image=same_image if any(document.images for document in held_out) else None,
    )
    return Overlap(counts, tuple(held_out[row].origin for row in np.flatnonzero(prompts)[:_NAMED]))


def overlap_notices(overlap: Overlap | None) -> tuple[str, ...]:
    """What a reader must know of held-out rows that are trained on, if any are; or that it is not known."""
    if overlap is None:
        why = f"because the run's data folder has no {FILE}"
        return (f"data.eval: whether held-out rows are also trained on is not known, {why}",)
    counts, first = overlap
    if not counts.same_prompt:
        return ()
    named = ", ".join(first) + (", …" if counts.same_prompt > len(first) else "")
    same = f"{counts.same_answer:,}" if counts.same_answer else "none"
    found = f"{counts.same_prompt:,} of {counts.rows:,} ({named}), {same} of them with the same answer"
    why = "a score on such rows does not show how the model does on new ones: take them out of data.train or data.eval"
    return (f"data.eval: held-out rows whose prompt is also trained on: {found}; {why}",)


def hash_turns(document: Document) -> bytes:
    """Of each trained turn a hash of all before it, and one with it; any white space counts as one space."""
    total, found = hashlib.blake2b(digest_size=_HASH_BYTES), bytearray()
    images = iter(document.images)
    if document.tools:
        total.update(repr(document.tools).encode())
    for index, message in enumerate(document.messages):
        before = total.digest()
        # None of the separators can be in the text: they are white space.
        text = text_of(message).encode().translate(_SPACES)
        while b"  " in text:  # three times as fast as by split and join
            text = text.replace(b"  ", b" ")
        total.update(b"%b\x1f%b\x1e" % (message.role.encode(), text.strip(b" ")))
        if message.beside:
            total.update(repr(message.beside).encode())
        for place, part in enumerate(message.parts):
            if isinstance(part, ImagePart):
                total.update(b"%d\x1d%b\x1e" % (place, next(images).sha256.encode()))
        if message.role == "assistant" and index >= document.context:
            found += before + total.digest()
    return bytes(found)


def _as_pairs(digests: Iterable[bytes]) -> np.ndarray:
    """uint64 of shape (answers, 2)."""
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


N = 8  # tokens in an n-gram
NEAR = {"specification": 0.5, "module": 0.8}
"""The share of a problem's n-grams from which on a row is near. Modules of one kind resemble each other more."""
_FEWEST = 8
_COMMON_SHARE, _COMMON_LEAST = 0.05, 3
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WORDS = re.compile(r"\w+")
_CODE = re.compile(r"\w+|[^\w\s]")
_MODULE_NAME = re.compile(r"\bmodule\s+(\w+)")


@dataclass(frozen=True, kw_only=True)
class Index:
    """The problems' texts of one kind, to be searched for."""

    kind: str
    exact: Mapping[tuple[str, ...], str]
    grams: Mapping[tuple[str, ...], Sequence[str]]  # an n-gram that counts -> the problems that have it
    sizes: Mapping[str, int]  # how many n-grams of a problem count, where they are enough


def build_index(kind: str, texts: Mapping[str, str]) -> Index:
    """The index of texts by their problems' names; `kind` is specification or module."""
    tokens = {name: normalize(kind, text) for name, text in texts.items()}
    grams: dict[tuple[str, ...], list[str]] = {}
    for name, each in tokens.items():
        for gram in set(_grams(each)):
            grams.setdefault(gram, []).append(name)
    most = max(_COMMON_LEAST, _COMMON_SHARE * len(texts))
    telling = {gram: names for gram, names in grams.items() if len(names) <= most}
    sizes = Counter(name for names in telling.values() for name in names)
    return Index(
        kind=kind,
        exact={each: name for name, each in reversed(tokens.items())},
        grams=telling,
        sizes={name: size for name, size in sizes.items() if size >= _FEWEST},
    )


def find_match(index: Index, row: str, text: str) -> SharedRow | None:
    """The problem that a text of a row is most like, where it is the same or near; of equals the first by name."""
    tokens = normalize(index.kind, text)
    if tokens in index.exact:
        return SharedRow(row=row, problem=index.exact[tokens], kind=index.kind, exact=True, share=1.0)
    hits = Counter(name for gram in set(_grams(tokens)) for name in index.grams.get(gram, ()))
    shares = {name: count / index.sizes[name] for name, count in hits.items() if name in index.sizes}
    name = min(shares, key=lambda name: (-shares[name], name), default=None)
    if name is None or shares[name] < NEAR[index.kind]:
        return None
    return SharedRow(row=row, problem=name, kind=index.kind, exact=False, share=round(shares[name], 4))


def normalize(kind: str, text: str) -> tuple[str, ...]:
    """The tokens that are compared: a specification's words in small letters, a module's code without comments.

    >>> normalize("module", "module And2 (input a); // gate")
    ('module', 'TOP', '(', 'input', 'a', ')', ';')
    """
    if kind == "specification":
        return tuple(_WORDS.findall(text.lower()))
    code = _COMMENT.sub(" ", text)
    tops = _MODULE_NAME.findall(code)
    # The module's own name is all that tells a copy made for another benchmark from the original.
    names = {tops[-1]: "TOP"} if tops else {}
    return tuple(names.get(token, token) for token in _CODE.findall(code))


def _grams(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return zip(*(tokens[place:] for place in range(N)), strict=False)
