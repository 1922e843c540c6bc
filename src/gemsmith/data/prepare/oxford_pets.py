"""The Oxford-IIIT Pet data set as rows: 37 breeds of cats and dogs, in the split that it is published with.

FOLDER/images/american_bulldog_10.jpg
FOLDER/annotations/trainval.txt, test.txt     american_bulldog_10 2 2 1     name, class, species, breed of the species

Breeds are named as timm/oxford-iiit-pet names them, the files' names without the number: `american_bulldog`. Images
stay where they are, and are not opened here: the data stage looks at each.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from gemsmith.errors import DataError, some
from gemsmith.runs.records import PreparedRecord
from gemsmith.system.files import atomic_write, regular_file, sha256_file

SPLITS = ("trainval", "test")
UNKNOWN = "Unknown"
PROMPT = (
    f"Choose one breed of this list: {{labels}}. Answer with its name and nothing else; if none fits, answer {UNKNOWN}."
    "\n\nWhich breed is the animal in this image?"
)
_NAMED = 3
_LINE = re.compile(r"(?P<name>[^\s/]+_\d+)\s+(?P<number>[0-9]+)\s+\S+\s+\S+")
_WHERE = "give the folder that images.tar.gz and annotations.tar.gz of the data set were unpacked in"


class ImageFile(NamedTuple):
    """One line of a split: the image's name, without .jpg, and the breed's number, from 1."""

    name: str
    number: int

    @property
    def breed(self) -> str:
        """Its breed.

        >>> ImageFile("Egyptian_Mau_10", 12).breed
        'egyptian_mau'
        """
        return self.name.rpartition("_")[0].lower()


def prepare_oxford_pets(folder: Path, out: Path, *, split: str) -> PreparedRecord:
    """Writes a row for each image of the split, {"image", "prompt", "response"}, and returns what was written.

    Rows of the test split have all breeds as `labels`, too, which the scorer of that name reads. Paths of images are
    those seen from the folder of `out`. Raises DataError for lists that cannot be read or contradict each other, and
    images that do not exist; `out` is written whole or not at all.
    """
    images = {each: read_split(folder, each) for each in SPLITS}
    names: dict[int, ImageFile] = {}
    for image in (image for part in images.values() for image in part):
        if (first := names.setdefault(image.number, image)).breed != image.breed:
            raise DataError(
                f"{folder / 'annotations'}: class {image.number} is that of {first.name} and of {image.name}, which "
                f"are two breeds; {_WHERE}"
            )
    breeds = sorted({image.breed for image in names.values()})
    there = folder / "images"
    missing = [f"{image.name}.jpg" for image in images[split] if not (there / f"{image.name}.jpg").is_file()]
    if missing:
        of_all = f"{len(missing):,} of {len(images[split]):,}"
        raise DataError(f"{there}: {of_all} images do not exist ({some(missing, _NAMED)}); {_WHERE}")
    prompt = PROMPT.replace("{labels}", ", ".join(breeds))
    seen_from = os.path.relpath(there, out.parent)
    with atomic_write(out) as file:
        for image in images[split]:
            row: dict[str, Any] = {"image": f"{seen_from}/{image.name}.jpg", "prompt": prompt, "response": image.breed}
            row |= {"labels": breeds} if split == "test" else {}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    lists = b"".join(_list(folder, each).read_bytes() for each in SPLITS)
    return PreparedRecord(
        source=str(folder),
        source_sha256=hashlib.sha256(lists).hexdigest(),
        out=str(out),
        out_sha256=sha256_file(out),
        rows_read=len(images[split]),
        rows_written=len(images[split]),
    )


def read_split(folder: Path, split: str) -> list[ImageFile]:
    """The images that a split's list names, in its order."""
    file = _list(folder, split)
    try:
        lines = regular_file(file).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{file}: does not exist; {_WHERE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); {_WHERE}") from None
    images = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (found := _LINE.fullmatch(line.strip())):
            raise DataError(
                f"{file.name} line {number}: is {line.strip()[:80]!r}; must be NAME CLASS SPECIES BREED, as "
                "Abyssinian_100 1 1 1"
            )
        images.append(ImageFile(found["name"], int(found["number"])))
    if not images:
        raise DataError(f"{file}: names no image; {_WHERE}")
    return images


def _list(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"{split}.txt"
