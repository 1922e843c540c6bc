"""What in a row is an image, by its path, a file URL or its bytes, and what is text."""

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gemsmith.errors import RowError
from gemsmith.system.characters import is_utf_8
from gemsmith.system.files import expanduser
from gemsmith.tasks.messages import ImagePart, Part, TextPart, join_texts

IMAGE_COLUMNS = ("image", "images")  # columns of a row beside its texts: an image, or a list of them
_bad_image = partial(RowError, "unusable image")
_PARTS = '{"type": "text", "text": ...} or {"type": "image", "path" or "bytes" or "url": ...}'
_URLS = "only file:// and data: URLs are read: fetch it first"
PLACEHOLDER = "<image>"  # stands for the next of the row's own images in a text, as LLaVA and LLaMA-Factory write it


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Where images of rows come from and go to: relative paths count from `folder`, `keep` makes a file of bytes."""

    folder: Path = field(default_factory=Path)
    keep: Callable[[bytes], str] | None = None  # None: bytes stay in memory


def read_column(row: Mapping[str, Any], origin: str, source: ImageSource) -> tuple[ImagePart, ...]:
    """The images in the row's own columns of them, in order."""
    given = {name: row[name] for name in IMAGE_COLUMNS if row.get(name) not in (None, "", [])}
    if len(given) > 1:
        raise _bad_image(f"{origin}: has image and images; keep one of them")
    for name, value in given.items():
        if not isinstance(value, list):
            return (read_image(value, f"{origin}: {name}", source),)
        return tuple(read_image(image, f"{origin}: {name}[{place}]", source) for place, image in enumerate(value))
    return ()


def read_parts(content: Any, where: str, column: Iterator[ImagePart] | None, source: ImageSource) -> tuple[Part, ...]:
    """The parts of a message's content; a bare {"type": "image"} is the next of `column`, the row's own images.

    So is each <image> in a text, where the row has images of its own.
    """
    if isinstance(content, str):
        if column is None or PLACEHOLDER not in content:
            return (TextPart(text=content),)
        texts = [{"type": "text", "text": text} for text in content.split(PLACEHOLDER)]
        content = [part for text in texts for part in ({"type": "image"}, text) if part.get("text") != ""][1:]
    if not isinstance(content, list):
        raise RowError("not text", f"{where} is {kind(content)}; must be text, or a list of parts, each {_PARTS}")
    return join_texts(_read_part(part, where, column, source) for part in content)


def read_image(value: Any, where: str, source: ImageSource) -> ImagePart:
    """The image of a path, a file URL, bytes, or {"bytes": ..., "path": ...} as Hugging Face's datasets hold it."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = value.get("path") if data is None else data
        if isinstance(data, str):
            value = _decode(data, where)
    elif isinstance(value, str) and value.startswith("data:image/"):
        value = _decode(value.partition(";base64,")[2], where)
    if isinstance(value, bytes):
        return ImagePart(path=source.keep(value)) if source.keep else ImagePart(data=value)
    if isinstance(value, str) and value:
        if not is_utf_8(value):
            raise _bad_image(f"{where} has an image at {value[:80]!r}, a name that is not in UTF-8; rename the file")
        if "://" not in value and not value.startswith("data:"):
            return ImagePart(path=str(source.folder / expanduser(value)))
        url = urlsplit(value)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise _bad_image(f"{where} has an image at {value[:80]!r}; {_URLS}")
        return ImagePart(path=str(source.folder / unquote(url.path)))
    raise _bad_image(f"{where} has an image that is {kind(value)}; give a path, a file:// URL or bytes")


def _decode(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        fault = f"are not base64 ({error}); write them so, or a path"
        raise _bad_image(f"{where} has an image whose bytes {fault}") from None


def kind(value: Any) -> str:
    """What a value of JSON is, as an error line says it."""
    if value is None:
        return "null"
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _read_part(part: Any, where: str, column: Iterator[ImagePart] | None, source: ImageSource) -> Part:
    # Tables fill a field that only some parts have with null.
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    match given:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
        case {"type": "image"}:
            keys = [name for name in ("path", "bytes", "url", "image") if name in given]
        case {"type": "image_url", "image_url": {"url": url}}:  # OpenAI's
            given, keys = {"url": url}, ["url"]
        case _:
            what = given.get("type", kind(part))
            raise RowError("unknown part", f"{where} has a part that is {what}; a part must be {_PARTS}")
    if len(keys) > 1:
        raise _bad_image(f"{where} has an image with {' and '.join(keys)}; keep one of them")
    if not keys:
        if (image := next(column or iter(()), None)) is None:
            remedy = "give each a path, bytes or a file:// URL"
            raise _bad_image(f"{where} has more images than the row's column images; {remedy}")
        return image
    value = given[keys[0]]
    if keys == ["url"] and not str(value).startswith(("file://", "data:")):
        raise _bad_image(f"{where} has an image at {str(value)[:80]!r}; {_URLS}")
    return read_image({"bytes": value} if keys == ["bytes"] else value, where, source)
