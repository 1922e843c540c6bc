r"""One class for each form that rows may have: which columns it reads, and what turns it makes of them.

{"instruction": "Add", "input": "1 and 2", "output": "3"}  →  user: Add\n1 and 2    assistant: 3
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from gemsmith.data.parts import ImageSource, kind, read_column, read_parts
from gemsmith.errors import RowError, suggest
from gemsmith.tasks.messages import ROLES, ImagePart, Message, images_of, text_of

_FIELDS = ("role", "content")
_FIELD_SET = {*_FIELDS}
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Who speaks in ShareGPT's `from` -> the role."""


class Turns(NamedTuple):
    """A row's turns as objects of role and content, and what the row calls each of them."""

    turns: Sequence[Any]
    names: tuple[str, ...]
    context: int = 0
    """How many of the first are context alone: no answer among them is trained."""


class Form(Protocol):
    """A form of row: the columns that such a row has, those that it may have, and the one with its answer."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that tell the form."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are read where they are there."""

    @property
    def answer(self) -> str | None:
        """The column that a row has not which only asks; None: it ends with the question."""

    def turns(self, row: Mapping[str, Any], origin: str, images: int) -> Turns:
        """The row's turns; `images` of its own column stand before its question. Raises RowError."""


@dataclass(frozen=True)
class Messages:
    """A list of turns with role and content."""

    needed: tuple[str, ...] = ("messages",)
    optional: tuple[str, ...] = ()
    answer: None = None

    def turns(self, row: Mapping[str, Any], origin: str, _images: int) -> Turns:
        """As they are."""
        turns = _list_of(row["messages"], f"{origin}: messages", "{role, content}")
        return Turns(turns, _numbered("messages", len(turns)))


@dataclass(frozen=True)
class ShareGPT:
    """A list of turns with from and value, or with role and content, and maybe a system turn beside it."""

    needed: tuple[str, ...] = ("conversations",)
    optional: tuple[str, ...] = ("system",)
    answer: None = None

    def turns(self, row: Mapping[str, Any], origin: str, _images: int) -> Turns:
        """Those of human are the user's, those of gpt the assistant's."""
        given = _list_of(row["conversations"], f"{origin}: conversations", "{from, value}")
        names, system = _numbered("conversations", len(given)), _system(row)
        turns = [_spoken(turn, f"{origin}: {name}") for turn, name in zip(given, names, strict=True)]
        return Turns([*system, *turns], (*(["system"] if system else []), *names))


@dataclass(frozen=True)
class Pair:
    """A question and its answer, in two columns."""

    needed: tuple[str, str]
    optional: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The second."""
        return self.needed[1]

    def turns(self, row: Mapping[str, Any], _origin: str, images: int) -> Turns:
        """One of the user, and one of the assistant."""
        prompt, response = self.needed
        return Turns([_asked(row[prompt], images), {"role": "assistant", "content": row[response]}], self.needed)


@dataclass(frozen=True)
class PromptCompletion:
    """TRL's: two texts, or two lists of messages, of which only the second is trained."""

    needed: tuple[str, ...] = ("prompt", "completion")
    optional: tuple[str, ...] = ()
    answer: str = "completion"

    def turns(self, row: Mapping[str, Any], origin: str, images: int) -> Turns:
        """Those of the prompt and those of the completion."""
        prompt, completion = row["prompt"], row["completion"]
        # A list of parts is one question, as of any other pair.
        asked = prompt if _are_messages(prompt) else [_asked(prompt, images)]
        answered = completion if _are_messages(completion) else [{"role": "assistant", "content": completion}]
        if not any(isinstance(turn, Mapping) and turn.get("role") == "assistant" for turn in answered):
            raise RowError("no answer", f"{origin}: completion has no assistant turn; add one, or take the row out")
        names = (_numbered("prompt", len(asked)) if asked is prompt else ("prompt",)) + (
            _numbered("completion", len(answered)) if answered is completion else ("completion",)
        )
        return Turns([*asked, *answered], names, context=len(asked))


@dataclass(frozen=True)
class Alpaca:
    """An instruction, maybe its input and a system turn, and the output."""

    needed: tuple[str, ...] = ("instruction", "output")
    optional: tuple[str, ...] = ("input", "system")
    answer: str = "output"

    def turns(self, row: Mapping[str, Any], origin: str, images: int) -> Turns:
        """The input follows the instruction on a line of its own."""
        instruction, given, system = row["instruction"], row.get("input"), _system(row)
        if given not in (None, ""):
            for name, value in (("instruction", instruction), ("input", given)):
                if not isinstance(value, str):
                    raise RowError("not text", f"{origin}: {name} is {kind(value)}; must be text")
            instruction = f"{instruction}\n{given}"
        turns = [*system, _asked(instruction, images), {"role": "assistant", "content": row["output"]}]
        return Turns(turns, (*(["system"] if system else []), *self.needed))


@dataclass(frozen=True)
class RawText:
    """Text without a question: all of it is trained, and no chat template is around it."""

    needed: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()
    answer: str = "text"

    def turns(self, row: Mapping[str, Any], origin: str, _images: int) -> Turns:
        """An answer to nothing."""
        text = row["text"]
        if not isinstance(text, str):
            raise RowError("not text", f"{origin}: text is {kind(text)}; must be text")
        if not text.strip():
            raise RowError("empty text", f"{origin}: text is empty; fill it, or take the row out")
        return Turns([{"role": "assistant", "content": text}], self.needed)


FORMS: dict[str, Form] = {
    "messages": Messages(),
    "prompt-response": Pair(("prompt", "response")),
    "prompt-completion": PromptCompletion(),
    "alpaca": Alpaca(),
    "sharegpt": ShareGPT(),
    "question-answer": Pair(("question", "answer")),
    "text": RawText(),
}
COLUMNS = frozenset(column for form in FORMS.values() for column in (*form.needed, *form.optional))


class Conversation(NamedTuple):
    """The checked messages of a row, and what Turns says of them."""

    messages: tuple[Message, ...]
    names: tuple[str, ...]
    context: int


def read_messages(row: Mapping[str, Any], origin: str, form: Form, source: ImageSource) -> Conversation:
    """A row's messages. Raises RowError naming what in the row cannot be used."""
    column = read_column(row, origin, source)
    turns, names, context = form.turns(row, origin, len(column))
    left = iter(column)
    messages = tuple(
        [_read_message(turn, f"{origin}: {name}", left, source) for turn, name in zip(turns, names, strict=True)]
    )
    if column and (more := len([*left])):
        raise RowError(
            "image without a place",
            f"{origin}: {more} of the {len(column)} images in its column have no place in its messages; put "
            '{"type": "image"} where each belongs',
        )
    if not isinstance(form, RawText):
        _check_turns(messages, names, origin)
    return Conversation(messages, names, context)


def _check_turns(messages: Sequence[Message], names: Sequence[str], origin: str) -> None:
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise RowError(
            "no answer", f"{origin}: has no assistant turn, so nothing to train on; add one, or take the row out"
        )
    if roles[0] == "assistant":
        raise RowError(
            "begins with an answer", f"{origin}: begins with an assistant turn; put what it answers before it"
        )
    if roles[-1] != "assistant":
        raise RowError(
            "ends without an answer",
            f"{origin}: ends with {names[-1]}, a turn of the role {roles[-1]} that nothing answers; add the answer, or "
            "take the turn out",
        )
    for name, turn in zip(names, messages, strict=True):
        text, takes_images = text_of(turn), turn.role == "user"
        if turn.role != "system" and (not text or text.isspace()) and not (takes_images and images_of([turn])):
            what = "prompt" if takes_images else "answer"
            raise RowError(f"empty {what}", f"{origin}: {name} is an empty {what}; fill it, or take the row out")
        if not takes_images and images_of([turn]):
            raise RowError(
                "image outside a user turn",
                f"{origin}: {name} is of the role {turn.role} and has an image; only user turns may",
            )


def _read_message(turn: Any, where: str, column: Iterator[ImagePart], source: ImageSource) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError("not a turn", f"{where} is {kind(turn)}; must be an object with role and content")
    if turn.keys() != _FIELD_SET:
        _check_fields(turn, where, _FIELDS)
    role = turn["role"]
    if role not in ROLES:
        raise RowError(
            "unknown role",
            f"{where} has the role {role!r}{suggest(str(role), ROLES)}; allowed: {', '.join(ROLES)}",
        )
    message = Message(role=role, parts=read_parts(turn["content"], where, column, source))
    try:
        text_of(message).encode()
    except UnicodeEncodeError as error:
        raise RowError(
            "no Unicode",
            f"{where} holds half a surrogate pair at character {error.start + 1}; it is no Unicode text",
        ) from None
    return message


def _check_fields(turn: Mapping[str, Any], where: str, fields: tuple[str, str]) -> None:
    # Tables fill a field that only some messages have with null.
    unknown = next((name for name, value in turn.items() if name not in fields and value is not None), None)
    if unknown is not None:
        raise RowError(
            "unknown field",
            f"{where} has an unknown field {unknown}{suggest(unknown, fields)}; allowed: {', '.join(fields)}",
        )
    missing = next((name for name in fields if name not in turn), None)
    if missing:
        raise RowError("not a turn", f"{where} has no {missing}; must have {' and '.join(fields)}")


def _spoken(turn: Any, where: str) -> Any:
    """A turn of ShareGPT's as one of role and content; what is none is left for whoever reads those."""
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn
    _check_fields(turn, where, ("from", "value"))
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise RowError(
            "unknown role", f"{where} is from {speaker!r}; allowed: {', '.join(_SPEAKERS)}; take such rows out"
        )
    return {"role": _SPEAKERS[speaker], "content": turn["value"]}


def _asked(prompt: Any, images: int) -> dict[str, Any]:
    if images and isinstance(prompt, str):
        prompt = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
    return {"role": "user", "content": prompt}


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = row.get("system")
    return [] if system in (None, "") else [{"role": "system", "content": system}]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) and "role" in item for item in value)


def _list_of(turns: Any, where: str, what: str) -> list[Any]:
    if not isinstance(turns, list):
        raise RowError("not a list", f"{where} is {kind(turns)}; must be a list of {what}")
    return turns


@cache
def _numbered(column: str, count: int) -> tuple[str, ...]:
    """messages[0], messages[1], …: one tuple for all rows of as many turns."""
    return tuple(f"{column}[{index}]" for index in range(count))
