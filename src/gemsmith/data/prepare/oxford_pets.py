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
from typing import NamedTuple

from gemsmith.data.dataset import source_sha256
from gemsmith.data.hub import name_split
from gemsmith.data.prepare import PreparedRecord, make_folder, write_prepared
from gemsmith.data.reader import find_files, stored_rows
from gemsmith.errors import DataError, some
from gemsmith.system.files import atomic_replace_dir, regular_file

HUB_ID = "timm/oxford-iiit-pet"
SPLITS = {"trainval": "train", "test": "test"}  # what each is called in the data set, and on the hub
UNKNOWN = "Unknown"
PROMPT = (
    f"Choose one breed of this list: {{labels}}. Answer with its name and nothing else; if none fits, answer {UNKNOWN}."
    "\n\nWhich breed is the animal in this image?"
)
_NAMED = 3
_LINE = re.compile(r"(?P<name>(?P<breed>[^\s/]+)_\d+)\s+(?P<number>[0-9]+)\s+\S+\s+\S+")
_WHERE = "give the folder that images.tar.gz and annotations.tar.gz of the data set were unpacked in"


class ImageFile(NamedTuple):
    """One line of a split: the image's name, without .jpg, the breed that is in it, and that breed's number, from 1."""

    name: str
    breed: str
    number: int


def prepare_oxford_pets(source: Path | None, out: Path, *, split: str, revision: str | None = None) -> PreparedRecord:
    """Writes a row for each image of the split, {"image", "prompt", "response"}, and returns what was written.

    Rows of the test split have all breeds as `labels`, too, which the scorer of that name reads. Paths of images are
    those seen from the folder of `out`. Without a source they are the hub's at `revision`, put into a new folder there.
    Raises DataError for what cannot be read, contradicts itself or is not there; `out` is written whole or not at all.
    """
    make_folder(out, HUB_ID)
    if source is None:
        address = name_split(HUB_ID, SPLITS[split], revision)
        images, breeds, sha256 = *fetch_images(address, out.with_name(f"{out.stem}_images")), source_sha256(address)
    else:
        address, (images, breeds) = str(source), find_images(source, split, seen_from=out.parent)
        sha256 = hashlib.sha256(b"".join(_list(source, each).read_bytes() for each in SPLITS)).hexdigest()
    prompt, labels = PROMPT.replace("{labels}", ", ".join(breeds)), {"labels": breeds} if split == "test" else {}
    rows = [{"image": image, "prompt": prompt, "response": breed} | labels for image, breed in images]
    return write_prepared(rows, out, source=address, source_sha256=sha256)


def find_images(folder: Path, split: str, *, seen_from: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The split's images by path, each with its breed, and all breeds."""
    images = {each: read_split(folder, each) for each in SPLITS}
    names: dict[int, ImageFile] = {}
    for image in (image for part in images.values() for image in part):
        if (first := names.setdefault(image.number, image)).breed != image.breed:
            what = f"class {image.number} is that of {first.name} and of {image.name}, which are two breeds"
            raise DataError(f"{folder / 'annotations'}: {what}; {_WHERE}")
    there = folder / "images"
    missing = [f"{image.name}.jpg" for image in images[split] if not (there / f"{image.name}.jpg").is_file()]
    if missing:
        of_all = f"{len(missing):,} of {len(images[split]):,}"
        raise DataError(f"{there}: {of_all} images do not exist ({some(missing, _NAMED)}); {_WHERE}")
    path = os.path.relpath(there, seen_from)
    found = [(f"{path}/{image.name}.jpg", image.breed) for image in images[split]]
    return found, sorted({image.breed for image in names.values()})


def fetch_images(address: str, folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The same of a split of the hub, whose images are written into the new folder, by their places."""
    import pyarrow.parquet

    if folder.exists():
        raise DataError(f"{folder}: already exists, and is where the images go; delete it, or name another --out")
    try:  # as Hugging Face's datasets writes it into the schema of a table; what pyarrow raises is a ValueError
        said = (pyarrow.parquet.read_schema(find_files(address)[0]).metadata or {})[b"huggingface"]
        breeds = [str(name) for name in json.loads(said)["info"]["features"]["label"]["names"]]
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{address}: does not say which breed a label is; {_WHERE}") from None
    found = []
    with atomic_replace_dir(folder) as beside:
        for number, (origin, row) in enumerate(stored_rows(address, {"image", "label"}.__contains__)):
            match row:
                case {"image": {"bytes": bytes(content)}, "label": int(label)} if 0 <= label < len(breeds):
                    (beside / f"{number:05d}.jpg").write_bytes(content)
                    found.append((f"{folder.name}/{number:05d}.jpg", breeds[label]))
                case _:
                    raise DataError(f"{address}: {origin} has no image and label as {HUB_ID} had; {_WHERE}")
    return found, sorted(breeds)


def read_split(folder: Path, split: str) -> list[ImageFile]:
    """The images that a split's list names, in its order."""
    file = _list(folder, split)
    try:
        lines = regular_file(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(f"{file}: {reason}; {_WHERE}") from None
    images = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (found := _LINE.fullmatch(line.strip())):
            allowed = "must be NAME CLASS SPECIES BREED, as Abyssinian_100 1 1 1"
            raise DataError(f"{file.name} line {number}: is {line.strip()[:80]!r}; {allowed}")
        images.append(ImageFile(found["name"], found["breed"].lower(), int(found["number"])))
    if not images:
        raise DataError(f"{file}: names no image; {_WHERE}")
    return images


def _list(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"{split}.txt"
