"""The messages of a conversation, each made of typed parts; whoever reads one does so through the functions here.

Message(role="user", parts=(TextPart(text="hi"),))  ↔  {"role": "user", "content": "hi"}
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
BREAK = "\ufdd0\ufdef"
"""Put into the spelling of a control token that is to be read as text: what is on each side is tokenized apart."""
_FENCED = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class TextPart:
    text: str


@dataclass(frozen=True, kw_only=True)
class ImagePart:
    """An image: the file that holds it, or its bytes where it has no file of its own."""

    path: str = ""
    data: bytes = field(default=b"", repr=False)

    @property
    def source(self) -> str | bytes:
        """The one of the two that there is."""
        return self.path or self.data


Part = TextPart | ImagePart  # what a message may hold


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one of ROLES says. It has at least one part, and no two texts follow each other."""

    role: str
    parts: tuple[Part, ...]
    beside: Mapping[str, Any] | None = None
    """What chat templates read beside its content: reasoning, tool_calls, tool_call_id, name."""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The functions that it calls, in order, each {"type": "function", "function": {"name", "arguments"}}."""
        return self.beside.get("tool_calls", ()) if self.beside else ()

    @property
    def reasoning(self) -> str:
        """What was thought before it."""
        return self.beside.get("reasoning", "") if self.beside else ""


def text_message(role: str, text: str) -> Message:
    return Message(role=role, parts=(TextPart(text=text),))


def join_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts of a message: neighboring texts are joined, and no part at all is an empty text.

    >>> join_texts([TextPart(text="ad"), TextPart(text="d")])
    (TextPart(text='add'),)
    """
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, TextPart) and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return tuple(joined) or (TextPart(text=""),)


def text_of(message: Message) -> str:
    """All text of the message."""
    # A list, which costs less than a generator: this is asked some ten times a message.
    return "".join([part.text for part in message.parts if isinstance(part, TextPart)])


def are_broken(messages: Iterable[Message]) -> bool:
    """Whether a text has a control token in it that is to be read as text, which no request can spell."""
    return any(BREAK in text_of(message) for message in messages)


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """The same message with each of its texts changed, those beside its content too."""
    parts = tuple(replace(one, text=change(one.text)) if isinstance(one, TextPart) else one for one in message.parts)
    return replace(message, parts=parts, beside=map_strings(message.beside, change))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with each of its strings changed, but for names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_strings(inner, change) for name, inner in value.items()}
    return [map_strings(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def images_of(messages: Iterable[Message]) -> tuple[ImagePart, ...]:
    return tuple([part for message in messages for part in message.parts if isinstance(part, ImagePart)])


def fenced_blocks(text: str) -> list[str]:
    r"""What stands in the text's fenced blocks that are closed.

    >>> fenced_blocks("One:\n```json\n{}\n```\n~~~\nopen")
    ['{}\n']
    """
    return [match[2] for match in _FENCED.finditer(text)]


def plain_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """The messages as chat templates take them: content that is text alone is a string, and an image is its place.

    >>> plain_messages([text_message("user", "hi")])
    ({'role': 'user', 'content': 'hi'},)
    >>> plain_messages([Message(role="user", parts=(ImagePart(path="a.png"), TextPart(text="hi")))])
    ({'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'hi'}]},)
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        content: str | list[dict[str, str]] = text_of(message)
        if images_of([message]):
            content = [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                for part in message.parts
            ]
        plain.append({"role": message.role, "content": content, **(message.beside or {})})
    return tuple(plain)
