"""How many optimizer steps a recipe takes, as far as that can be told, and how it was told."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gemsmith.files import expand_home, regular_file
from gemsmith.recipe import Made, Recipe
from gemsmith.records import DataRecord
from gemsmith.tasks import find_row_maker, is_task_file

PRICED_STEPS = 1000
"""What hours and dollars are for where the number of steps cannot be told."""
BYTES_PER_TOKEN = 3.5
"""Of a JSONL file of text and code, its keys and quotes counted; assumed where there is no tokenizer here."""
FILLED_SHARE = 0.95
"""Of the positions of packed rows; assumed."""
SAMPLE_BYTES, SAMPLE_ROWS = 1 << 22, 300
"""Of a file, that its documents are counted by; and of it or of made rows, that the tokenizer sees."""


class StepCount(NamedTuple):
    """The steps of the whole run, or None, and a sentence that says why."""

    steps: int | None
    reason: str


def count_steps(recipe: Recipe, data: DataRecord | None = None) -> StepCount:
    """Steps from the recipe, else from the data stage's record, else estimated from the rows."""
    if recipe.train.optimizer_steps is not None:
        return StepCount(
            recipe.train.optimizer_steps, f"{recipe.train.optimizer_steps:,} steps: train.optimizer_steps says so."
        )
    if data is not None:
        return StepCount(
            data.steps, f"{data.steps:,} steps: counted by the data stage from {data.packed_rows:,} rows of tokens."
        )
    source = recipe.data.train
    return _from_made(recipe, source) if isinstance(source, Made) else _from_file(recipe, source)


class RealTokens(NamedTuple):
    """The tokens of a step that are no padding, or None, and a sentence that says why."""

    per_step: float | None
    reason: str


def count_real_tokens(recipe: Recipe, data: DataRecord | None = None) -> RealTokens:
    """Real tokens from the data stage's record, else estimated where rows are packed."""
    positions = recipe.train.rows_per_step * recipe.data.max_length
    if data is not None:
        share, how = data.packing_efficiency, "counted by the data stage"
    elif recipe.data.packing:
        share, how = FILLED_SHARE, "assumed"
    else:
        return RealTokens(None, "How much of a row is padding is known after the data stage: no dollars per token.")
    return RealTokens(
        positions * share,
        f"{positions * share:,.0f} real tokens a step: {100 * share:.0f} % of its {positions:,} positions, {how}.",
    )


def _from_made(recipe: Recipe, made: Made) -> StepCount:
    how = f"{made.rows:,} rows to make, one document each"
    if not recipe.data.packing:
        return _from_rows(recipe, made.rows, how)
    if is_task_file(made.task):
        return _unknown(f"the rows that {made.task} makes are counted by the data stage")
    rows = find_row_maker(made.task).make_rows(min(made.rows, SAMPLE_ROWS), made.split, recipe.seed)
    lines = [json.dumps(row).encode() for row in rows]
    return _packed(recipe, lines, sum(map(len, lines)) / len(lines) * made.rows, made.rows, how)


def _from_file(recipe: Recipe, source: str) -> StepCount:
    path = expand_home(source)
    if path.suffix != ".jsonl":
        return _unknown(f"the rows of data.train {source} are counted by the data stage")
    try:
        return _from_jsonl(recipe, path)
    except OSError:
        return _unknown(f"data.train {source} is not there yet, or no file that can be read")


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
        documents = round(documents * size / len(sample))
        how = (
            f"{path.name} has about {documents:,} documents, judged by its first {SAMPLE_BYTES >> 20} MiB of "
            f"{size >> 20}"
        )
    if not recipe.data.packing:
        return _from_rows(recipe, documents, how)
    return _packed(recipe, lines, size, documents, how)


def _packed(recipe: Recipe, lines: Sequence[bytes], size: float, documents: int, how: str) -> StepCount:
    each, told = BYTES_PER_TOKEN, f"an assumed {BYTES_PER_TOKEN} bytes a token"
    folder = expand_home(recipe.checkpoint)
    if (folder / "tokenizer.json").is_file():
        from gemsmith.data.render import open_tokenizer  # here: planning loads numpy for this alone

        sample = [line.decode(errors="replace") for line in lines[:SAMPLE_ROWS]]
        tokens = sum(len(encoded.ids) for encoded in open_tokenizer(folder).encode_batch(sample))
        each = sum(map(len, lines[:SAMPLE_ROWS])) / max(1, tokens)
        told = f"{each:.2g} bytes a token, as the checkpoint's tokenizer has it,"
    rows = min(documents, max(1, math.ceil(size / each / (recipe.data.max_length * FILLED_SHARE))))
    packed = f"packed into about {rows:,} rows at {told} and {100 * FILLED_SHARE:.0f} % of each row filled"
    return _from_rows(recipe, rows, f"{how}, {packed}")


def _from_rows(recipe: Recipe, rows: int, how: str) -> StepCount:
    steps = math.ceil(recipe.train.epochs * rows / recipe.train.rows_per_step)
    return StepCount(steps, f"{steps:,} steps, estimated: {how}; no document is counted as too long.")


def _unknown(why: str) -> StepCount:
    return StepCount(
        None, f"Hours and dollars are for {PRICED_STEPS:,} steps, since the run's own number is not known: {why}."
    )
