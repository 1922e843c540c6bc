"""What the models that verify compares are asked: documents that were trained on; random tokens where there are none.

An image in a prompt is one that was trained on, or has the shape of one and random values where its file is not here.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from gemsmith.arch.tensors import PREFIX
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.peft import Adapter
from gemsmith.data.batches import open_rows
from gemsmith.data.packing import Rows
from gemsmith.errors import DataError
from gemsmith.images.check import patchify
from gemsmith.images.patches import PatchConfig, Patches, fitted_size, read_patching, scale
from gemsmith.runs.run import Run

PROMPTS = 3
PROMPT_TOKENS = 128
# At most, where they are short: their loss is taken over more targets.
_DOCUMENTS = 8
# Of an image among random tokens: the tokens before and after it, and the soft tokens of its sides.
_AROUND, _SIDE = 32, 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Tokens (L,), and where some are an image's soft tokens, that image and the id that stands in their places.

    `targets` (L,): 1 where the token was a target of training; None where that is not known, or the image another.
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None
    image: Patches | None = None
    image_token: int | None = None


def make_prompts(
    base: Checkpoint, rows: Rows | None, adapter: Adapter, *, image_tokens: int = PatchConfig.budget, seed: int = 0
) -> list[Prompt]:
    """Prompts of text, and one with an image where rows have some, or the adapter lies on what embeds them."""
    found = text_prompts(rows, base.variant.vocabulary, seed)
    if (rows is not None and rows.images) or any(not module.startswith(PREFIX) for module in adapter.modules):
        found.append(image_prompt(base, rows, image_tokens, seed))
    return found


def text_prompts(rows: Rows | None, vocabulary: int, seed: int) -> list[Prompt]:
    """The first documents without images that were trained on, around their targets; random tokens without such."""
    found: list[Prompt] = []
    for document in () if rows is None else islice(_documents(rows), _DOCUMENTS):
        if sum(len(prompt.tokens) for prompt in (*found, document)) <= PROMPTS * PROMPT_TOKENS:
            found.append(document)
    if found:
        return found
    random = np.random.default_rng(seed)
    return [Prompt(tokens=_random_tokens(random, vocabulary, 48)) for _ in range(PROMPTS)]


def image_prompt(base: Checkpoint, rows: Rows | None, image_tokens: int, seed: int) -> Prompt:
    """A prompt with an image: what is around the first that was trained on, or random tokens where there is none."""
    config, random = base.config, np.random.default_rng(seed)
    patching, image_token = read_patching(config, image_tokens), int(config["image_token_id"])
    row = next((row for row, images in enumerate(rows.images) if images), None) if rows else None
    if rows is None or row is None:
        before, after = (_random_tokens(random, base.variant.vocabulary, _AROUND) for _ in range(2))
        soft_tokens = [config["boi_token_id"], *[image_token] * _SIDE**2, config["eoi_token_id"]]
        tokens, sides = np.concatenate([before, soft_tokens, after]).astype(np.int64), (_SIDE, _SIDE)
    else:
        trained = rows.images[row][0]
        wide, tall = fitted_size(trained.width, trained.height, patching)
        side = patching.patch * patching.pooling
        tokens, places = _around_the_first(np.asarray(rows.tokens[row]), rows, row, image_token)
        sides = wide // side, tall // side
        with contextlib.suppress(DataError):
            real, targets = scale(patchify(trained, patching), patching), np.asarray(rows.loss_mask[row])[places]
            return Prompt(tokens=tokens, targets=targets, image=real, image_token=image_token)
    columns, lines = (side if patching.merged else side * patching.pooling for side in sides)
    y, x = np.divmod(np.arange(columns * lines, dtype=np.int32), np.int32(columns))
    values = random.random((len(x), patching.dimension), np.float32)
    image = Patches(values=values, positions=np.stack([x, y], axis=1), soft_tokens=math.prod(sides))
    return Prompt(tokens=tokens, image=image, image_token=image_token)


def trained_rows(run: Run) -> Rows | None:
    """The run's packed rows; None where it has none. Raises RunError where they are damaged."""
    return open_rows(run) if run.data.is_dir() else None


def _documents(rows: Rows) -> Iterator[Prompt]:
    """Those of the first rows that have no images: the first token, which models need, and what is around targets."""
    without = (row for row in range(len(rows)) if not (rows.images and rows.images[row]))
    for row in islice(without, _DOCUMENTS):
        for places in rows.documents(row):
            first = places.start + int(np.argmax(rows.loss_mask[row][places]))
            begin = max(places.start + 1, first - PROMPT_TOKENS // 2)
            chosen = [places.start, *range(begin, min(places.stop, begin + PROMPT_TOKENS - 1))]
            yield Prompt(tokens=rows.tokens[row][chosen].astype(np.int64), targets=rows.loss_mask[row][chosen])


def _around_the_first(tokens: np.ndarray, rows: Rows, row: int, image_token: int) -> tuple[np.ndarray, slice]:
    """The document's tokens around its first image, up to the next, and their places."""
    begin = int(np.flatnonzero(tokens == image_token)[0])
    document = next(places for places in rows.documents(row) if places.start <= begin < places.stop)
    end = begin + rows.images[row][0].soft_tokens
    later = np.flatnonzero(tokens[end : document.stop] == image_token)
    # What stands before an image is its own, too.
    last = end + int(later[0]) - 1 if len(later) else document.stop
    places = slice(max(document.start, begin - PROMPT_TOKENS), min(last, end + PROMPT_TOKENS))
    return tokens[places].astype(np.int64), places


def _random_tokens(random: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    # Ids above stand for images and sounds in Gemma 4's vocabulary; those below 108 are its special tokens.
    return random.integers(108, min(vocabulary, 250_000), count)
