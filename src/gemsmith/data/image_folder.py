"""A folder of images by class as rows: each sub-folder is a class, its name the answer, and the prompt is the recipe's.

pets/abyssinian/1.jpg   →  user: the image, then data.prompt    assistant: abyssinian
pets/great_dane/7.jpg   →                                         assistant: great dane

Or a file in it says of which class each image is: pets/metadata.csv, with the columns file_name and label.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsmith.data.reader import stored_rows
from gemsmith.errors import DataError, some, suggest
from gemsmith.recipe.schema import Data
from gemsmith.system.characters import is_utf_8
from gemsmith.system.files import expanduser

FORMAT = "image-folder"
SUFFIXES = frozenset(".avif .bmp .gif .jfif .jp2 .jpe .jpeg .jpg .pbm .pgm .png .ppm .tif .tiff .webp".split())
_LABEL_FILES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_NAMED = 4


def find_image_files(source: str) -> dict[str, list[Path]]:
    """The files of each class, both in order. Raises DataError where there are none, or no classes."""
    folder = expanduser(source)
    if not folder.is_dir():
        raise DataError(f"{source}: is not a folder; data.format {FORMAT} needs one with a sub-folder for each class")
    if labels := find_label_file(source):
        return _labeled_files(folder, labels)
    found: dict[str, list[Path]] = {}
    for inner in filter(Path.is_dir, _visible(folder)):
        files = _visible(inner)
        if deeper := next(filter(Path.is_dir, files), None):
            remedy = f"{FORMAT} has one folder for each class, images in it"
            raise DataError(f"{deeper}: is a folder in a class's folder; {remedy}")
        found[inner.name] = [file for file in files if file.suffix.lower() in SUFFIXES]
        if not found[inner.name]:
            raise DataError(f"{inner}: holds no image; put some there, or take the folder out")
    if not found:
        raise DataError(f"{folder}: holds no sub-folders; data.format {FORMAT} needs one for each class")
    return found


def folder_files(source: str) -> tuple[Path, ...]:
    """The files that the rows are made of: the one with the labels, if any, and the images, class by class."""
    labels, images = find_label_file(source), find_image_files(source).values()
    return (*([labels] if labels else []), *(file for files in images for file in files))


def find_label_file(source: str) -> Path | None:
    """The file that says of which class each image is, where there is one."""
    return next((file for name in _LABEL_FILES if (file := expanduser(source) / name).exists()), None)


def _labeled_files(folder: Path, labels: Path) -> dict[str, list[Path]]:
    found: dict[str, set[Path]] = {}
    for origin, row in stored_rows(str(labels), lambda _name: True):
        name, label = (row.get(column) for column in ("file_name", "label")) if isinstance(row, Mapping) else ("", "")
        if not isinstance(name, str) or not name or not isinstance(label, str | int) or not str(label).strip():
            raise DataError(f"{origin}: must have an image's file_name and its label; {labels} needs both in each row")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{origin}: names {name}; must be a file below {folder}")
        found.setdefault(str(label), set()).add(folder / name)
    if not found:
        raise DataError(f"{labels}: names no image; write a row with file_name and label for each")
    classes: dict[Path, str] = {}
    for label, files in found.items():
        for file in files:
            if (other := classes.setdefault(file, label)) != label:
                raise DataError(f"{labels}: {file.name} is of two classes, {other} and {label}; keep one")
    return {label: sorted(found[label]) for label in sorted(found)}


def folder_rows(source: str, data: Data, *, held_out: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row and where it stands, by class: the share that is held out, or the others. Raises as find_image_files."""
    assert data.prompt is not None, "checked with the recipe"
    images = find_image_files(source)
    labels = _label_texts(images, data.labels)
    folder = expanduser(source)
    prompt = data.prompt.replace("{labels}", ", ".join(sorted(set(labels.values()))))
    for name, files in images.items():
        share = _held_out(files, data.held_out)
        for file in files:
            if data.held_out and (file in share) != held_out:
                continue
            content = [{"type": "image", "path": str(file.absolute())}, {"type": "text", "text": prompt}]
            yield str(file.relative_to(folder)), {"prompt": content, "response": labels[name]}


def folder_labels(source: str, data: Data) -> list[str]:
    """What the rows of such a folder answer, each once. Raises DataError as folder_rows."""
    return sorted(set(_label_texts(find_image_files(source), data.labels).values()))


def folder_notices(source: str, data: Data) -> Iterator[str]:
    """What a reader must know of the folder: files in it that are not read, and how much of it is held out."""
    images, folder = find_image_files(source), expanduser(source)
    read = {file for files in images.values() for file in files}
    folders = sorted({folder, *(file.parent for file in read if file.parent.is_dir())})
    known = {*read, find_label_file(source)}
    there = (file for inner in folders for file in _visible(inner))
    others = [file for file in there if file.is_file() and file not in known]
    if others:
        named = some((str(file.relative_to(folder)) for file in others), _NAMED)
        what = "files that are no images by their names, or of no class, are ignored"
        yield f"data.train: {what}: {len(others):,} ({named})"
    if data.held_out:
        count = sum(len(_held_out(files, data.held_out)) for files in images.values())
        how = f"{count:,} are not trained on but held out, by a hash of their names"
        yield f"data.held_out: of {len(read):,} images in {len(images):,} classes {how}"


def _held_out(files: Sequence[Path], share: float) -> set[Path]:
    """The share of a class's files, at least one and not all of them: those whose names have the lowest hashes."""
    if not share:
        return set()
    count = min(max(1, math.floor(share * len(files) + 0.5)), len(files) - 1)
    by_hash = sorted(files, key=lambda file: hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest())
    return set(by_hash[:count])


def _label_texts(images: Mapping[str, Sequence[Path]], labels: Mapping[str, str]) -> dict[str, str]:
    """Each class's answer: as data.labels has it, or else its folder's name with spaces for underscores."""
    for name in labels:
        if name not in images:
            allowed = f"allowed: {some(images, _NAMED)}"
            raise DataError(f"data.labels: {name} is no sub-folder{suggest(name, images)}; {allowed}")
    missing = [name for name in images if labels and name not in labels]
    if missing:
        raise DataError(f"data.labels: has no {some(missing, _NAMED)}; name every sub-folder, or leave data.labels out")
    texts = {name: labels.get(name, name.replace("_", " ").strip()) for name in images}
    if empty := next((name for name, text in texts.items() if not text.strip()), None):
        raise DataError(f"data.labels: {empty} has no text; give it one")
    return texts


def _visible(folder: Path) -> list[Path]:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from None
    # Prompts, records and the list of images are written in UTF-8.
    if other := next((entry for entry in entries if not is_utf_8(entry.name)), None):
        raise DataError(f"{other}: its name is not in UTF-8; rename it")
    return entries
