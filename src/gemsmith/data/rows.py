"""Rows of a dataset as checked documents, read from files or made from a seed."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemsmith.data.stored import find_files, stored_rows
from gemsmith.errors import DataError, nearest
from gemsmith.messages import ROLES, Message, Part, TextPart, join_texts, text_of
from gemsmith.recipe import Made, Recipe
from gemsmith.tasks import find_row_maker, find_scorer

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
# How many columns a message names.
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Document:
    """One checked row. `origin` says where it stands, for messages to the user: `rows.jsonl line 12`."""

    messages: tuple[Message, ...]
    origin: str
    form: str = "messages"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, where they were asked for."""

    def name(self, index: int) -> str:
        """What the row calls its message of this index: messages[1], or response."""
        return f"messages[{index}]" if self.form == "messages" else _FORMS[self.form][index]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Every row of a source, in order."""

    documents: list[Document]
    ignored_columns: Mapping[str, int]
    """Columns that were not read: name -> rows that have a value there."""


def read_documents(source: str | Made, *, format: str = "auto", seed: int = 0) -> list[Document]:  # noqa: A002 (the recipe's word)
    """The documents of read_dataset."""
    return read_dataset(source, format=format, seed=seed).documents


def read_held_out(recipe: Recipe) -> Dataset:
    """The rows of data.eval, with the columns that eval.scorer reads."""
    source, columns = recipe.data.eval, find_scorer(recipe.eval.scorer).COLUMNS
    assert source is not None
    return read_dataset(source, format=recipe.data.format, seed=recipe.seed, columns=columns)


def read_dataset(
    source: str | Made,
    *,
    format: str = "auto",  # noqa: A002 (the recipe's word)
    seed: int = 0,
    columns: Collection[str] = (),
) -> Dataset:
    """Every row of the source; `seed` is for rows that are made, `columns` are read beside the messages.

    Raises DataError naming the file and the line for whatever cannot be used.
    """
    if isinstance(source, Made):
        name, rows = "data", _made_rows(source, seed)
    else:
        read = {*_COLUMNS, *columns}
        name, rows = source, stored_rows(source, lambda column: column in read or _changes_row(column) is not None)
    documents: list[Document] = []
    ignored: Counter[str] = Counter()
    form = None if format == "auto" else format
    for origin, row in rows:
        form = _check_form(row, origin, form, chosen=format != "auto")
        ignored.update(_other_columns(row, origin, form, columns))
        messages, kept = _read_messages(row, origin, form), _read_columns(row, origin, columns)
        documents.append(Document(messages=messages, origin=origin, form=form, columns=kept))
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


def _made_rows(made: Made, seed: int) -> Iterator[tuple[str, Any]]:
    rows = find_row_maker(made.task).make_rows(made.rows, made.split, seed)
    yield from ((f"{made.task} {made.split} row {number}", row) for number, row in enumerate(rows, start=1))


def _check_form(row: Any, origin: str, form: str | None, *, chosen: bool) -> str:
    """The form of the row, `messages` or `prompt-response`: `form` where it is set, or else what the columns say."""
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


def _other_columns(row: Mapping[str, Any], origin: str, form: str, columns: Collection[str]) -> list[str]:
    """The names of columns with a value that nothing reads. Raises DataError where one changes what the row says."""
    others = [column for column, value in row.items() if value is not None and column not in _FORMS[form]]
    for column in others:
        remedy = _changes_row(column)
        if remedy and row[column] not in ("", [], {}):
            raise DataError(
                f"{origin}: has a value in the column {_in_line(column)}, which changes what a row says and which "
                "Gemsmith does not read; "
                f"{remedy}, or rename or drop the column to train without it"
            )
    return [_in_line(column) for column in others if column not in columns]


def _changes_row(column: str) -> str | None:
    """What to do about a column that changes what a row says; None for any other."""
    return _MEANINGFUL.get(column.strip().lower())


def _read_columns(row: Mapping[str, Any], origin: str, columns: Collection[str]) -> dict[str, Any]:
    """Those columns of the row. Raises DataError where one has no value."""
    if missing := next((column for column in columns if row.get(column) is None), None):
        raise DataError(f"{origin}: has no {missing}, which eval.scorer reads; add it, or set eval.scorer to another")
    return {column: row[column] for column in columns}


def _read_messages(row: Mapping[str, Any], origin: str, form: str) -> tuple[Message, ...]:
    if form == "prompt-response":
        turns: Any = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        names: tuple[str, ...] = ("prompt", "response")
    else:
        turns = row["messages"]
        if not isinstance(turns, list):
            raise DataError(f"{origin}: messages is {_kind(turns)}; must be a list of {{role, content}}")
        names = tuple(f"messages[{index}]" for index in range(len(turns)))
    messages = tuple(_read_message(turn, f"{origin}: {name}") for turn, name in zip(turns, names, strict=True))
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{origin}: has no assistant turn, so nothing to train on; add one, or take the row out")
    if roles[0] == "assistant":
        raise DataError(f"{origin}: begins with an assistant turn; put what it answers before it")
    empty = next(
        (
            name
            for name, turn in zip(names, messages, strict=True)
            if turn.role == "assistant" and not text_of(turn).strip()
        ),
        None,
    )
    if empty:
        raise DataError(f"{origin}: {empty} is an empty answer; fill it, or take the row out")
    return messages


def _read_message(turn: Any, where: str) -> Message:
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
    message = Message(role=role, parts=_read_parts(turn["content"], where))
    _check_unicode(text_of(message), where)
    return message


def _read_parts(content: Any, where: str) -> tuple[Part, ...]:
    """The parts of a message's content, which is a string or a list of {"type": "text", "text": ...}."""
    if isinstance(content, str):
        return (TextPart(text=content),)
    if not isinstance(content, list):
        raise DataError(f'{where} is {_kind(content)}; must be text, or a list of {{"type": "text", "text": ...}}')
    return join_texts(_read_part(part, where) for part in content)


def _read_part(part: Any, where: str) -> Part:
    match part:
        case {"type": "text", "text": str(text)}:
            return TextPart(text=text)
    kind = part.get("type", _kind(part)) if isinstance(part, Mapping) else _kind(part)
    raise DataError(f'{where} has a part that is {kind}; only {{"type": "text", "text": ...}} can be trained on')


def _check_unicode(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half a surrogate pair at character {error.start + 1}; it is no Unicode text"
        ) from None


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
