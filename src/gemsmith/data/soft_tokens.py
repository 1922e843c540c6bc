r"""Soft tokens in a document's ids: each placeholder that the chat template wrote becomes those of its picture.

<|turn> user \n <|image|> what ?          →  <|turn> user \n <|image> <|image|> … <|image|> <image|> what ?
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gemsmith.errors import CheckpointError

_KEYS = ("image_token_id", "boi_token_id", "eoi_token_id")


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Ids: of a soft token's place, and of what stands before and after a picture's."""

    image: int
    begin: int
    end: int


def read_image_tokens(folder: Path, tokenizer: Tokenizer) -> ImageTokens:
    """The ids in the checkpoint's config.json, which the processor and the model use.

    Raises CheckpointError where one is missing, or is no added token of the tokenizer.
    """
    from gemsmith.checkpoint.folder import read_config

    config, ids = read_config(folder), []
    for key in _KEYS:
        number = config.get(key)
        if not isinstance(number, int):
            raise CheckpointError(f"checkpoint {folder}: its config.json has no {key}, which rows with pictures need")
        # Not one that a text may come to, such as a letter's.
        token = tokenizer.get_added_tokens_decoder().get(number)
        if token is None or tokenizer.encode(token.content, add_special_tokens=False).ids != [number]:
            raise CheckpointError(
                f"checkpoint {folder}: {key} of its config.json, {number}, is no added token of tokenizer.json; "
                "give the tokenizer that the weights came with"
            )
        ids.append(number)
    return ImageTokens(image=ids[0], begin=ids[1], end=ids[2])


def place_soft_tokens(ids: np.ndarray, counts: Sequence[int], tokens: ImageTokens) -> tuple[np.ndarray, np.ndarray]:
    """The ids with `counts` soft tokens for each placeholder, and for each of these ids the place it came from.

    image 9, begin 7, end 8, counts [2], ids [5 9 6] → [5 7 9 9 8 6], [0 1 1 1 1 2]
    """
    places = np.flatnonzero(ids == tokens.image)
    lengths = np.ones(len(ids), np.int64)
    lengths[places] = np.asarray(counts, np.int64) + 2
    origin = np.repeat(np.arange(len(ids)), lengths)
    ends = np.cumsum(lengths)[places]
    spread = ids[origin]
    spread[ends - lengths[places]], spread[ends - 1] = tokens.begin, tokens.end
    return spread, origin
