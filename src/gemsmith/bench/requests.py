"""What requests hold: random text of an exact number of tokens, or held-out rows with their images.

vLLM's own `random` prompts drift: they decode random ids, and where a token is half a character, what comes back is
longer (128 asked, 192 sent with a tokenizer of 1,024 tokens; requests over max_model_len then fail). These are made of
tokens that survive the round trip. A prompt's words do not change what it costs; an image's shape does, and that of the
text beside it. So requests with images are the run's own.
"""

import json
import random
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from gemsmith.bench.cell import plan_cells
from gemsmith.checkpoints.folder import fetch_folder, patching_of
from gemsmith.data.dataset import Dataset, read_held_out
from gemsmith.data.documents import Document
from gemsmith.data.images import validate_images
from gemsmith.data.workers import check_prompts_in_process
from gemsmith.errors import CheckpointError, DataError
from gemsmith.images.patches import PatchConfig
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.bench_records import BenchImages
from gemsmith.serve.client.chat import api_messages
from gemsmith.system.files import sha256_json
from gemsmith.tasks.messages import images_of, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

POOL = 1000
TRIES = 20


def make_prompts(folder: Path, *, tokens: int, prompts: int, seed: int) -> list[str]:
    """Random prompts of `tokens` ids each, BOS counted; a few fewer, never more, where neighbors cannot but merge."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"checkpoint {folder}: has no tokenizer.json; copy it from where the weights came from")
    tokenizer, source = Tokenizer.from_file(str(file)), random.Random(seed)
    pool, made = plain_tokens(tokenizer, source), []
    for _ in range(prompts):
        pieces, best = source.choices(pool, k=tokens), ""
        for _ in range(TRIES):
            text = "".join(pieces)
            excess = len(tokenizer.encode(text).ids) - tokens
            if excess <= 0 and len(text) > len(best):
                best = text
            if excess == 0:
                break
            pieces = pieces[: max(0, len(pieces) - excess)] + source.choices(pool, k=max(0, -excess))
        made.append(best)
    return made


def plain_tokens(tokenizer: "Tokenizer", source: random.Random) -> list[str]:
    """Texts of one token, also behind a word: no special tokens, signs that begin one, or halves of characters."""
    bare = len(tokenizer.encode("a").ids)
    added = tokenizer.get_added_tokens_decoder()
    # Neighbors could otherwise spell a special token between them, such as `<` and `eos>`.
    begins = {token.content[0] for token in added.values() if token.special}
    ids = list(range(tokenizer.get_vocab_size()))
    source.shuffle(ids)
    pool: list[str] = []
    for number in ids:
        text = tokenizer.decode([number])
        if number in added or begins & set(text):
            continue
        if text and text.isprintable() and "�" not in text and len(tokenizer.encode(f"a{text}").ids) <= bare + 1:
            pool.append(text)
        if len(pool) == POOL:
            break
    if not pool:
        raise CheckpointError(
            "tokenizer.json: has no token that decodes to printable text, so bench cannot make prompts; is it the "
            "model's own?"
        )
    return pool


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Rows that requests are made of, in an order that says nothing of their classes."""

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]  # tokens of each prompt as training renders it, soft tokens counted
    patching: PatchConfig

    @property
    def sha256(self) -> str:
        """Of what the prompts say and show."""
        return sha256_json([(text_of(row.messages[0]), *(one.sha256 for one in row.images)) for row in self.documents])

    def describe(self, *, encoder_cache: bool | None) -> BenchImages:
        rows = len(self.documents)
        images = [image for row in self.documents for image in row.images]
        soft_tokens = sum(image.soft_tokens for image in images)
        return BenchImages(
            rows=rows,
            distinct=len({image.sha256 for image in images}),
            images_per_request=round(len(images) / rows, 2),
            soft_tokens=round(soft_tokens / rows, 2),
            text_tokens=round((sum(self.lengths) - soft_tokens) / rows, 2),
            sha256=self.sha256,
            encoder_cache=encoder_cache,
        )

    def write_requests(self, file: Path, *, requests: int, seed: int) -> None:
        """The requests of a cell, as vLLM's `custom_image` dataset has them; no row comes twice before all have."""
        order = list(range(len(self.documents)))
        random.Random(seed).shuffle(order)
        with file.open("w", encoding="utf-8") as lines:
            for number in islice(cycle(order), requests):
                row = self.documents[number]
                (message,) = api_messages(row.messages[:1], row.images, self.patching)
                lines.write(json.dumps({"content": message["content"]}) + "\n")


def read_image_rows(recipe: Recipe) -> ImageRows:
    """As many rows of data.eval as the largest cell sends, drawn by the recipe's seed, with their images looked at.

    Raises DataError for a row that is no question with an image, or one whose prompt is longer than data.max_length.
    """
    documents = read_held_out(recipe).documents
    order = list(range(len(documents)))
    random.Random(recipe.seed).shuffle(order)
    most = max(ask.requests for ask in plan_cells(recipe.bench, recipe.seed))  # warm-up counted
    chosen = [documents[number] for number in sorted(order[:most])]
    for document in chosen:
        # What vLLM's client cannot send, or what would be no request with an image.
        roles = [message.role for message in document.messages]
        if roles[:2] != ["user", "assistant"] or len(roles) > 2:
            raise DataError(
                f"data.eval, {document.origin}: has turns {', '.join(roles)}; bench.images sends rows of one question "
                "of the user and its answer; take such rows out, or set bench.images to false"
            )
        if not images_of(document.messages[:1]):
            raise DataError(
                f"data.eval, {document.origin}: has no image, and bench.images needs one in every row; take such rows "
                "out, or set bench.images to false"
            )
    folder = fetch_folder(recipe.checkpoint)
    patching = patching_of(folder, recipe.data.image_tokens)
    seen = validate_images(Dataset(documents=chosen), patching, bad="error", key="data.eval").documents
    lengths = tuple(map(len, check_prompts_in_process(folder, recipe.data, [(document, 1) for document in seen])))
    for document, length in zip(seen, lengths, strict=True):
        if length > recipe.data.max_length:
            raise DataError(
                f"data.eval, {document.origin}: its prompt has {length} tokens, more than data.max_length, "
                f"{recipe.data.max_length}; take the row out, or raise data.max_length"
            )
    return ImageRows(documents=tuple(seen), lengths=lengths, patching=patching)
