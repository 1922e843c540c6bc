"""Requests with pictures: held-out rows of the recipe, each asked as it is, one after the other.

Text is random and of an exact length because a prompt's words do not change what it costs; a picture's shape does, and
that of the text beside it. So these are the run's own.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from gemsmith.bench.cells import plan_cells
from gemsmith.bench_records import BenchPictures
from gemsmith.checkpoint import read_config
from gemsmith.checkpoint.fetch import fetch_folder
from gemsmith.data.documents import Document
from gemsmith.data.pictures import look_at_pictures
from gemsmith.data.rows import read_held_out
from gemsmith.data.template import find_template
from gemsmith.data.workers import check_prompts_in_process
from gemsmith.errors import DataError
from gemsmith.messages import images_of, text_of
from gemsmith.pictures.patches import Patching, read_patching
from gemsmith.recipe import Recipe
from gemsmith.serve.messages import api_messages


@dataclass(frozen=True, kw_only=True)
class PictureRows:
    """Rows that requests are made of, in an order that says nothing of their classes."""

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]
    """Tokens of each prompt as training renders it, soft tokens counted."""
    patching: Patching

    @property
    def mean_tokens(self) -> int:
        """Of a prompt."""
        return round(sum(self.lengths) / len(self.lengths))

    @property
    def sha256(self) -> str:
        """Of what the prompts say and show."""
        asked = [(text_of(row.messages[0]), *(picture.sha256 for picture in row.pictures)) for row in self.documents]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    def describe(self, *, encoder_cache: bool | None) -> BenchPictures:
        """What a record says of them."""
        rows = len(self.documents)
        pictures = [picture for row in self.documents for picture in row.pictures]
        soft_tokens = sum(picture.soft_tokens for picture in pictures)
        return BenchPictures(
            rows=rows,
            distinct=len({picture.sha256 for picture in pictures}),
            pictures_per_request=round(len(pictures) / rows, 2),
            soft_tokens=round(soft_tokens / rows, 2),
            text_tokens=round((sum(self.lengths) - soft_tokens) / rows, 2),
            sha256=self.sha256,
            encoder_cache=encoder_cache,
        )

    def write_requests(self, file: Path, *, requests: int, seed: int) -> None:
        """The requests of a cell, as vLLM's `custom_image` dataset has them: no row comes twice before all have come.

        The pixels are those that training saw (gemsmith.pictures.sent).
        """
        order = list(range(len(self.documents)))
        random.Random(seed).shuffle(order)
        with file.open("w", encoding="utf-8") as lines:
            for number in islice(cycle(order), requests):
                lines.write(json.dumps({"content": self._content(self.documents[number])}) + "\n")

    def _content(self, row: Document) -> Any:
        (message,) = api_messages(row.messages[:1], row.pictures, self.patching)
        return message["content"]


def read_picture_rows(recipe: Recipe, *, most: int) -> PictureRows:
    """Up to `most` rows of data.eval, drawn by the recipe's seed, with their pictures looked at.

    Raises DataError for a row that is no question with a picture, or one whose prompt is longer than data.max_length.
    """
    documents = read_held_out(recipe).documents
    order = list(range(len(documents)))
    random.Random(recipe.seed).shuffle(order)
    chosen = [documents[number] for number in sorted(order[:most])]
    for document in chosen:
        _check(document)
    folder = fetch_folder(recipe.checkpoint)
    patching = read_patching(read_config(folder), recipe.data.image_tokens)
    seen = look_at_pictures(chosen, patching, bad="error", key="data.eval").documents
    template = find_template(folder, recipe.data.template)
    prompts = check_prompts_in_process(folder, template, [(document, 1) for document in seen])
    lengths = tuple(len(ids) for ids in prompts)
    _refuse_too_long(seen, lengths, recipe.data.max_length)
    return PictureRows(documents=tuple(seen), lengths=lengths, patching=patching)


def most_requests(recipe: Recipe) -> int:
    """What the largest cell of the recipe's grid sends, warm-up counted."""
    return max(ask.requests for ask in plan_cells(recipe.bench, recipe.seed))


def _check(document: Document) -> None:
    """Raises DataError for what vLLM's client cannot send, or what would be no request with a picture."""
    roles = [message.role for message in document.messages]
    if roles[:2] != ["user", "assistant"] or len(roles) > 2:
        raise DataError(
            f"data.eval, {document.origin}: has turns {', '.join(roles)}; bench.pictures sends rows of one question of "
            "the user and its answer; take such rows out, or set bench.pictures to false"
        )
    if not images_of(document.messages[:1]):
        raise DataError(
            f"data.eval, {document.origin}: has no picture, and bench.pictures needs one in every row; take such rows "
            "out, or set bench.pictures to false"
        )


def _refuse_too_long(documents: Sequence[Document], lengths: Sequence[int], most: int) -> None:
    for document, length in zip(documents, lengths, strict=True):
        if length > most:
            raise DataError(
                f"data.eval, {document.origin}: its prompt has {length} tokens, more than data.max_length, {most}; "
                "take the row out, or raise data.max_length"
            )
