"""How many steps a recipe takes and how many images its rows have room for, as far as that can be told, and how."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gemsmith.arch import Variant
from gemsmith.hardware.model import ImageWork, images_of
from gemsmith.recipe.backends import bucket_of
from gemsmith.recipe.load import with_values
from gemsmith.recipe.schema import GeneratedData, Recipe
from gemsmith.runs.records import DataRecord
from gemsmith.system.files import expanduser, regular_file
from gemsmith.system.json import parse_json
from gemsmith.tasks import find_generator, is_task_file

PRICED_STEPS = 1000  # what hours and dollars are for where the number of steps cannot be told
BYTES_PER_TOKEN = 3.5
"""Of a JSONL file of text and code, its keys and quotes counted; assumed where there is no tokenizer here."""
FILLED_SHARE = 0.95  # of the positions of packed rows; assumed
SAMPLE_BYTES, SAMPLE_ROWS = 1 << 22, 300
"""Of a file, that its documents are counted by; and of it or of made rows, that the tokenizer sees."""
StepCount = tuple[int | None, str]
_COLUMNS = ("image", "images")
_TEXT_TOKENS = 40  # of a row of a folder of images, beside its image: the template's, the prompt and the class; assumed


def count_steps(recipe: Recipe, data: DataRecord | None = None) -> StepCount:
    """The steps of the whole run or None, and why: by the recipe, the data stage's record, or estimated by the rows."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps, f"{recipe.train.max_steps:,} steps: train.max_steps says so."
    if data is not None:
        return data.steps, f"{data.steps:,} steps: counted by the data stage from {data.packed_rows:,} rows of tokens."
    source = recipe.data.train
    if isinstance(source, GeneratedData):
        return _from_made(recipe, source)
    path = expanduser(source) if isinstance(source, str) else None
    if path is None or path.suffix != ".jsonl" or "://" in str(source):
        return _unknown(f"the rows of data.train {', '.join(recipe.data.sources)} are counted by the data stage")
    try:
        return _from_jsonl(recipe, path)
    except OSError:
        return _unknown(f"data.train {source} is not there yet, or no file that can be read")


def count_evaluations(recipe: Recipe, data: DataRecord | None, steps: int) -> tuple[int, int | None]:
    """Evaluations in so many steps, and the batches of each; None where the rows of data.eval cannot be told."""
    if not recipe.train.eval_steps:
        return 0, 0
    if data is not None and data.eval_rows is not None:
        batches: int | None = math.ceil(data.eval_rows.packed_rows / recipe.train.global_batch_size)
    else:  # as many as one epoch of these rows would have steps
        held_out = 1 - recipe.data.held_out if recipe.data.held_out else 0.0
        rows = {"data.train": recipe.data.eval, "data.held_out": held_out, "data.limit": None}
        values = rows | {"train.max_steps": None, "train.epochs": 1}
        batches, _ = count_steps(with_values(recipe, values.items()))
    return math.ceil(steps / recipe.train.eval_steps), batches


def count_real_tokens(recipe: Recipe, data: DataRecord | None = None) -> tuple[float | None, str]:
    """The tokens of a step that are no padding or None, and why: by the data stage's record, or assumed if packed."""
    positions = recipe.train.global_batch_size * recipe.data.max_length
    if data is not None:
        share, how = data.packing_efficiency, "counted by the data stage"
    elif recipe.data.packing:
        share, how = FILLED_SHARE, "assumed"
    else:
        return None, "How much of a row is padding is known after the data stage: no dollars per token."
    real = positions * share
    return real, f"{real:,.0f} real tokens a step: {100 * share:.0f} % of its {positions:,} positions, {how}."


def _from_made(recipe: Recipe, made: GeneratedData) -> StepCount:
    how = f"{made.rows:,} rows to make, one document each"
    if not recipe.data.packing:
        return _from_rows(recipe, made.rows, how)
    if is_task_file(made.task):
        return _unknown(f"the rows that {made.task} makes are counted by the data stage")
    rows = find_generator(made.task).generate_rows(min(made.rows, SAMPLE_ROWS), made.split, recipe.seed)
    lines = [json.dumps(row).encode() for row in rows]
    return _packed(recipe, lines, sum(map(len, lines)) / len(lines) * made.rows, made.rows, how)


def _from_jsonl(recipe: Recipe, path: Path) -> StepCount:
    size = path.stat().st_size
    with regular_file(path).open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = [line for line in sample.splitlines() if line.strip()]
    documents = len(lines)
    if not documents:
        return _unknown(f"data.train {path} is empty")
    how = f"{path.name} has {documents:,} documents"
    if size > len(sample):
        documents, judged = round(documents * size / len(sample)), f"its first {SAMPLE_BYTES >> 20} MiB of {size >> 20}"
        how = f"{path.name} has about {documents:,} documents, judged by {judged}"
    trained = min(round(documents * (1 - recipe.data.held_out)), recipe.data.limit or documents)
    if trained < documents:
        how += f", of which {trained:,} are trained on"
    if not recipe.data.packing:
        return _from_rows(recipe, trained, how)
    return _packed(recipe, lines, size * trained / documents, trained, how)


def _packed(recipe: Recipe, lines: Sequence[bytes], size: float, documents: int, how: str) -> StepCount:
    each, told = BYTES_PER_TOKEN, f"an assumed {BYTES_PER_TOKEN} bytes a token"
    folder = expanduser(recipe.checkpoint)
    if (folder / "tokenizer.json").is_file():
        from gemsmith.data.tokenize import open_tokenizer  # here: planning loads numpy for this alone

        sample = [line.decode(errors="replace") for line in lines[:SAMPLE_ROWS]]
        tokens = sum(len(encoded.ids) for encoded in open_tokenizer(folder).encode_batch(sample))
        each = sum(map(len, lines[:SAMPLE_ROWS])) / max(1, tokens)
        told = f"{each:.2g} bytes a token, as the checkpoint's tokenizer has it,"
    rows = min(documents, max(1, math.ceil(size / each / (recipe.data.max_length * FILLED_SHARE))))
    packed = f"packed into about {rows:,} rows at {told} and {100 * FILLED_SHARE:.0f} % of each row filled"
    return _from_rows(recipe, rows, f"{how}, {packed}")


def _from_rows(recipe: Recipe, rows: int, how: str) -> StepCount:
    steps = math.ceil(recipe.train.epochs * rows / recipe.train.global_batch_size)
    return steps, f"{steps:,} steps, estimated: {how}; no document is counted as too long."


def _unknown(why: str) -> StepCount:
    return None, f"Hours and dollars are for {PRICED_STEPS:,} steps, since the run's own number is not known: {why}."


class ImageCount(NamedTuple):
    """What the rows have room for, None where they are text alone; and sentences that say why."""

    images: ImageWork | None
    reasons: tuple[str, ...] = ()
    in_prompt: int = 0  # those of one document, before documents are packed


def count_images(recipe: Recipe, variant: Variant, data: DataRecord | None = None) -> ImageCount:
    """The images of a row by the data stage's record, else by the recipe and the first rows of its file.

    An image takes the bucket of patches that training would make of `data.image_tokens`.
    """
    if variant.vision is None:
        return ImageCount(None)
    patches = recipe.data.image_tokens * variant.vision.patches_per_token
    if data is not None:
        count, how = data.most_images, "counted by the data stage"
        in_prompt = -(-data.images // max(1, data.rows))
    else:
        in_prompt, how = _in_prompt(recipe)
        count = in_prompt
        if in_prompt:  # those of the fullest row
            if recipe.data.packing:
                count = max(count, recipe.data.max_length // (recipe.data.image_tokens + _TEXT_TOKENS))
            count = max(1, min(count, recipe.data.max_patches // patches))
    if not count:
        return ImageCount(None, () if data is not None or not how else (how,))
    soft_tokens = bucket_of(recipe.data.image_tokens)
    images = images_of(recipe, variant, images=count, soft_tokens=soft_tokens)
    several = "an image" if count == 1 else f"{count:,} images"
    reasons = [
        f"Every row has room for {several} of {soft_tokens:,} soft tokens ({images.patches:,} patches), {how}; what a "
        f"row leaves empty costs as much. They are embedded {'forward and back' if images.adapters else 'forward'}."
    ]
    if variant.bidirectional_images and recipe.train.backend == "tunix":
        reasons.append(
            "Sliding layers see an image's tokens in both directions, which the splash kernel cannot: on TPU they run "
            "as blocks of queries, whose scores go through the chips' memory; the global layers by the kernel."
        )
    return ImageCount(images, tuple(reasons), in_prompt)


def _in_prompt(recipe: Recipe) -> tuple[int, str]:
    """Images of a document before the data stage, and how that is told; 0, and why, for text alone."""
    sources = recipe.data.sources
    if recipe.data.format == "image-folder":
        return 1, f"assumed, with {_TEXT_TOKENS} tokens of text for each"
    if not sources or (seen := _seen(expanduser(sources[0]))) == 0:
        return 0, ""
    if seen is not None:
        return seen, f"as in the first rows of {Path(sources[0]).name}"
    if recipe.bench.images:
        return 1, "assumed: data.train cannot be looked at here, and bench.images says that rows have some"
    return 0, "Rows are taken for text alone: data.train cannot be looked at here; the data stage counts images."


def _seen(file: Path) -> int | None:
    """The most images of one of the first rows of a JSONL file; None where it cannot be read here."""
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        sample = lines.read(SAMPLE_BYTES).rpartition(b"\n")[0].splitlines()
    most = 0
    for line in sample:
        try:
            row = parse_json(line.decode())
        except ValueError:  # the data stage says what is wrong with a row
            continue
        if isinstance(row, dict):  # its columns', or its parts', which may only name the places of the others
            columns = [row.get(column) for column in _COLUMNS]
            of_columns = sum(len(value) if isinstance(value, list) else value is not None for value in columns)
            messages = row.get("messages") or []
            contents = [row.get("prompt"), *(one.get("content") for one in messages if isinstance(one, dict))]
            parts = [part for content in contents if isinstance(content, list) for part in content]
            of_parts = sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)
            most = max(most, of_columns, of_parts)
    return most
