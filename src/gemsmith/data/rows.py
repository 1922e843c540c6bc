"""Rows of a dataset, read and checked: JSONL, parquet, a folder of either, a Hugging Face dataset folder, or rows made
from a seed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemsmith.errors import DataError, first_line, nearest
from gemsmith.recipe import Made

if TYPE_CHECKING:
    import pyarrow

ROLES = ("system", "user", "assistant")
_FORMS = {"messages": ("messages",), "prompt-response": ("prompt", "response")}
_COLUMNS = tuple(column for columns in _FORMS.values() for column in columns)
_FIELDS = ("role", "content")
# Columns that other trainers make part of what the model sees or how a row counts: without them, a row is another one.
_MEANINGFUL = {
    "system": "write it into messages, as a turn of the role system",
    "history": "write its turns into messages",
    **dict.fromkeys(("tools", "functions", "documents", "chat_template_kwargs", "weight"), "take such rows out"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "take such rows out"),
}
_SUFFIXES = (".jsonl", ".parquet")
# How many columns a message names.
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Document:
    """One checked row. `origin` says where it stands, for messages to the user: `rows.jsonl line 12`.

    Each message is {"role": one of ROLES, "content": text}; content that was given in parts has been joined.
    """

    messages: tuple[Mapping[str, str], ...]
    origin: str
    form: str = "messages"

    def name(self, index: int) -> str:
        """What the row calls its message of this index: messages[1], or response."""
        return f"messages[{index}]" if self.form == "messages" else _FORMS[self.form][index]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Every row of a source, in order, and its other columns: name -> rows that have a value there. Those are not
    read.
    """

    documents: list[Document]
    ignored_columns: Mapping[str, int]


def read_documents(source: str | Made, *, format: str = "auto", seed: int = 0) -> list[Document]:  # noqa: A002 (the recipe's word)
    """The documents of read_dataset."""
    return read_dataset(source, format=format, seed=seed).documents


def read_dataset(source: str | Made, *, format: str = "auto", seed: int = 0) -> Dataset:  # noqa: A002 (the recipe's word)
    """Every row of the source; `seed` is for rows that are made.

    Raises DataError naming the file and the line for whatever cannot be used.
    """
    name, rows = ("data", _made_rows(source, seed)) if isinstance(source, Made) else (source, _stored_rows(source))
    documents: list[Document] = []
    ignored: Counter[str] = Counter()
    form = None if format == "auto" else format
    for origin, row in rows:
        form = _check_form(row, origin, form, chosen=format != "auto")
        ignored.update(_other_columns(row, origin, form))
        documents.append(Document(messages=_read_messages(row, origin, form), origin=origin, form=form))
    if not documents:
        raise DataError(f"{name}: holds no rows; give a dataset with at least one")
    return Dataset(documents=documents, ignored_columns=dict(ignored.most_common()))


def describe_columns(columns: Mapping[str, int]) -> str:
    """`id (30 rows), source (1 row)`, the first few by name."""
    return _first_few([f"{name} ({count:,} row{'s' * (count > 1)})" for name, count in columns.items()])


def source_sha256(source: str | Made) -> str:
    """A hash of what the rows are read from: the bytes of the files, or the request for rows to be made."""
    if isinstance(source, Made):
        return hashlib.sha256(source.model_dump_json().encode()).hexdigest()
    total = hashlib.sha256()
    for file in find_files(source):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def find_files(source: str) -> tuple[Path, ...]:
    """The files that hold the source's rows, in reading order. Raises DataError where there are none, or of more than
    one split.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _files_of_folder(path)
    if not path.exists():
        raise DataError(
            f"{source}: is not there; set data.train or data.eval to a JSONL or parquet file or a dataset folder"
        )
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{source}: is a {path.suffix or 'nameless'} file; allowed: .jsonl, .parquet, or a folder of them"
        )
    return (path,)


def _made_rows(made: Made, seed: int) -> Iterator[tuple[str, Any]]:
    from gemsmith.data import verilog

    rows = verilog.make_rows(made.rows, made.split, seed)
    yield from ((f"{made.task} {made.split} row {number}", row) for number, row in enumerate(rows, start=1))


def _stored_rows(source: str) -> Iterator[tuple[str, Any]]:
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".arrow": _arrow_rows}
    for file in find_files(source):
        try:
            yield from readers[file.suffix](file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror or error})") from None


def _files_of_folder(folder: Path) -> tuple[Path, ...]:
    if (folder / "dataset_dict.json").exists():
        raise DataError(f"{folder}: holds several splits; name one of them, such as {folder / _first_split(folder)}")
    if (folder / "state.json").exists():
        return _files_of_saved_dataset(folder)
    files = tuple(sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES))
    if not files:
        inner = next((inner for inner in sorted(folder.iterdir()) if inner.is_dir()), None)
        hint = (
            f"did you mean {inner}?"
            if inner
            else "save one with datasets' save_to_disk, or put .jsonl or .parquet files there"
        )
        raise DataError(f"{folder}: holds no .jsonl, .parquet or saved Hugging Face dataset; {hint}")
    # The hub names files SPLIT-00000-of-00001.parquet; training on its test split by accident must not be possible.
    splits = {file.name.split("-")[0] for file in files if "-of-" in file.name}
    if len(splits) > 1 or len({file.suffix for file in files}) > 1:
        raise DataError(
            f"{folder}: mixes {', '.join(file.name for file in files[:4])}; name one file, or a folder of one kind and "
            "split"
        )
    return files


def _first_split(folder: Path) -> str:
    splits = _read_json(folder / "dataset_dict.json").get("splits") or ["train"]
    return str(splits[0])


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
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: is not a JSON object ({error}); save the dataset again with save_to_disk") from None


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            origin = f"{file.name} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{origin}, byte {error.start + 1}: is not UTF-8; convert {file} to UTF-8") from None
            if not text.strip():
                continue
            try:
                yield origin, json.loads(text.rstrip())
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{origin}, column {error.colno}: is not JSON ({error.msg}); {file} needs one JSON object a line"
                ) from None
            except RecursionError:
                raise DataError(f"{origin}: is nested too deeply; a row is one flat JSON object") from None
            except ValueError as error:  # a number of more digits than Python reads
                raise DataError(f"{origin}: is not JSON ({error})") from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            batches = table.iter_batches(batch_size=4096)
            yield from _numbered(file, (row for batch in batches for row in _batch_rows(batch)))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as parquet ({first_line(error)})") from None


def _arrow_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as stream, pyarrow.ipc.open_stream(stream) as table:
            yield from _numbered(file, (row for batch in table for row in _batch_rows(batch)))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as an arrow stream ({first_line(error)})") from None


def _batch_rows(batch: "pyarrow.RecordBatch") -> list[Any]:
    """The rows of a table's batch. Of columns that are not read, only whether there is a value: True or None."""
    import pyarrow.compute

    def read(name: str, values: "pyarrow.Array[Any]") -> "pyarrow.Array[Any]":
        if name in _COLUMNS or name.strip().lower() in _MEANINGFUL:
            return values
        # Whatever they hold (files, times that Python has no type for), it is not decoded.
        return pyarrow.compute.if_else(values.is_valid(), True, None)

    names = batch.schema.names
    columns = [read(name, values) for name, values in zip(names, batch.columns, strict=True)]
    return list(pyarrow.RecordBatch.from_arrays(columns, names=names).to_pylist())


def _numbered(file: Path, rows: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{file.name} row {number}", row) for number, row in enumerate(rows, start=1))


def _check_form(row: Any, origin: str, form: str | None, *, chosen: bool) -> str:
    """The form of the row, `messages` or `prompt-response`: the one that earlier rows or the recipe set, or else what
    its columns say.
    """
    if not isinstance(row, Mapping):
        raise DataError(
            f'{origin}: is {_kind(row)}; must be an object {{"messages": [...]}} or {{"prompt": ..., "response": ...}}'
        )
    fitting = [name for name, columns in _FORMS.items() if set(columns) <= set(row)]
    if len(fitting) > 1 and not chosen:
        # Tables of both forms fill the columns of the other one with null.
        fitting = [name for name in fitting if all(row[column] is not None for column in _FORMS[name])] or fitting[:1]
    if len(fitting) > 1 and not chosen:
        raise DataError(
            f"{origin}: has messages, prompt and response; keep messages, or prompt and response, or set data.format "
            "to messages "
            "or prompt-response"
        )
    if form in fitting:
        return str(form)
    has = f"{origin}: has the columns {_first_few([_in_line(name) for name in row]) or 'none'}"
    hints = "".join(
        nearest(column, [known for known in _COLUMNS if known not in row]) for column in row if column not in _COLUMNS
    )
    if form is not None:
        why = f"data.format is {form}" if chosen else f"the rows before it are {form}"
        raise DataError(f"{has}{hints}, but {why}; all rows must have one form")
    if not fitting:
        raise DataError(f"{has}{hints}; allowed: messages, or prompt and response")
    return fitting[0]


def _other_columns(row: Mapping[str, Any], origin: str, form: str) -> list[str]:
    """The names of columns with a value that the form does not read. Raises DataError where one of them changes what
    the row says.
    """
    others = [column for column, value in row.items() if value is not None and column not in _FORMS[form]]
    for column in others:
        remedy = _MEANINGFUL.get(column.strip().lower())
        if remedy and row[column] not in ("", [], {}):
            raise DataError(
                f"{origin}: has a value in the column {_in_line(column)}, which changes what a row says and which "
                "Gemsmith does not read; "
                f"{remedy}, or rename or drop the column to train without it"
            )
    return [_in_line(column) for column in others]


def _read_messages(row: Mapping[str, Any], origin: str, form: str) -> tuple[Mapping[str, str], ...]:
    if form == "prompt-response":
        turns: Any = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        names: tuple[str, ...] = ("prompt", "response")
    else:
        turns = row["messages"]
        if not isinstance(turns, list):
            raise DataError(f"{origin}: messages is {_kind(turns)}; must be a list of {{role, content}}")
        names = tuple(f"messages[{index}]" for index in range(len(turns)))
    messages = tuple(_read_message(turn, f"{origin}: {name}") for turn, name in zip(turns, names, strict=True))
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{origin}: has no assistant turn, so nothing to train on; add one, or take the row out")
    if roles[0] == "assistant":
        raise DataError(f"{origin}: begins with an assistant turn; put what it answers before it")
    empty = next(
        (
            name
            for name, turn in zip(names, messages, strict=True)
            if turn["role"] == "assistant" and not turn["content"].strip()
        ),
        None,
    )
    if empty:
        raise DataError(f"{origin}: {empty} is an empty answer; fill it, or take the row out")
    return messages


def _read_message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {_kind(turn)}; must be an object with role and content")
    # Tables fill a field that only some messages have with null.
    fields = [name for name, value in turn.items() if value is not None or name in _FIELDS]
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise DataError(f"{where} has an unknown field {unknown}{nearest(unknown, _FIELDS)}; allowed: role, content")
    missing = next((name for name in _FIELDS if name not in turn), None)
    if missing:
        raise DataError(f"{where} has no {missing}; must have role and content")
    role = turn["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}{nearest(str(role), ROLES)}; allowed: {', '.join(ROLES)}")
    return {"role": role, "content": _read_content(turn["content"], where)}


def _read_content(content: Any, where: str) -> str:
    """Text, given as a string or as a list of {"type": "text", "text": ...}, whose texts are joined."""
    if isinstance(content, list):
        content = "".join(_read_part(part, where) for part in content)
    if not isinstance(content, str):
        raise DataError(f'{where} is {_kind(content)}; must be text, or a list of {{"type": "text", "text": ...}}')
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} holds half a surrogate pair at character {error.start + 1}; it is no Unicode text"
            ) from None
    return content


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type", _kind(part)) if isinstance(part, Mapping) else _kind(part)
        raise DataError(f'{where} has a part that is {kind}; only {{"type": "text", "text": ...}} can be trained on')
    return str(part["text"])


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")


def _in_line(name: str) -> str:
    """A column's name as it can stand in a line of text."""
    return name if name and name.isprintable() else repr(name)


def _kind(value: Any) -> str:
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
