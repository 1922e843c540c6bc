"""A message's content as typed parts: texts, and pictures by path, file URL or bytes."""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gemsmith.characters import is_utf_8
from gemsmith.errors import DataError
from gemsmith.files import expand_home
from gemsmith.messages import ImagePart, Part, TextPart, join_texts

IMAGE_COLUMNS = ("image", "images")
"""Columns of a row beside its texts: a picture, or a list of them."""
_KEYS = ("path", "bytes", "url", "image")
_PARTS = '{"type": "text", "text": ...} or {"type": "image", "path" or "bytes" or "url": ...}'


@dataclass(frozen=True, kw_only=True)
class PictureSource:
    """Where pictures of rows come from and go to: relative paths count from `folder`, `keep` makes a file of bytes."""

    folder: Path = field(default_factory=Path)
    keep: Callable[[bytes], str] | None = None
    """None: bytes stay in memory."""


def read_column(row: Mapping[str, Any], origin: str, source: PictureSource) -> tuple[ImagePart, ...]:
    """The pictures in the row's own columns of them, in order."""
    given = {name: row[name] for name in IMAGE_COLUMNS if row.get(name) not in (None, "", [])}
    if len(given) > 1:
        raise DataError(f"{origin}: has image and images; keep one of them")
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        names = [f"{name}[{index}]" for index in range(len(values))] if isinstance(value, list) else [name]
        return tuple(read_image(value, f"{origin}: {name}", source) for name, value in zip(names, values, strict=True))
    return ()


def read_parts(content: Any, where: str, column: Iterator[ImagePart], source: PictureSource) -> tuple[Part, ...]:
    """The parts of a message's content, a string or a list of parts.

    A bare {"type": "image"} is the next of `column`, the pictures in the row's own column.
    """
    if isinstance(content, str):
        return (TextPart(text=content),)
    if not isinstance(content, list):
        raise DataError(f"{where} is {kind(content)}; must be text, or a list of parts, each {_PARTS}")
    return join_texts(_read_part(part, where, column, source) for part in content)


def read_image(value: Any, where: str, source: PictureSource) -> ImagePart:
    """The picture of a path, a file URL, bytes, or {"bytes": ..., "path": ...} as Hugging Face's datasets hold it."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = _decode(data, where) if isinstance(data, str) else value.get("path") if data is None else data
    if isinstance(value, bytes):
        return ImagePart(path=source.keep(value)) if source.keep else ImagePart(data=value)
    if isinstance(value, str) and value:
        return ImagePart(path=str(source.folder / _path_of(value, where)))
    raise DataError(f"{where} has a picture that is {kind(value)}; give a path, a file:// URL or bytes")


def kind(value: Any) -> str:
    """What a value of JSON is, as an error line says it."""
    names = {
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _read_part(part: Any, where: str, column: Iterator[ImagePart], source: PictureSource) -> Part:
    # Tables fill a field that only some parts have with null.
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    match given:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
        case {"type": "image"}:
            return _read_image_part(given, where, column, source)
    what = given.get("type", kind(part))
    raise DataError(f"{where} has a part that is {what}; a part must be {_PARTS}")


def _read_image_part(
    part: Mapping[str, Any], where: str, column: Iterator[ImagePart], source: PictureSource
) -> ImagePart:
    given = [name for name in _KEYS if name in part]
    if len(given) > 1:
        raise DataError(f"{where} has a picture with {' and '.join(given)}; keep one of them")
    if not given:
        if (image := next(column, None)) is None:
            raise DataError(
                f"{where} has more pictures than the row's column images; give each a path, bytes or a file:// URL"
            )
        return image
    if given == ["url"] and not str(part["url"]).startswith("file://"):
        raise DataError(
            f"{where} has a picture at {str(part['url'])[:80]!r}; only file:// URLs are read: fetch it first"
        )
    value = part[given[0]]
    return read_image({"bytes": value} if given == ["bytes"] else value, where, source)


def _path_of(text: str, where: str) -> Path:
    if not is_utf_8(text):
        raise DataError(f"{where} has a picture at {text[:80]!r}, a name that is not in UTF-8; rename the file")
    if "://" not in text and not text.startswith("data:"):
        return expand_home(text)
    url = urlsplit(text)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise DataError(f"{where} has a picture at {text[:80]!r}; only file:// URLs are read: fetch it first")
    return Path(unquote(url.path))


def _decode(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{where} has a picture whose bytes are not base64 ({error}); write them so, or a path"
        ) from None
