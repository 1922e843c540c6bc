"""The Oxford-IIIT Pet data set as rows: 37 breeds of cats and dogs, in the split that it is published with.

FOLDER/images/american_bulldog_10.jpg
FOLDER/annotations/trainval.txt, test.txt     american_bulldog_10 2 2 1     name, class, species, breed of the species

Breeds are named as the files are, without the number: `American Bulldog`. Pictures stay where they are, and are not
opened here: the data stage looks at each.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gemsmith.errors import DataError
from gemsmith.runs.records import PreparedRecord
from gemsmith.system.files import regular_file, replacing, sha256_file

SPLITS = ("trainval", "test")
UNKNOWN = "Unknown"
PROMPT = (
    "Which breed is the cat or dog in this picture? Answer with one of these, and nothing else: {labels}. If it is "
    f"none of them, answer {UNKNOWN}."
)
_NAMED = 3
_WHERE = "give the folder that images.tar.gz and annotations.tar.gz of the data set were unpacked in"


class Photo(NamedTuple):
    """One line of a split: the picture's name, without .jpg, and the breed's number, from 1."""

    name: str
    number: int

    @property
    def breed(self) -> str:
        """Its breed in words.

        >>> Photo("american_bulldog_10", 2).breed
        'American Bulldog'
        """
        return self.name.rpartition("_")[0].replace("_", " ").title()


def prepare_oxford_pets(folder: Path, out: Path, *, split: str) -> PreparedRecord:
    """Writes a row for each picture of the split, {"image", "prompt", "response"}, and returns what was written.

    Rows of the test split have all breeds as `labels`, too, which the scorer of that name reads. Paths of pictures are
    those seen from the folder of `out`. Raises DataError for lists that cannot be read or contradict each other, and
    pictures that are not there; `out` is written whole or not at all.
    """
    photos = {each: read_split(folder, each) for each in SPLITS}
    breeds = _breeds([photo for part in photos.values() for photo in part], folder)
    _refuse_missing(folder, photos[split])
    prompt = PROMPT.replace("{labels}", ", ".join(breeds))
    seen_from = os.path.relpath(folder / "images", out.parent)
    with replacing(out) as file:
        for photo in photos[split]:
            row: dict[str, Any] = {"image": f"{seen_from}/{photo.name}.jpg", "prompt": prompt, "response": photo.breed}
            row |= {"labels": breeds} if split == "test" else {}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    lists = b"".join(_list(folder, each).read_bytes() for each in SPLITS)
    return PreparedRecord(
        source=str(folder),
        source_sha256=hashlib.sha256(lists).hexdigest(),
        out=str(out),
        out_sha256=sha256_file(out),
        rows_read=len(photos[split]),
        rows_written=len(photos[split]),
        dropped={},
    )


def read_split(folder: Path, split: str) -> list[Photo]:
    """The photos that a split's list names, in its order."""
    file = _list(folder, split)
    try:
        lines = regular_file(file).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{file}: is not there; {_WHERE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); {_WHERE}") from None
    photos = [
        _read_line(line, f"{file.name} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not photos:
        raise DataError(f"{file}: names no picture; {_WHERE}")
    return photos


def _list(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"{split}.txt"


def _read_line(line: str, origin: str) -> Photo:
    match line.split():
        case [name, number, _, _] if number.isascii() and number.isdigit() and _is_numbered(name):
            return Photo(name, int(number))
    raise DataError(f"{origin}: is {line.strip()[:80]!r}; must be NAME CLASS SPECIES BREED, as Abyssinian_100 1 1 1")


def _is_numbered(name: str) -> bool:
    breed, _, number = name.rpartition("_")
    return bool(breed) and number.isdigit() and "/" not in name


def _breeds(photos: Iterable[Photo], folder: Path) -> list[str]:
    """All breeds, by the alphabet. Raises DataError where a name and its number do not go together."""
    names: dict[int, Photo] = {}
    for photo in photos:
        if (first := names.setdefault(photo.number, photo)).breed != photo.breed:
            raise DataError(
                f"{folder / 'annotations'}: class {photo.number} is that of {first.name} and of {photo.name}, which "
                f"are two breeds; {_WHERE}"
            )
    return sorted({photo.breed for photo in names.values()})


def _refuse_missing(folder: Path, photos: Sequence[Photo]) -> None:
    images = folder / "images"
    missing = [photo.name for photo in photos if not (images / f"{photo.name}.jpg").is_file()]
    if missing:
        named = ", ".join(f"{name}.jpg" for name in missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
        raise DataError(f"{images}: {len(missing):,} of {len(photos):,} pictures are not there ({named}); {_WHERE}")
