"""Examples for the page: what was asked, expected and written, with the words marked that are not the same."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemsmith.eval_records import EvalRecord

MOST_CHARACTERS = 2_000
"""Of one text of an example. A page must stay small enough to send, whatever the rows hold."""
MOST_EXAMPLES = 12
_WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, cut to what the page has room for, in parts: whether one is as in what it is held against, its words."""

    parts: tuple[tuple[bool, str], ...]
    omitted: int = 0


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one model wrote."""

    name: str
    right: bool | None
    cut: bool
    """Whether the model was stopped before it had ended."""
    reason: str
    """Why it is not right, where the scorer says."""
    text: Text


@dataclass(frozen=True, kw_only=True)
class Example:
    number: int
    prompt: Text
    expected: Text | None
    """None where a task has no one answer that is right."""
    answers: tuple[Written, ...]


def read_examples(scores: EvalRecord) -> list[Example]:
    """The record's examples, at most MOST_EXAMPLES.

    A wrong answer is held against what was expected; where nothing is, base and tuned against each other.
    """
    return [_read_example(number, example) for number, example in enumerate(scores.examples[:MOST_EXAMPLES], 1)]


def _read_example(number: int, example: dict[str, Any]) -> Example:
    expected = str(example.get("expected") or "")
    wrote = {name: str(example.get(name) or "") for name in ("base", "tuned")}
    against = {
        name: expected if expected else wrote["tuned" if name == "base" else "base"]
        for name in wrote
        if not expected or example.get(f"{name}_right") is False
    }
    return Example(
        number=number,
        prompt=plain_text(str(example.get("prompt") or "")),
        expected=plain_text(expected) if expected else None,
        answers=tuple(
            Written(
                name=name,
                right=example.get(f"{name}_right"),
                cut=example.get(f"{name}_cut") is True,
                reason=str(example.get(f"{name}_reason") or ""),
                text=marked_text(text, against[name]) if name in against else plain_text(text),
            )
            for name, text in wrote.items()
        ),
    )


def plain_text(text: str) -> Text:
    """A text with nothing marked."""
    return Text(parts=((True, text[:MOST_CHARACTERS]),), omitted=max(0, len(text) - MOST_CHARACTERS))


def marked_text(text: str, against: str) -> Text:
    """A text with the words marked that another one does not have in their place.

    >>> marked_text("y = a - b;", "y = a + b;").parts
    ((True, 'y = a '), (False, '-'), (True, ' '), (True, 'b;'))
    """
    shown = _WORDS.findall(text[:MOST_CHARACTERS])
    other = _WORDS.findall(against[: 2 * MOST_CHARACTERS])
    parts = tuple(_trim(difflib.SequenceMatcher(None, shown, other), shown))
    return Text(parts=parts, omitted=max(0, len(text) - MOST_CHARACTERS))


def _trim(matcher: difflib.SequenceMatcher[str], words: list[str]) -> Iterator[tuple[bool, str]]:
    """The parts; white space after the last word of a marked one is not marked."""
    for tag, start, end, _, _ in matcher.get_opcodes():
        part = "".join(words[start:end])
        if tag == "equal":
            yield True, part
        elif part:
            bare = part.rstrip() or part
            yield False, bare
            if bare != part:
                yield True, part[len(bare) :]
