"""Texts to ids: the tokenizer's own, word by word, each word encoded once.

Gemma's tokenizer merges a whole text as if it were one word, which is most of what data preparation takes. No token of
its vocabulary goes on from a word into the space before the next, so that each word with its leading spaces comes to
the same ids alone; and most words have been seen before.
"""

import json
import re
from collections.abc import Sequence
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


class Encoder:
    """A tokenizer that remembers words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = _word_pattern(tokenizer)
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, as the tokenizer encodes it without special tokens."""
        cut = [self._words.findall(text) if self._words else [text] for text in texts]
        new = list(set().union(*cut) - self._known.keys())
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._known[word] = np.array(encoding.ids, np.int32).tobytes()
        ids = [np.frombuffer(b"".join(map(self._known.__getitem__, words)), np.int32) for words in cut]
        for word in new:
            if len(word) > _LONGEST_WORD:
                del self._known[word]
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        return ids


def _word_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds a text's words, each with the spaces before it; None where the tokenizer does not encode them apart."""
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    vocabulary = tokenizer.get_vocab()
    if not (
        isinstance(model, BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges)
        and model.byte_fallback
        and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        and _settings(tokenizer.normalizer) == _NORMALIZER
        and _settings(tokenizer.pre_tokenizer) in (None, _PRE_TOKENIZER)
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
    ):
        return None
    spelled = (token.replace(" ", _SPACE) for token in vocabulary)
    inside = [token for token in spelled if _SPACE in token.lstrip(_SPACE)]
    if any(token.startswith("<0x") for token in inside):
        return None
    # After these, and after the sign itself, a token may go on with a space.
    before = {_SPACE, *(char for token in inside for char, after in pairwise(token) if after == _SPACE)}
    return re.compile(rf" *[^ ]+(?:(?<=[{re.escape(''.join(sorted(before)))}]) +[^ ]*)*| +")


def _settings(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())
