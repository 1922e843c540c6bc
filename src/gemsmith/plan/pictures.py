"""How many pictures a row has room for, as far as that can be told before training, and how it was told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gemsmith.execution import bucket_of
from gemsmith.files import expand_home
from gemsmith.plain_json import parse_json
from gemsmith.plan.steps import SAMPLE_BYTES
from gemsmith.recipe import Recipe
from gemsmith.records import DataRecord
from gemsmith.sizing import Pictures, pictures_of
from gemsmith.zoo import Variant

_COLUMNS = ("image", "images")
_TEXT_TOKENS = 40
"""Of a row of a folder of photos, beside its picture: the template's, the prompt and the class; assumed."""


class PictureCount(NamedTuple):
    """What the rows have room for, None where they are text alone; and sentences that say why."""

    pictures: Pictures | None
    reasons: tuple[str, ...] = ()
    in_prompt: int = 0
    """Those of one document, before documents are packed."""


def count_pictures(recipe: Recipe, variant: Variant, data: DataRecord | None = None) -> PictureCount:
    """The pictures of a row by the data stage's record, else by the recipe and the first rows of its file.

    A picture takes the bucket of patches that training would make of `data.image_tokens`.
    """
    if variant.vision is None:
        return PictureCount(None)
    if data is not None:
        most = data.most_pictures or -(
            -data.most_patches // (recipe.data.image_tokens * variant.vision.patches_per_token)
        )
        images, how = (most if data.pictures else 0), "counted by the data stage"
        in_prompt = -(-data.pictures // max(1, data.rows))
    else:
        in_prompt, how = _in_prompt(recipe)
        images = _room(recipe, variant.vision.patches_per_token, in_prompt) if in_prompt else 0
    if not images:
        return PictureCount(None, () if data is not None or not how else (how,))
    soft_tokens = bucket_of(recipe.data.image_tokens)
    pictures = pictures_of(recipe, variant, images=images, soft_tokens=soft_tokens)
    return PictureCount(pictures, _reasons(recipe, variant, pictures, how), in_prompt)


def _in_prompt(recipe: Recipe) -> tuple[int, str]:
    """Pictures of a document before the data stage, and how that is told; 0, and why, for text alone."""
    source = recipe.data.train
    if recipe.data.format == "image-folder":
        return 1, f"assumed, with {_TEXT_TOKENS} tokens of text for each"
    if not isinstance(source, str) or (seen := _seen(expand_home(source))) == 0:
        return 0, ""
    if seen is not None:
        return seen, f"as in the first rows of {Path(source).name}"
    if recipe.bench.pictures:
        return 1, "assumed: data.train cannot be looked at here, and bench.pictures says that rows have some"
    return 0, "Rows are taken for text alone: data.train cannot be looked at here; the data stage counts pictures."


def _room(recipe: Recipe, patches_per_token: int, in_prompt: int) -> int:
    """Pictures of the fullest row."""
    soft_tokens = recipe.data.image_tokens
    if recipe.data.packing:
        in_prompt = max(in_prompt, recipe.data.max_length // (soft_tokens + _TEXT_TOKENS))
    return max(1, min(in_prompt, recipe.data.max_patches // (soft_tokens * patches_per_token)))


def _seen(file: Path) -> int | None:
    """The most pictures of one of the first rows of a JSONL file; None where it cannot be read here."""
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        sample = lines.read(SAMPLE_BYTES).rpartition(b"\n")[0].splitlines()
    return max((_pictures(row) for row in _rows(sample)), default=0)


def _rows(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Those that can be read: what is wrong with others the data stage says."""
    for line in lines:
        try:
            row = parse_json(line.decode())
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _pictures(row: dict[str, Any]) -> int:
    """Those of its columns or of its parts, which may only name the places of the others."""
    columns = [row.get(column) for column in _COLUMNS]
    of_columns = sum(len(value) if isinstance(value, list) else value is not None for value in columns)
    messages = row.get("messages")
    contents = [row.get("prompt"), *(one.get("content") for one in messages or [] if isinstance(one, dict))]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return max(of_columns, sum(isinstance(part, dict) and part.get("type") == "image" for part in parts))


def _reasons(recipe: Recipe, variant: Variant, pictures: Pictures, how: str) -> tuple[str, ...]:
    walked = "forward and back" if pictures.adapters else "forward"
    images = "a picture" if pictures.images == 1 else f"{pictures.images:,} pictures"
    sentences = [
        f"Every row has room for {images} of {pictures.soft_tokens:,} soft tokens ({pictures.patches:,} patches), "
        f"{how}; what a row leaves empty costs as much. They are embedded {walked}."
    ]
    if variant.bidirectional_images and recipe.train.backend == "tunix":
        sentences.append(
            "Sliding layers see a picture's tokens in both directions, which the splash kernel cannot: on TPU they run "
            "as blocks of queries, whose scores go through the chips' memory; the global layers by the kernel."
        )
    return tuple(sentences)
