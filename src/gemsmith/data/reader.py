"""Rows as files hold them: JSONL, JSON, CSV, parquet, a folder of these, or what Hugging Face's `datasets` saved."""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemsmith.data.hub import PREFIX, fetch_file, fetch_split
from gemsmith.errors import DataError, RowError, first_line
from gemsmith.system.files import expanduser, regular_file
from gemsmith.system.json import parse_json, read_json

if TYPE_CHECKING:
    import pyarrow


_ROW_FILES, _OTHER_FILES = (".jsonl", ".ndjson", ".parquet"), (".json", ".csv", ".tsv")
SUFFIXES = (*_ROW_FILES, *_OTHER_FILES)
PACKINGS = {".gz": "gzip", ".zst": "zstd"}
_ALLOWED = ".jsonl, .json, .csv, .tsv (each as .gz or .zst, too), .parquet"
_BUFFER_BYTES = 2**20
# Few, since a column may hold images of a megabyte each.
_ROWS_AT_ONCE = 64
# Text that is the same again and again is packed a hundredfold; beyond that a table is taken for a bomb.
_MOST_UNPACKED, _MOST_UNPACKED_BYTES = 500, 2**28
# What a row of Python takes, whatever is in it.
_ROW_BYTES = 200
_SAVE_AGAIN = "save the dataset again with save_to_disk"


def find_files(source: str) -> tuple[Path, ...]:
    """The files of the source, in reading order. Raises DataError where there are none, or of more than one split."""
    if source.startswith(PREFIX):
        return _files_of_split(source)
    elsewhere = "://" in source
    path = Path(source.partition("?")[0]) if elsewhere else expanduser(source)
    if (path / "dataset_dict.json").exists():
        splits = _read_json(path / "dataset_dict.json").get("splits")
        split = splits[0] if isinstance(splits, list) and splits else "train"
        raise DataError(f"{path}: holds several splits; name one of them, such as {path / str(split)}")
    if (path / "state.json").exists():
        return _files_of_saved_dataset(path)
    if path.is_dir():
        return _files_of_folder(path)
    if not elsewhere and not path.exists():
        raise DataError(f"{source}: does not exist; name a JSONL, JSON, CSV or parquet file or a dataset folder")
    if not kind_of_file(path):
        what = f"is a {path.suffix} file" if path.suffix else "has a name without a suffix"
        raise DataError(f"{source}: {what}; allowed: {_ALLOWED}, or a folder of them")
    return (fetch_file(source) if elsewhere else path,)


def kind_of_file(file: Path) -> str:
    """What a file of rows is by its name, packed or not; empty where it is none.

    >>> kind_of_file(Path("rows.csv.gz")), kind_of_file(Path("rows.parquet")), kind_of_file(Path("rows.txt"))
    ('.csv', '.parquet', '')
    """
    if file.suffix not in PACKINGS:
        return file.suffix if file.suffix in SUFFIXES else ""
    inner = Path(file.stem).suffix
    return inner if inner in SUFFIXES and inner != ".parquet" else ""


def _raise(error: RowError) -> Any:
    raise error


def stored_rows(
    source: str, is_read: Callable[[str], bool], on_bad: Callable[[RowError], Any] = _raise
) -> Iterator[tuple[str, Any]]:
    """Each row and where it stands; a table's columns that are not read, by name, hold only True or None.

    What `on_bad` gives stands for a row that cannot be read. Raises DataError naming the file, and the line where there
    are lines, for a file that cannot be read any further.
    """
    for file in find_files(source):
        try:
            match kind_of_file(file):
                case ".jsonl" | ".ndjson":
                    yield from jsonl_rows(file, on_bad)
                case ".json":
                    yield from _json_rows(file, on_bad)
                case ".csv" | ".tsv":
                    yield from _csv_rows(file, on_bad)
                case _:
                    yield from _table_rows(file, is_read)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({first_line(error.strerror or error)})") from None


def _files_of_rows(files: Iterable[Path]) -> tuple[Path, ...]:
    """Those that hold rows: beside them, a .json or .csv is often about them."""
    readable = [file for file in files if kind_of_file(file)]
    return tuple([file for file in readable if kind_of_file(file) in _ROW_FILES] or readable)


def _files_of_split(source: str) -> tuple[Path, ...]:
    files = _files_of_rows(fetch_split(source))
    if not files:
        raise DataError(f"{source}: the dataset has no such split in {_ALLOWED}; name another, as its files are called")
    folders = sorted({file.parent.name for file in files})
    if len(folders) > 1 or len({(kind_of_file(file), file.suffix) for file in files}) > 1:
        sets = f"{files[0].name} and others in {', '.join(folders)}"
        remedy = f"name the folder before the split, such as :{folders[0]}/train, or one file"
        raise DataError(f"{source}: is several sets of files, {sets}; {remedy}")
    # Beside train.jsonl there may be train-small.jsonl, which holds some of its rows; a folder of that name is one set.
    named = {re.sub(r"\d+", "0", file.name): file.name for file in files}
    if len(named) > 1 and folders != [(source.split(":")[2:] or ["train"])[0].rpartition("/")[2]]:
        remedy = f"name one of them, such as :{files[0].name}"
        raise DataError(f"{source}: is several files, {' and '.join(named.values())}; {remedy}")
    parts = re.search(r"-of-(\d+)\.", files[0].name)
    if parts and len(files) != (count := int(parts[1])):
        raise DataError(f"{source}: {len(files)} of its {count} files are here; fetch it where the hub is reached")
    return files


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    there = sorted(folder.iterdir())
    files = _files_of_rows(there)
    if not files:
        inner = max((inner for inner in there if inner.is_dir()), key=lambda inner: "train" in inner.name, default=None)
        hint = "save one with datasets' save_to_disk, or put .jsonl or .parquet files there"
        hint = f"did you mean {inner}?" if inner else hint
        raise DataError(f"{folder}: holds no {_ALLOWED} or saved Hugging Face dataset; {hint}")
    # The hub names files SPLIT-00000-of-00001.parquet; training on its test split by accident must not be possible.
    splits = {file.name.split("-")[0] for file in files if "-of-" in file.name}
    if len(splits) > 1 or len({(kind_of_file(file), file.suffix) for file in files}) > 1:
        remedy = "name one file, or a folder of one kind and split"
        raise DataError(f"{folder}: mixes {', '.join(file.name for file in files[:4])}; {remedy}")
    return files


def _files_of_saved_dataset(folder: Path) -> tuple[Path, ...]:
    """The arrow files of a dataset written by `datasets`' save_to_disk, in its own order."""
    state = _read_json(folder / "state.json")
    entries = state.get("_data_files") or []
    try:
        files = tuple(folder / entry["filename"] for entry in entries)
    except (KeyError, TypeError):
        raise DataError(f"{folder / 'state.json'}: names no files; {_SAVE_AGAIN}") from None
    if state.get("_indices_data_files") or len({*files}) < len(files) or any(file.parent != folder for file in files):
        what = "names a file twice or in another folder, or indices that pick rows"
        raise DataError(f"{folder / 'state.json'}: {what}; {_SAVE_AGAIN}")
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise DataError(f"{folder}: its data file {missing[0] if missing else ''} is missing; {_SAVE_AGAIN}")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(read_json(file))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file}: is not a JSON object ({error}); {_SAVE_AGAIN}") from None


def jsonl_rows(file: Path, on_bad: Callable[[RowError], Any] = _raise) -> Iterator[tuple[str, Any]]:
    """Each line's value, and where it stands; empty lines are none. Raises RowError, and OSError for the file.

    Where `on_bad` returns, what it gives stands for a row that cannot be read.
    """
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            origin = f"{file.name} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text or text.isspace():
                    continue
                row = parse_json(text.rstrip())
            except UnicodeDecodeError as error:
                row = on_bad(_not_utf_8(file, origin, error))
            except ValueError as error:
                where, why = origin, str(error)
                if isinstance(error, json.JSONDecodeError):
                    where, why = f"{origin}, column {error.colno}", error.msg
                row = on_bad(RowError("not JSON", f"{where}: is not JSON ({why}); {file} needs one JSON object a line"))
            yield origin, row


def _not_utf_8(file: Path, origin: str, error: UnicodeDecodeError) -> RowError:
    return RowError("not UTF-8", f"{origin}, byte {error.start + 1}: is not UTF-8; convert {file} to UTF-8")


class _Unpacked(io.RawIOBase):
    """What a packed file holds. Raises DataError once that is more than any text packs to."""

    def __init__(self, file: Path) -> None:
        import pyarrow

        self._stream = pyarrow.input_stream(str(regular_file(file)), compression=PACKINGS[file.suffix])
        self._file, self._bytes = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._bytes += len(data)
        _refuse_bomb(self._file, self._bytes)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _open(file: Path) -> io.BufferedReader:
    """The file's bytes, unpacked. Raises OSError."""
    if file.suffix in PACKINGS:
        return io.BufferedReader(_Unpacked(file), _BUFFER_BYTES)
    return regular_file(file).open("rb")


def _json_rows(file: Path, on_bad: Callable[[RowError], Any]) -> Iterator[tuple[str, Any]]:
    """The rows of an array; a file of that name that begins with an object has one a line."""
    with _open(file) as stream:
        if not stream.peek(_BUFFER_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from jsonl_rows(file, on_bad)
            return
        content = stream.read()
    try:
        rows = parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf_8(file, file.name, error) from None
    except json.JSONDecodeError as error:
        where = f"{file.name} line {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: is not JSON ({error.msg}); {file} needs an array of objects") from None
    except ValueError as error:
        raise DataError(f"{file}: is not JSON ({error}); it needs an array of objects") from None
    for number, row in enumerate(rows, start=1):
        yield f"{file.name} row {number}", row


def _csv_rows(file: Path, on_bad: Callable[[RowError], Any]) -> Iterator[tuple[str, Any]]:
    """Each row by the names of the first line, between semicolons where that has no comma; all values are text."""

    def lines(stream: io.BufferedReader) -> Iterator[str]:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf_8(file, f"{file.name} line {number}", error) from None

    longest = csv.field_size_limit(2**31 - 1)
    try:
        with _open(file) as stream:
            text = lines(stream)
            first = next(text, "")
            delimiter = "\t" if kind_of_file(file) == ".tsv" else ";" if ";" in first and "," not in first else ","
            found = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
            names = next(found, [])
            if twice := next((name for name, count in Counter(names).items() if count > 1), None):
                raise DataError(f"{file.name} line 1: has the column {twice!r} twice; keep one")
            begin = found.line_num + 1
            for values in found:
                origin, begin = f"{file.name} line {begin}", found.line_num + 1
                if len(values) == len(names):
                    yield origin, dict(zip(names, values, strict=True))
                elif values:
                    counts = f"{len(values)} values, the first line names {len(names)} columns"
                    yield origin, on_bad(RowError("other columns", f"{origin}: has {counts}; quote those with commas"))
    except csv.Error as error:
        remedy = "put a value with quotes or line feeds in quotes, and double those in it"
        raise DataError(f"{file.name} line {found.line_num}: is not CSV ({error}); {remedy}") from None
    finally:
        csv.field_size_limit(longest)


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
            batch.validate(full=True)  # offsets that lie outside would be read, and end the process
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
            if twice := next((name for name, count in Counter(names).items() if count > 1), None):
                raise DataError(f"a table has the column {twice} twice; keep one")
            arrays = [read(name, values) for name, values in zip(names, batch.columns, strict=True)]
            for row in pyarrow.RecordBatch.from_arrays(arrays, names=names).to_pylist():
                number += 1
                yield f"{file.name} row {number}", row
    except (pyarrow.ArrowException, ValueError, ArithmeticError, LookupError) as error:  # no value of Python's
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
        allowed = f"allowed are {_MOST_UNPACKED} times as many; write its rows as JSONL"
        raise DataError(f"{file}: unpacks its {size:,} bytes to {unpacked_bytes:,} or more; {allowed}")
