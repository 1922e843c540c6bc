"""Control tokens end turns, open thoughts and call tools: the chat template writes them, and a row's text may not.

The text is searched before it is rendered. The ids that it comes to are looked at as well, for a control token can also
arise where text meets what the template writes (`<|` before `turn>`), where two texts meet, or where the tokenizer
normalises (a fullwidth `＜` to `<`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
from tokenizers import AddedToken, Tokenizer

from gemsmith.data.documents import Document
from gemsmith.errors import DataError
from gemsmith.messages import Message, images_of, map_text, text_of

SPECIAL_IDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<|turn>": 105, "<turn|>": 106}
# Pictures and sounds take their place, and transformers computes them as padding where there are none. Refused with any
# tokenizer, since a server may know them where tokenizer.json does not.
PLACEHOLDERS = ("<|image|>", "<|audio|>", "<|video|>")
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
# How Gemma 4 spells control tokens; such a token counts even where tokenizer.json does not flag it special. HTML tags,
# runs of line feeds and <unused7> are added tokens as well, and stay text.
_SPELLING = re.compile(r"<\|[^<|>]+\|?>|<[^<|>]+\|>")
# Around a text, it parts what the template writes from it; no white space, which templates trim, and no part of a word.
_GUARD = "."
_REMEDY = "a control token that only the chat template may write; take it out, or write it in another way"


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlTokens:
    """A tokenizer's control tokens."""

    texts: Mapping[int, str]
    """By id."""
    pattern: re.Pattern[str]
    """Finds one in a text."""
    marks: np.ndarray
    """bool by id; the last is False, and stands for all ids above."""

    def among(self, ids: np.ndarray) -> np.ndarray:
        """[2, 105, 9, 9, 106] → [2, 105, 106]"""
        return ids[self.marks.take(ids, mode="clip")]


def find_control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    """The added tokens that are special, or spelled like one."""
    added = {
        number: token
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.content and (token.special or token.content in SPECIAL_IDS or _SPELLING.fullmatch(token.content))
    }
    marks = np.zeros(max(added, default=0) + 2, bool)
    marks[list(added)] = True
    return ControlTokens(
        texts={number: token.content for number, token in added.items()}, pattern=_find_any(added.values()), marks=marks
    )


def refuse_control_tokens(control: ControlTokens, document: Document) -> None:
    """Raises DataError where a message's text holds a control token.

    It would forge a turn, or train the model to stop in the middle.
    """
    for index, message in enumerate(document.messages):
        if found := control.pattern.search(_words(message)):
            raise DataError(f"{document.origin}: {document.name(index)} holds {found.group()}, {_REMEDY}")


@dataclass(frozen=True, kw_only=True, eq=False)
class BorderCheck:
    """Finds control tokens that a row's text makes only when it is rendered and tokenised.

    What the template writes itself is told by rendering the row once more, each text guarded; rows of the same turns
    whose ids show the same control tokens are known from then on.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    _known: set[tuple[object, ...]] = field(default_factory=set)

    def refuse_made(self, document: Document, ids: np.ndarray, again: Callable[[Document], np.ndarray]) -> None:
        """Raises DataError where `ids` hold control tokens that are not the template's own.

        `again` makes the ids of a guarded document.
        """
        found = self.control.among(ids)
        shape = (*((turn.role, len(turn.parts), len(images_of([turn]))) for turn in document.messages), found.tobytes())
        if shape in self._known:
            return
        for index, message in enumerate(document.messages):
            alone = self.control.among(
                np.array(self.tokenizer.encode(_words(message), add_special_tokens=False).ids, np.int32)
            )
            if len(alone):
                raise DataError(
                    f"{document.origin}: {document.name(index)} is tokenised to {self.control.texts[int(alone[0])]}, "
                    f"{_REMEDY}"
                )
        own = self.control.among(again(_guard(document)))
        odd = next((one if one is not None else other for one, other in zip_longest(found, own) if one != other), None)
        if odd is not None:
            raise DataError(
                f"{document.origin}: a text in it and what the chat template writes next to it make "
                f"{self.control.texts[int(odd)]}, "
                "a control token; change how that text begins or ends"
            )
        self._known.add(shape)


def _find_any(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    words = dict.fromkeys(PLACEHOLDERS, False) | {token.content: token.single_word for token in tokens}
    patterns = {
        text: rf"(?<!\w){re.escape(text)}(?!\w)" if single_word else re.escape(text)
        for text, single_word in words.items()
    }
    # The longest first, as the tokenizer matches.
    return re.compile("|".join(patterns[text] for text in sorted(patterns, key=len, reverse=True)))


def _words(message: Message) -> str:
    """The message's text, without the empty thought that an answer may begin with: larger models are prompted by it."""
    text = text_of(message)
    if message.role == "assistant" and (stripped := text.lstrip()).startswith(EMPTY_THOUGHT):
        return stripped.removeprefix(EMPTY_THOUGHT)
    return text


def _guard(document: Document) -> Document:
    def guard(text: str) -> str:
        return f"{_GUARD}{text}{_GUARD}" if text.strip() else text

    return replace(document, messages=tuple(map_text(message, guard) for message in document.messages))
