"""Texts to ids: the tokenizer's own, word by word, each word encoded once.

Gemma's tokenizer merges a whole text as if it were one word, which is most of what data preparation takes. No token of
its vocabulary goes on from a word into the space before the next, so that each word with its leading spaces comes to
the same ids alone; and most words have been seen before.
"""

import json
import re
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

_SPACE = "▁"
_NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
# Finds no space, since the normalizer has replaced them all.
_PRE_TOKENIZER = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_MOST_WORDS, _LONGEST_WORD = 1 << 18, 64
# New words are encoded so many at once: a call for each takes five times as long.
_AT_ONCE = 256
_PLAIN = re.compile(f" +[^ {_SPACE}]+")


class WordEncoder:
    """A tokenizer that remembers words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}
        # As pairs: two tokens may be spelled alike but for how they write a space.
        vocabulary = [(token.replace(" ", _SPACE), number) for token, number in tokenizer.get_vocab().items()]
        self._joining = _joining_characters(tokenizer, {token for token, _ in vocabulary})
        joining = re.escape("".join(sorted(self._joining)))
        self._words = re.compile(rf" *[^ ]+(?:(?<=[{joining}]) +[^ ]*)*| +" if self._joining else "(?s).+")
        self._begins, self._blank = np.zeros((2, max(number for _, number in vocabulary) + 1), bool)
        self._begins[[number for token, number in vocabulary if token.startswith(_SPACE)]] = True
        self._blank[[number for token, number in vocabulary if not token.strip(_SPACE)]] = True

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, as the tokenizer encodes it without special tokens."""
        cut = [self._words.findall(text) for text in texts]
        new = set().union(*cut) - self._known.keys()
        self._learn(new)
        ids = [np.frombuffer(b"".join(map(self._known.__getitem__, words)), np.int32) for words in cut]
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        for word in new:
            if len(word) > _LONGEST_WORD:
                self._known.pop(word, None)
        return ids

    def _learn(self, new: Iterable[str]) -> None:
        """Encodes the words, those together whose ids can be told apart: where one begins with a space."""
        plain: list[str] = []
        alone: list[str] = []
        for word in new:
            together = self._joining and word[-1] not in self._joining and _PLAIN.fullmatch(word)
            (plain if together else alone).append(word)
        groups = [plain[start : start + _AT_ONCE] for start in range(0, len(plain), _AT_ONCE)]
        groups += [[word] for word in alone]
        encodings = self._tokenizer.encode_batch_fast(["".join(group) for group in groups], add_special_tokens=False)
        for group, encoding in zip(groups, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            begins = self._begins[ids] & ~np.append(False, self._blank[ids[:-1]])
            starts = np.flatnonzero(begins).tolist() if len(group) > 1 else [0]
            for word, start, end in zip(group, starts, [*starts[1:], len(ids)], strict=True):
                self._known[word] = ids[start:end].tobytes()


def _joining_characters(tokenizer: Tokenizer, vocabulary: Set[str]) -> set[str]:
    """The characters after which a token may go on with a space; none where the tokenizer cannot encode words apart."""
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    inside = [token for token in vocabulary if _SPACE in token.lstrip(_SPACE)]
    if not (
        isinstance(model, BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges)
        and model.byte_fallback
        and vocabulary >= {_SPACE, *(f"<0x{byte:02X}>" for byte in range(256))}
        and _settings(tokenizer.normalizer) == _NORMALIZER
        and _settings(tokenizer.pre_tokenizer) in (None, _PRE_TOKENIZER)
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        and not any(token.startswith("<0x") for token in inside)
    ):
        return set()
    return {_SPACE, *(char for token in inside for char, after in pairwise(token) if after == _SPACE)}


def _settings(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())
