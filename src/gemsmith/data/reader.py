"""Rows as files hold them: JSONL, parquet, a folder of either, or a dataset that Hugging Face's `datasets` saved.

And what in a row is an image: by its path, a file URL or its bytes.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from gemsmith.errors import DataError, first_line
from gemsmith.system.characters import is_utf_8
from gemsmith.system.files import expanduser, regular_file
from gemsmith.system.json import parse_json, read_json
from gemsmith.tasks.messages import ImagePart, Part, TextPart, join_texts

if TYPE_CHECKING:
    import pyarrow


_SUFFIXES = (".jsonl", ".parquet")
# Few, since a column may hold images of a megabyte each.
_ROWS_AT_ONCE = 64
# Text that is the same again and again is packed a hundredfold; beyond that a table is taken for a bomb.
_MOST_UNPACKED, _MOST_UNPACKED_BYTES = 500, 2**28
# What a row of Python takes, whatever is in it.
_ROW_BYTES = 200


def find_files(source: str) -> tuple[Path, ...]:
    """The files of the source, in reading order. Raises DataError where there are none, or of more than one split."""
    path = expanduser(source)
    if (path / "dataset_dict.json").exists():
        split = (_read_json(path / "dataset_dict.json").get("splits") or ["train"])[0]
        raise DataError(f"{path}: holds several splits; name one of them, such as {path / str(split)}")
    if (path / "state.json").exists():
        return _files_of_saved_dataset(path)
    if path.is_dir():
        return _files_of_folder(path)
    if not path.exists():
        raise DataError(f"{source}: does not exist; name a JSONL or parquet file or a dataset folder")
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{source}: is a {path.suffix or 'nameless'} file; allowed: .jsonl, .parquet, or a folder of them"
        )
    return (path,)


def stored_rows(source: str, is_read: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Each row and where it stands; a table's columns that are not read, by name, hold only True or None.

    Raises DataError naming the file, and the line where there are lines, for what cannot be read.
    """
    for file in find_files(source):
        try:
            yield from jsonl_rows(file) if file.suffix == ".jsonl" else _table_rows(file, is_read)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error})") from None


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES))
    if not files:
        inner = next((inner for inner in sorted(folder.iterdir()) if inner.is_dir()), None)
        hint = "save one with datasets' save_to_disk, or put .jsonl or .parquet files there"
        hint = f"did you mean {inner}?" if inner else hint
        raise DataError(f"{folder}: holds no .jsonl, .parquet or saved Hugging Face dataset; {hint}")
    # The hub names files SPLIT-00000-of-00001.parquet; training on its test split by accident must not be possible.
    splits = {file.name.split("-")[0] for file in files if "-of-" in file.name}
    if len(splits) > 1 or len({file.suffix for file in files}) > 1:
        raise DataError(
            f"{folder}: mixes {', '.join(file.name for file in files[:4])}; name one file, or a folder of one kind and "
            "split"
        )
    return files


def _files_of_saved_dataset(folder: Path) -> tuple[Path, ...]:
    """The arrow files of a dataset written by `datasets`' save_to_disk, in its own order."""
    entries = _read_json(folder / "state.json").get("_data_files") or []
    files = tuple(folder / entry["filename"] for entry in entries)
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise DataError(
            f"{folder}: its data file {missing[0] if missing else ''} is missing; save the dataset again with "
            "save_to_disk"
        )
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(read_json(file))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: is not a JSON object ({error}); save the dataset again with save_to_disk") from None


def jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Each line's value, and where it stands; empty lines are none. Raises DataError, and OSError for the file."""
    with regular_file(file).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            origin = f"{file.name} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{origin}, byte {error.start + 1}: is not UTF-8; convert {file} to UTF-8") from None
            if not text or text.isspace():
                continue
            try:
                yield origin, parse_json(text.rstrip())
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{origin}, column {error.colno}: is not JSON ({error.msg}); {file} needs one JSON object a line"
                ) from None
            except ValueError as error:
                raise DataError(f"{origin}: is not JSON ({error}); {file} needs one JSON object a line") from None


def _table_batches(file: Path) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow

    if file.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(regular_file(file)) as table:
            groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
            _refuse_bomb(file, sum(group.total_byte_size + _ROW_BYTES * group.num_rows for group in groups))
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE)
        return
    with pyarrow.memory_map(str(regular_file(file))) as stream, pyarrow.ipc.open_stream(stream) as batches:
        for batch in batches:
            yield from (batch.slice(begin, _ROWS_AT_ONCE) for begin in range(0, batch.num_rows, _ROWS_AT_ONCE))


def _table_rows(file: Path, is_read: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """The rows of a table. Of columns that are not read, only whether there is a value."""
    import pyarrow.compute

    def read(name: str, values: "pyarrow.Array[Any]") -> "pyarrow.Array[Any]":
        # Whatever the others hold (files, times that Python has no type for), it is not decoded.
        return values if is_read(name) else pyarrow.compute.if_else(values.is_valid(), True, None)

    unpacked, number = 0, 0
    try:
        for batch in _table_batches(file):
            unpacked += sum(map(_unpacked_bytes, batch.columns)) + _ROW_BYTES * batch.num_rows
            _refuse_bomb(file, unpacked)
            names = batch.schema.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"a table has the column {twice} twice; keep one")
            arrays = [read(name, values) for name, values in zip(names, batch.columns, strict=True)]
            for row in pyarrow.RecordBatch.from_arrays(arrays, names=names).to_pylist():
                number += 1
                yield f"{file.name} row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        form = "parquet" if file.suffix == ".parquet" else "an arrow stream"
        raise DataError(f"{file}: cannot be read as {form} ({first_line(error)})") from None


def _unpacked_bytes(values: "pyarrow.Array[Any]") -> int:
    """What the values take as Python's: a text of a dictionary as often as it is named."""
    import pyarrow.compute

    if isinstance(values, pyarrow.StructArray):
        return sum(map(_unpacked_bytes, values.flatten()))
    if isinstance(values, pyarrow.MapArray):
        return _unpacked_bytes(values.keys) + _unpacked_bytes(values.items)
    if isinstance(values, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        return _unpacked_bytes(values.flatten())
    texts = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    if isinstance(values, pyarrow.DictionaryArray) and values.type.value_type in texts:
        lengths = pyarrow.compute.binary_length(values.dictionary)
        return pyarrow.compute.sum(lengths.take(values.indices)).as_py() or 0
    return values.nbytes


def _refuse_bomb(file: Path, unpacked_bytes: int) -> None:
    if unpacked_bytes > max(_MOST_UNPACKED_BYTES, _MOST_UNPACKED * (size := file.stat().st_size)):
        raise DataError(
            f"{file}: unpacks its {size:,} bytes to {unpacked_bytes:,} or more; allowed are {_MOST_UNPACKED} times as "
            "many; write its rows as JSONL"
        )


IMAGE_COLUMNS = ("image", "images")
"""Columns of a row beside its texts: an image, or a list of them."""
_KEYS = ("path", "bytes", "url", "image")
_PARTS = '{"type": "text", "text": ...} or {"type": "image", "path" or "bytes" or "url": ...}'


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Where images of rows come from and go to: relative paths count from `folder`, `keep` makes a file of bytes."""

    folder: Path = field(default_factory=Path)
    keep: Callable[[bytes], str] | None = None
    """None: bytes stay in memory."""


def read_column(row: Mapping[str, Any], origin: str, source: ImageSource) -> tuple[ImagePart, ...]:
    """The images in the row's own columns of them, in order."""
    given = {name: row[name] for name in IMAGE_COLUMNS if row.get(name) not in (None, "", [])}
    if len(given) > 1:
        raise DataError(f"{origin}: has image and images; keep one of them")
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        names = [f"{name}[{index}]" for index in range(len(values))] if isinstance(value, list) else [name]
        return tuple(read_image(value, f"{origin}: {name}", source) for name, value in zip(names, values, strict=True))
    return ()


def read_parts(content: Any, where: str, column: Iterator[ImagePart], source: ImageSource) -> tuple[Part, ...]:
    """The parts of a message's content; a bare {"type": "image"} is the next of `column`, the row's own images."""
    if isinstance(content, str):
        return (TextPart(text=content),)
    if not isinstance(content, list):
        raise DataError(f"{where} is {kind(content)}; must be text, or a list of parts, each {_PARTS}")
    return join_texts(_read_part(part, where, column, source) for part in content)


def read_image(value: Any, where: str, source: ImageSource) -> ImagePart:
    """The image of a path, a file URL, bytes, or {"bytes": ..., "path": ...} as Hugging Face's datasets hold it."""
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = value.get("path") if data is None else data
        if isinstance(data, str):
            try:
                value = base64.b64decode(data, validate=True)
            except ValueError as error:
                raise DataError(
                    f"{where} has an image whose bytes are not base64 ({error}); write them so, or a path"
                ) from None
    if isinstance(value, bytes):
        return ImagePart(path=source.keep(value)) if source.keep else ImagePart(data=value)
    if isinstance(value, str) and value:
        if not is_utf_8(value):
            raise DataError(f"{where} has an image at {value[:80]!r}, a name that is not in UTF-8; rename the file")
        if "://" not in value and not value.startswith("data:"):
            return ImagePart(path=str(source.folder / expanduser(value)))
        url = urlsplit(value)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise DataError(f"{where} has an image at {value[:80]!r}; only file:// URLs are read: fetch it first")
        return ImagePart(path=str(source.folder / unquote(url.path)))
    raise DataError(f"{where} has an image that is {kind(value)}; give a path, a file:// URL or bytes")


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


def _read_part(part: Any, where: str, column: Iterator[ImagePart], source: ImageSource) -> Part:
    # Tables fill a field that only some parts have with null.
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    match given:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
        case {"type": "image"}:
            keys = [name for name in _KEYS if name in given]
        case _:
            raise DataError(f"{where} has a part that is {given.get('type', kind(part))}; a part must be {_PARTS}")
    if len(keys) > 1:
        raise DataError(f"{where} has an image with {' and '.join(keys)}; keep one of them")
    if not keys:
        if (image := next(column, None)) is None:
            raise DataError(
                f"{where} has more images than the row's column images; give each a path, bytes or a file:// URL"
            )
        return image
    value = given[keys[0]]
    if keys == ["url"] and not str(value).startswith("file://"):
        raise DataError(f"{where} has an image at {str(value)[:80]!r}; only file:// URLs are read: fetch it first")
    return read_image({"bytes": value} if keys == ["bytes"] else value, where, source)
