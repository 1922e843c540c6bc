"""Rows of a dataset as checked documents, read from files or made from a seed."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from gemsmith.data.chat_template import settle_document
from gemsmith.data.documents import Document
from gemsmith.data.forms import (
    BESIDE,
    COLUMNS,
    FORMS,
    SPEAKERS,
    SYSTEM_NAMES,
    TOOLS,
    are_messages,
    guess_columns,
    read_document,
)
from gemsmith.data.image_folder import FORMAT, folder_files, folder_labels, folder_notices, folder_rows
from gemsmith.data.parts import IMAGE_COLUMNS, ImageSource, kind
from gemsmith.data.reader import find_files, stored_rows
from gemsmith.errors import DataError, RecipeError, RowError, some, suggest
from gemsmith.recipe.schema import Data, GeneratedData, Recipe, Rows, eval_tasks, sources_of
from gemsmith.system.files import expanduser
from gemsmith.tasks import SOURCES, find_generator, find_scorer, is_task_file
from gemsmith.tasks.base import Question, SupportsOptions

_NAMED = 8
# Columns that other trainers make part of what the model sees or how a row counts: without them, a row is another one.
_MEANINGFUL = {
    **dict.fromkeys(SYSTEM_NAMES, "name it system, here or in data.columns, beside a question and its answer"),
    "history": "write its turns into messages",
    **dict.fromkeys((TOOLS, "functions", "documents", "chat_template_kwargs", "weight"), "take such rows out"),
    **dict.fromkeys(IMAGE_COLUMNS, "name it image or images in small letters"),
    **dict.fromkeys(("video", "videos", "audio", "audios"), "take such rows out"),
}


@dataclass(kw_only=True)
class BadRows:
    """Rows of a source that cannot be used: all of them in one answer, by what is wrong with them."""

    first: RowError | None = None
    places: dict[str, list[str]] = field(default_factory=dict)  # what is wrong -> where such rows stand

    def add(self, origin: str, error: RowError) -> None:
        """Counts one, which stands at `origin`."""
        error.__traceback__ = error.__context__ = None  # which would hold the row's values
        self.first = self.first or error
        self.places.setdefault(error.kind, []).append(origin)

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows by what is wrong with them, as a record has them."""
        return {f"row: {kind}": len(places) for kind, places in self.places.items()}

    def settle(self, rows: int, wanted: Literal["error", "drop"] | None, key: str = "data.train") -> tuple[str, ...]:
        """A warning on the rows left out of so many, if any. Raises DataError unless they are to be, or if all are."""
        if self.first is None:
            return ()
        kinds = sorted(self.places.items(), key=lambda item: -len(item[1]))
        found = "; ".join(f"{kind}: {len(places):,} ({some(places, 3)})" for kind, places in kinds)
        count = sum(map(len, self.places.values()))
        if wanted == "drop" and count < rows:
            return (f"{key}: rows left out that cannot be used: {count:,} of {rows:,} ({found})",)
        others = f"; {count:,} of {rows:,} rows cannot be used ({found})" if count > 1 else ""
        remedy = "" if wanted is None else "; so none is left" if count == rows else "; or set data.on_bad_row to drop"
        raise DataError(f"{self.first}{others}{remedy}")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows of a source that can be used, in order."""

    documents: list[Document]
    ignored_columns: Mapping[str, int] = field(default_factory=dict)
    """Columns that were not read: name -> rows that have a value there."""
    dropped: Mapping[str, int] = field(default_factory=dict)  # why -> rows that were left out
    warnings: tuple[str, ...] = ()  # what a reader must know of the source
    sources: Mapping[str, int] = field(default_factory=dict)  # of several sources, the rows that are taken of each


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What is read of a row beside the messages: columns that it needs, others, and values for rows without one."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


NO_COLUMNS = Columns()


def read_prompts(source: str) -> Dataset:
    """What each row asks: its messages but for a last answer, which is not read, or its prompt. Raises DataError."""
    found = read_dataset(source, asked=True)
    _refuse_raw_text(found, "name the column prompt")
    for row in found.documents:
        refuse_tools(row, "predict asks without", "ask the server that gemsmith serve starts")
    return replace(found, documents=[replace(row, messages=row.messages[:-1]) for row in found.documents])


def read_train(recipe: Recipe, keep: Callable[[bytes], str] | None) -> Dataset:
    """The rows of data.train; `keep` makes files of images that come as bytes, which else stay in memory."""
    found, limit = _read_sources(recipe.data.train, recipe, "train", keep), recipe.data.limit
    if not limit or limit >= (count := len(found.documents)):
        return found
    documents = [found.documents[place] for place in sorted(random.Random(recipe.seed).sample(range(count), limit))]
    return replace(found, documents=documents, dropped={**found.dropped, "limit": count - limit})


def read_held_out(recipe: Recipe, keep: Callable[[bytes], str] | None = None) -> Dataset:
    """The rows of data.eval, with the columns that their scorers read, from eval.options where a row has none.

    `keep`: see read_train. Raises RecipeError for an option that no scorer reads, DataError as read_dataset does.
    """
    names = [task.task for task in eval_tasks(recipe) if task.task not in SOURCES]
    scorers = [find_scorer(name) for name in names]
    needed = dict.fromkeys(column for scorer in scorers for column in scorer.COLUMNS)
    others = [scorer.OPTIONAL_COLUMNS for scorer in scorers if isinstance(scorer, SupportsOptions)]
    optional = dict.fromkeys(column for columns in others for column in columns)
    known = {}
    if recipe.data.format == FORMAT and "labels" in optional:  # the same for all rows of a folder
        known["labels"] = folder_labels(str(recipe.data.eval), recipe.data)
    columns = Columns(needed=(*needed,), optional=(*optional,), given=known | recipe.eval.options)
    allowed = (*columns.needed, *columns.optional)
    if unknown := next((name for name in columns.given if name not in allowed), None):
        what = f"the scorer {' and '.join(names)} reads no {unknown}{suggest(unknown, allowed)}"
        raise RecipeError(f"eval.options.{unknown}: {what}; allowed: {', '.join(allowed) or 'none'}")
    return _read_eval(recipe, columns, keep)


def read_eval(recipe: Recipe, keep: Callable[[bytes], str] | None = None) -> Dataset:
    """The rows of data.eval, if any, found bad now, not after training; `keep`: their images, with train.eval_steps."""
    if recipe.data.eval is None:
        return Dataset(documents=[])
    keep = keep if recipe.train.eval_steps else None
    if any(is_task_file(task.task) for task in eval_tasks(recipe)):  # whose code no stage runs that does not score
        return _read_eval(recipe, NO_COLUMNS, keep)
    return read_held_out(recipe, keep)


def _read_eval(recipe: Recipe, columns: Columns, keep: Callable[[bytes], str] | None) -> Dataset:
    assert recipe.data.eval is not None
    found = _read_sources(recipe.data.eval, recipe, "held-out", keep, columns)
    _refuse_raw_text(found, "leave data.eval out, or name rows with questions")
    return found


def _read_sources(
    source: Rows,
    recipe: Recipe,
    part: Literal["train", "held-out"],
    keep: Callable[[bytes], str] | None,
    columns: Columns = NO_COLUMNS,
) -> Dataset:
    """The rows of a source, or of several; of these training takes each as often as its weight says."""
    read = partial(read_dataset, data=recipe.data, part=part, seed=recipe.seed, columns=columns, keep=keep)
    if not isinstance(source, tuple):
        return read(source)
    documents, counts, warnings = list[Document](), [Counter[str](), Counter[str](), Counter[str]()], list[str]()
    for place, one in enumerate(source):
        found = read(one.path)
        times, rest = divmod(one.weight if part == "train" else 1, 1)
        drawn = random.Random(f"{recipe.seed} {place}").sample(found.documents, round(rest * len(found.documents)))
        taken = found.documents * int(times) + drawn
        key = f"data.{'train' if part == 'train' else 'eval'}[{place}]"
        documents += [replace(document, origin=f"{key}, {document.origin}") for document in taken]
        for total, more in zip(counts, ({one.path: len(taken)}, found.ignored_columns, found.dropped), strict=True):
            total.update(more)
        warnings += (f"{key}: {warning}" for warning in found.warnings)
    if not documents:
        raise DataError("data.train: its weights leave no row; raise one")
    sources, ignored, dropped = counts
    return Dataset(
        documents=documents, ignored_columns=ignored, dropped=dropped, warnings=tuple(warnings), sources=sources
    )


def has_tools(row: Document | Question) -> bool:
    """Whether it declares tools, or calls some."""
    return bool(row.tools) or any(turn.role == "tool" or turn.tool_calls for turn in row.messages)


def refuse_tools(document: Document, who: str, remedy: str) -> None:
    """Raises DataError where the row has tools; `who` ends the sentence: who asks without them."""
    if has_tools(document):
        raise DataError(f"{document.origin}: has tools, which {who}; {remedy}")


def _refuse_raw_text(found: Dataset, remedy: str) -> None:
    if raw := next((row for row in found.documents if len(row.messages) == 1), None):
        raise DataError(f"{raw.origin}: is raw text, which asks nothing; {remedy}")


def read_dataset(
    source: str | GeneratedData,
    *,
    data: Data | None = None,
    part: Literal["train", "held-out"] | None = None,
    seed: int = 0,
    columns: Columns = NO_COLUMNS,
    folder: Path | None = None,
    keep: Callable[[bytes], str] | None = None,
    asked: bool = False,
) -> Dataset:
    """The rows of the source, of the form that `data` says, by default what the columns say; `part` None: both parts.

    `columns` are read beside the messages; paths of images count from `folder`, by default the rows'; `keep`: see
    read_train; `asked`: a row that ends with its question gets an answer. Raises DataError naming file and line.
    """
    wanted = None if data is None or (part == "held-out" and not data.held_out) else data.on_bad_row
    data = data or Data(train="-")
    path = Path() if isinstance(source, GeneratedData) else expanduser(source).absolute()
    images = ImageSource(folder=folder or (path if path.is_dir() else path.parent), keep=keep)
    share = 0.0 if data.format == FORMAT or part is None else data.held_out
    documents, ignored, bad, form = list[Document](), Counter[str](), BadRows(), None
    rows, left_out, settled, unread = 0, 0, 0, set(data.columns.values())
    for rows, (origin, row) in enumerate(_source_rows(source, seed, columns, data, part), start=1):  # noqa: B007
        try:
            unread.difference_update(row if isinstance(row, Mapping) else ())
            named = _with_answer(row) if asked else _renamed(row, data.columns)
            fits = _check_form(named, origin, form, data)
            if share and _is_held_out(named, fits, share) != (part == "held-out"):
                left_out += 1
                continue
            others, kept = _other_columns(named, origin, fits, columns), _read_columns(named, origin, columns)
            document = read_document(named, origin, FORMS[fits], images, kept)
            documents.append(settle_document(document, data.control_tokens))
            settled += documents[-1] is not document
            form = fits
            ignored.update(others)
        except RowError as error:
            bad.add(origin, error)
    warnings, key = bad.settle(rows - left_out, wanted), "data.eval" if part == "held-out" else "data.train"
    if not documents:
        raise _no_rows("data" if isinstance(source, GeneratedData) else source, rows if left_out else 0, part, share)
    spelled = f"{settled:,} of {rows - left_out:,}" if settled else ""
    return Dataset(
        documents=documents,
        ignored_columns=dict(ignored.most_common()),
        dropped={**bad.counts, **({"held_out": left_out} if left_out and part == "train" else {})},
        warnings=(*warnings, *_notices(source, data, key, unread, spelled)),
    )


def _notices(source: str | GeneratedData, data: Data, key: str, unread: Collection[str], spelled: str) -> Iterator[str]:
    """What a reader must know of the source; `spelled`: how many of how many rows have control tokens, if any."""
    if spelled:
        how = "left out of them" if data.control_tokens == "drop" else "read as text"
        yield f"{key}: rows with control tokens, which are {how}: {spelled}"
    if unread and not isinstance(source, GeneratedData):
        yield f"{key}: no row of {source} has {some(sorted(unread), _NAMED)}, which data.columns names"
    if data.format == FORMAT:
        yield from folder_notices(str(source), data)


def _no_rows(name: str, split: int, part: str | None, share: float) -> DataError:
    if split:
        return DataError(f"data.held_out: of {split:,} rows of {name} none is {part} with {share:g}; give another")
    return DataError(f"{name}: holds no rows; give a dataset with at least one")


def find_source_files(source: str, format: str = "auto") -> tuple[Path, ...]:  # noqa: A002 (the recipe's word)
    """The files that the rows are read from, in reading order. Raises DataError where there are none."""
    return folder_files(source) if format == FORMAT else find_files(source)


def describe_columns(columns: Mapping[str, int]) -> str:
    """`id (30 rows), source (1 row)`, the first few by name."""
    return some([f"{name} ({count:,} row{'s' * (count > 1)})" for name, count in columns.items()], _NAMED)


def source_sha256(source: Rows, format: str = "auto") -> str:  # noqa: A002 (the recipe's word)
    """A hash of the files that are read, of images with their names and classes, or of the request for made rows."""
    if isinstance(source, GeneratedData):
        return hashlib.sha256(source.model_dump_json().encode()).hexdigest()
    total = hashlib.sha256()
    for file in (file for path in sources_of(source) for file in find_source_files(path, format)):
        if format == FORMAT:
            total.update(f"{file.parent.name}/{file.name}\0".encode())
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def _source_rows(
    source: str | GeneratedData, seed: int, columns: Columns, data: Data, part: str | None
) -> Iterator[tuple[str, Any]]:
    if isinstance(source, GeneratedData):
        name, rows = Path(source.task).name, find_generator(source.task).generate_rows(source.rows, source.split, seed)
        return ((f"{name} {source.split} row {number}", row) for number, row in enumerate(rows, start=1))
    if data.format == FORMAT:
        return folder_rows(source, data, held_out=part == "held-out")
    read = {*COLUMNS, *IMAGE_COLUMNS, *data.columns.values(), *columns.needed, *columns.optional}
    return stored_rows(source, lambda name: name in read or name.strip().lower() in _MEANINGFUL, lambda error: error)


def _renamed(row: Any, names: Mapping[str, str]) -> Any:
    """The row with the names that forms have for its columns."""
    if not names or not isinstance(row, Mapping):
        return row
    ours = {name: row[theirs] for name, theirs in names.items() if theirs in row}
    return {name: value for name, value in row.items() if name not in ours and name not in names.values()} | ours


def _is_held_out(row: Mapping[str, Any], form: str, share: float) -> bool:
    """Whether a row is of the share, by a hash of what is read of it: a copy is on its side, wherever it stands."""
    names = (*FORMS[form].needed, *FORMS[form].optional, *IMAGE_COLUMNS, *(name for name in BESIDE if row.get(name)))
    content = {name: row[name] for name in names if row.get(name) not in (None, "")}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _with_answer(row: Any) -> Any:
    """The row with an answer, where it ends with its question or is a pair's first part."""
    if not isinstance(row, Mapping) or any(
        row.get(form.answer) is not None for form in FORMS.values() if form.answer and set(form.needed) <= set(row)
    ):
        return row
    for column in ("messages", "conversations"):
        if isinstance(turns := row.get(column), list):
            last = turns[-1] if turns and isinstance(turns[-1], Mapping) else {}
            answered = "assistant" in (last.get("role"), SPEAKERS.get(str(last.get("from"))))
            return row if answered else {**row, column: [*turns, {"role": "assistant", "content": "-"}]}
    # A prompt that is a list of messages has a completion for an answer; one that is text or parts, a response.
    completed = "completion" in row or are_messages(row.get("prompt"))
    for form in (*([FORMS["prompt-completion"]] if completed else []), *FORMS.values()):
        if form.answer and all(row.get(name) is not None for name in form.needed if name != form.answer):
            return {**row, form.answer: "-"} if form.asks else row
    return row


@lru_cache(1024)
def _fitting_forms(names: tuple[str, ...]) -> tuple[str, ...]:
    """The forms that a row of these columns may have; text beside others is often what they were rendered to."""
    found = tuple(name for name, form in FORMS.items() if set(form.needed) <= set(names))
    return tuple(name for name in found if FORMS[name].asks) or found


def _check_form(row: Any, origin: str, form: str | None, data: Data) -> str:
    """The form of the row: what data.format says, or else the columns. `form` is that of the rows before it."""
    if isinstance(row, RowError):  # which could not be read
        raise row
    if not isinstance(row, Mapping):
        allowed = '{"messages": [...]} or {"prompt": ..., "response": ...}'
        raise RowError("not an object", f"{origin}: is {kind(row)}; must be an object {allowed}")
    if data.format in FORMS:
        form = data.format
        fitting: tuple[str, ...] = (form,) if set(FORMS[form].needed) <= set(row) else ()
    elif len(fitting := _fitting_forms(tuple(row))) > 1:
        # Tables of several forms fill the columns of the others with null.
        filled = [name for name in fitting if all(row[column] is not None for column in FORMS[name].needed)]
        fitting = tuple(filled) or fitting[:1]
    if len(fitting) > 1:
        there = list(dict.fromkeys(column for name in fitting for column in FORMS[name].needed))
        remedy = f"keep {_describe(fitting)}, or set data.format to {' or '.join(fitting)}"
        raise RowError("several forms", f"{origin}: has {', '.join(there[:-1])} and {there[-1]}; {remedy}")
    if fitting and form in (None, fitting[0]):
        return fitting[0]
    raise _unfitting(row, origin, form, data)


def _describe(forms: Iterable[str]) -> str:
    return ", or ".join(" and ".join(FORMS[name].needed) for name in forms)


def _unfitting(row: Mapping[str, Any], origin: str, form: str | None, data: Data) -> RowError:
    has = f"{origin}: has the columns {some(map(_in_line, row), _NAMED) or 'none'}"
    near = sorted(column for column in COLUMNS if column not in row)
    has += "".join(suggest(column, near) for column in row if column not in COLUMNS)
    if missing := next((f"{ours}: {theirs}" for ours, theirs in data.columns.items() if ours not in row), None):
        has += f", and none that data.columns has as {{{missing}}}"
    if "file_name" in row:
        has += " (images with a label each are of data.format image-folder, the file named metadata.csv)"
    if form is None:
        guess = ", ".join(f"{ours}: {_in_line(theirs)}" for ours, theirs in guess_columns(row).items())
        allowed = f"{_describe(FORMS)}; data.columns names others{guess and f', here perhaps {{{guess}}}'}"
        return RowError("unknown columns", f"{has}; allowed: {allowed}")
    why = f"the rows before it are {form}"
    if data.format in FORMS:
        why = f"data.format is {form}, of {_describe([form])}"
    return RowError("another form", f"{has}, but {why}; all rows must have one form")


def _other_columns(row: Mapping[str, Any], origin: str, form: str, columns: Columns) -> list[str]:
    """The names of columns with a value that nothing reads. Raises RowError where one changes what the row says."""
    others = [column for column in _unread(tuple(row), form) if row[column] is not None]
    for column in others:
        remedy = _MEANINGFUL.get(column.strip().lower())
        if remedy and row[column] not in ("", [], {}):
            where = f"column {_in_line(column)}"
            what = f"has a value in the {where}, which changes what a row says and which Gemsmith does not read"
            remedy = f"{remedy}, or rename or drop the column to train without it"
            raise RowError(where, f"{origin}: {what}; {remedy}")
    return [_in_line(column) for column in others if column not in (*columns.needed, *columns.optional)]


@lru_cache(1024)
def _unread(names: tuple[str, ...], form: str) -> tuple[str, ...]:
    known = {*FORMS[form].needed, *FORMS[form].optional, *IMAGE_COLUMNS, *(BESIDE if FORMS[form].asks else ())}
    return tuple(name for name in names if name not in known)


def _read_columns(row: Mapping[str, Any], origin: str, columns: Columns) -> dict[str, Any]:
    """Those columns that have a value, in the row or given. Raises DataError where one that is needed has none."""
    there = {name: row[name] for name in (*columns.needed, *columns.optional) if row.get(name) is not None}
    found = {**columns.given, **there}
    if missing := next((name for name in columns.needed if found.get(name) is None), None):
        remedy = f"add it, set eval.options.{missing} for all rows, or set eval.scorer to another"
        raise DataError(f"{origin}: has no {missing}, which eval.scorer reads; {remedy}")
    return found


def _in_line(name: str) -> str:
    """A column's name as it can stand in a line of text."""
    return name if name and name.isprintable() else repr(name)
