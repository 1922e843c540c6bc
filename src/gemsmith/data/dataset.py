"""Rows of a dataset as checked documents, read from files or made from a seed."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemsmith.data.documents import FORMS, Document
from gemsmith.data.image_folder import (
    FORMAT,
    Classes,
    find_image_files,
    folder_labels,
    folder_notices,
    folder_rows,
    recipe_classes,
)
from gemsmith.data.reader import IMAGE_COLUMNS, ImageSource, find_files, kind, read_column, read_parts, stored_rows
from gemsmith.errors import DataError, RecipeError, some, suggest
from gemsmith.recipe.schema import GeneratedData, Recipe, eval_tasks
from gemsmith.system.files import expanduser
from gemsmith.tasks import SOURCES, SupportsOptions, find_generator, find_scorer
from gemsmith.tasks.messages import ROLES, ImagePart, Message, images_of, text_of

_COLUMNS = tuple(column for columns in FORMS.values() for column in columns)
_FIELDS = ("role", "content")
_NAMED = 8
# Columns that other trainers make part of what the model sees or how a row counts: without them, a row is another one.
_MEANINGFUL = {
    "system": "write it into messages, as a turn of the role system",
    "history": "write its turns into messages",
    **dict.fromkeys(("tools", "functions", "documents", "chat_template_kwargs", "weight"), "take such rows out"),
    **dict.fromkeys(IMAGE_COLUMNS, "name it image or images in small letters"),
    **dict.fromkeys(("video", "videos", "audio", "audios"), "take such rows out"),
}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Every row of a source, in order."""

    documents: list[Document]
    ignored_columns: Mapping[str, int]
    """Columns that were not read: name -> rows that have a value there."""
    warnings: tuple[str, ...] = ()
    """What a reader must know of the source."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is read of a row beside the messages: columns that it needs, others, and values for rows without one."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.needed or name in self.optional


NO_COLUMNS = Columns()


def read_documents(source: str | GeneratedData, *, format: str = "auto", seed: int = 0) -> list[Document]:  # noqa: A002 (the recipe's word)
    """The documents of read_dataset."""
    return read_dataset(source, format=format, seed=seed).documents


def read_prompts(source: str) -> Dataset:
    """What each row of the source asks: its messages but for a last assistant turn, or its prompt.

    Raises DataError as read_dataset does; an answer may be there and is not read.
    """
    found = read_dataset(source, asked=True)
    return replace(found, documents=[replace(row, messages=row.messages[:-1]) for row in found.documents])


def read_train(recipe: Recipe, keep: Callable[[bytes], str]) -> Dataset:
    """The rows of data.train; `keep` makes files of images that come as bytes."""
    data = recipe.data
    classes = recipe_classes(data, "train")
    images = ImageSource(folder=_folder_of(data.train), keep=keep)
    return read_dataset(data.train, format=data.format, seed=recipe.seed, classes=classes, images=images)


def read_held_out(recipe: Recipe) -> Dataset:
    """The rows of data.eval, with the columns that their scorers read, from eval.options where a row has none.

    Raises RecipeError for an option that no scorer reads, DataError as read_dataset does.
    """
    data = recipe.data
    assert data.eval is not None
    names = [task.task for task in eval_tasks(recipe) if task.task not in SOURCES]
    scorers = [find_scorer(name) for name in names]
    optional = tuple(
        dict.fromkeys(
            column for scorer in scorers if isinstance(scorer, SupportsOptions) for column in scorer.OPTIONAL_COLUMNS
        )
    )
    classes = recipe_classes(data, "held-out")
    # A folder of images gives all its rows the same labels.
    known = {"labels": folder_labels(str(data.eval), classes)} if classes and "labels" in optional else {}
    columns = Columns(
        needed=tuple(dict.fromkeys(column for scorer in scorers for column in scorer.COLUMNS)),
        optional=optional,
        given=known | recipe.eval.options,
    )
    allowed = (*columns.needed, *columns.optional)
    if unknown := next((name for name in columns.given if name not in allowed), None):
        raise RecipeError(
            f"eval.options.{unknown}: the scorer {' and '.join(names)} reads no {unknown}{suggest(unknown, allowed)}; "
            f"allowed: {', '.join(allowed) or 'none'}"
        )
    return read_dataset(data.eval, format=data.format, seed=recipe.seed, columns=columns, classes=classes)


def read_dataset(
    source: str | GeneratedData,
    *,
    format: str = "auto",  # noqa: A002 (the recipe's word)
    seed: int = 0,
    columns: Columns = NO_COLUMNS,
    classes: Classes | None = None,
    images: ImageSource | None = None,
    asked: bool = False,
) -> Dataset:
    """Every row of the source; `seed` is for rows that are made, `columns` are read beside the messages.

    `classes` are those of a folder of images; by default `images` count from the folder that holds the rows.
    `asked`: a row that ends with its question gets an answer.
    Raises DataError naming the file and the line for whatever cannot be used.
    """
    name = "data" if isinstance(source, GeneratedData) else source
    rows = _source_rows(source, seed, columns, classes)
    images = images or ImageSource(folder=_folder_of(source))
    documents: list[Document] = []
    ignored: Counter[str] = Counter()
    form = None if format in ("auto", FORMAT) else format
    for origin, row in rows:
        if asked:
            row = _with_answer(row)  # noqa: PLW2901
        form = _check_form(row, origin, form, chosen=format not in ("auto", FORMAT))
        ignored.update(_other_columns(row, origin, form, columns))
        messages, kept = read_messages(row, origin, form, images), _read_columns(row, origin, columns)
        documents.append(Document(messages=messages, origin=origin, form=form, columns=kept))
    if not documents:
        raise DataError(f"{name}: holds no rows; give a dataset with at least one")
    warnings = folder_notices(str(source), classes) if classes else ()
    return Dataset(documents=documents, ignored_columns=dict(ignored.most_common()), warnings=warnings)


def find_source_files(source: str, format: str = "auto") -> tuple[Path, ...]:  # noqa: A002 (the recipe's word)
    """The files that the rows are read from, in reading order. Raises DataError where there are none."""
    if format == FORMAT:
        return tuple(file for files in find_image_files(source).values() for file in files)
    return find_files(source)


def describe_columns(columns: Mapping[str, int]) -> str:
    """`id (30 rows), source (1 row)`, the first few by name."""
    return some([f"{name} ({count:,} row{'s' * (count > 1)})" for name, count in columns.items()], _NAMED)


def source_sha256(source: str | GeneratedData, format: str = "auto") -> str:  # noqa: A002 (the recipe's word)
    """A hash of the files that are read, of images with their names and classes, or of the request for made rows."""
    if isinstance(source, GeneratedData):
        return hashlib.sha256(source.model_dump_json().encode()).hexdigest()
    total = hashlib.sha256()
    for file in find_source_files(source, format):
        if format == FORMAT:
            total.update(f"{file.parent.name}/{file.name}\0".encode())
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _source_rows(
    source: str | GeneratedData, seed: int, columns: Columns, classes: Classes | None
) -> Iterator[tuple[str, Any]]:
    if isinstance(source, GeneratedData):
        name, rows = Path(source.task).name, find_generator(source.task).generate_rows(source.rows, source.split, seed)
        return ((f"{name} {source.split} row {number}", row) for number, row in enumerate(rows, start=1))
    if classes:
        return folder_rows(source, classes)
    read = (*_COLUMNS, *IMAGE_COLUMNS)
    return stored_rows(source, lambda name: name in read or name in columns or _changes_row(name) is not None)


def _with_answer(row: Any) -> Any:
    answer = {"role": "assistant", "content": "-"}
    match row:
        case {"messages": [*_, {"role": str(role)}] as turns} if role != "assistant":
            return {**row, "messages": [*turns, answer]}
        case {"prompt": _} if row.get("messages") is None and row.get("response") is None:
            return {**row, "response": answer["content"]}
    return row


def _folder_of(source: str | GeneratedData) -> Path:
    """What relative paths of images count from: the folder that holds the rows."""
    if isinstance(source, GeneratedData):
        return Path()
    path = expanduser(source).absolute()
    return path if path.is_dir() else path.parent


def _check_form(row: Any, origin: str, form: str | None, *, chosen: bool) -> str:
    """The form of the row: `form` where it is set, or else what the columns say."""
    if not isinstance(row, Mapping):
        raise DataError(
            f'{origin}: is {kind(row)}; must be an object {{"messages": [...]}} or {{"prompt": ..., "response": ...}}'
        )
    fitting = [name for name, columns in FORMS.items() if set(columns) <= set(row)]
    if len(fitting) > 1 and not chosen:
        # Tables of both forms fill the columns of the other one with null.
        fitting = [name for name in fitting if all(row[column] is not None for column in FORMS[name])] or fitting[:1]
    if len(fitting) > 1 and not chosen:
        raise DataError(
            f"{origin}: has messages, prompt and response; keep messages, or prompt and response, or set data.format "
            "to messages or prompt-response"
        )
    if form in fitting:
        return str(form)
    has = f"{origin}: has the columns {some(map(_in_line, row), _NAMED) or 'none'}"
    hints = "".join(
        suggest(column, [known for known in _COLUMNS if known not in row]) for column in row if column not in _COLUMNS
    )
    if form is not None:
        why = f"data.format is {form}" if chosen else f"the rows before it are {form}"
        raise DataError(f"{has}{hints}, but {why}; all rows must have one form")
    if not fitting:
        raise DataError(f"{has}{hints}; allowed: messages, or prompt and response")
    return fitting[0]


def _other_columns(row: Mapping[str, Any], origin: str, form: str, columns: Columns) -> list[str]:
    """The names of columns with a value that nothing reads. Raises DataError where one changes what the row says."""
    known = (*FORMS[form], *IMAGE_COLUMNS)
    others = [column for column, value in row.items() if value is not None and column not in known]
    for column in others:
        remedy = _changes_row(column)
        if remedy and row[column] not in ("", [], {}):
            raise DataError(
                f"{origin}: has a value in the column {_in_line(column)}, which changes what a row says and which "
                f"Gemsmith does not read; {remedy}, or rename or drop the column to train without it"
            )
    return [_in_line(column) for column in others if column not in columns]


def _changes_row(column: str) -> str | None:
    """What to do about a column that changes what a row says; None for any other."""
    return _MEANINGFUL.get(column.strip().lower())


def _read_columns(row: Mapping[str, Any], origin: str, columns: Columns) -> dict[str, Any]:
    """Those columns that have a value, in the row or given. Raises DataError where one that is needed has none."""
    there = {name: row[name] for name in (*columns.needed, *columns.optional) if row.get(name) is not None}
    found = {**columns.given, **there}
    if missing := next((name for name in columns.needed if found.get(name) is None), None):
        raise DataError(
            f"{origin}: has no {missing}, which eval.scorer reads; add it, set eval.options.{missing} for all rows, or "
            "set eval.scorer to another"
        )
    return found


def read_messages(row: Mapping[str, Any], origin: str, form: str, source: ImageSource) -> tuple[Message, ...]:
    """A row's messages; `form` is one of FORMS. Raises DataError naming what in the row cannot be used."""
    column = read_column(row, origin, source)
    if form == "prompt-response":
        prompt = row["prompt"]
        if column and isinstance(prompt, str):
            prompt = [*({"type": "image"} for _ in column), {"type": "text", "text": prompt}]
        turns: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["response"]}]
        names: tuple[str, ...] = ("prompt", "response")
    else:
        turns = row["messages"]
        if not isinstance(turns, list):
            raise DataError(f"{origin}: messages is {kind(turns)}; must be a list of {{role, content}}")
        names = tuple(f"messages[{index}]" for index in range(len(turns)))
    left = iter(column)
    messages = tuple(
        _read_message(turn, f"{origin}: {name}", left, source) for turn, name in zip(turns, names, strict=True)
    )
    if more := len([*left]):
        raise DataError(
            f"{origin}: {more} of the {len(column)} images in its column have no place in its messages; put "
            '{"type": "image"} where each belongs'
        )
    _check_turns(messages, names, origin)
    return messages


def _check_turns(messages: Sequence[Message], names: Sequence[str], origin: str) -> None:
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise DataError(f"{origin}: has no assistant turn, so nothing to train on; add one, or take the row out")
    if roles[0] == "assistant":
        raise DataError(f"{origin}: begins with an assistant turn; put what it answers before it")
    if roles[-1] != "assistant":
        raise DataError(
            f"{origin}: ends with {names[-1]}, a turn of the role {roles[-1]} that nothing answers; add the answer, or "
            "take the turn out"
        )
    for name, turn in zip(names, messages, strict=True):
        text, takes_images = text_of(turn), turn.role == "user"
        if turn.role != "system" and (not text or text.isspace()) and not (takes_images and images_of([turn])):
            what = "prompt" if takes_images else "answer"
            raise DataError(f"{origin}: {name} is an empty {what}; fill it, or take the row out")
        if not takes_images and images_of([turn]):
            raise DataError(f"{origin}: {name} is of the role {turn.role} and has an image; only user turns may")


def _read_message(turn: Any, where: str, column: Iterator[ImagePart], source: ImageSource) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} is {kind(turn)}; must be an object with role and content")
    # Tables fill a field that only some messages have with null.
    fields = [name for name, value in turn.items() if value is not None or name in _FIELDS]
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise DataError(f"{where} has an unknown field {unknown}{suggest(unknown, _FIELDS)}; allowed: role, content")
    missing = next((name for name in _FIELDS if name not in turn), None)
    if missing:
        raise DataError(f"{where} has no {missing}; must have role and content")
    role = turn["role"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}{suggest(str(role), ROLES)}; allowed: {', '.join(ROLES)}")
    message = Message(role=role, parts=read_parts(turn["content"], where, column, source))
    try:
        text_of(message).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half a surrogate pair at character {error.start + 1}; it is no Unicode text"
        ) from None
    return message


def _in_line(name: str) -> str:
    """A column's name as it can stand in a line of text."""
    return name if name and name.isprintable() else repr(name)
