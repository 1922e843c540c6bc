"""`gemsmith init`: a first recipe for a checkpoint and rows of one's own, each value with the reason for it."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemsmith.arch import Variant, variant_of_hub_id
from gemsmith.checkpoints.folder import open_checkpoint, patching_of
from gemsmith.data.chat_template import find_template
from gemsmith.data.dataset import BadRows, Dataset, describe_columns, read_held_out, read_train
from gemsmith.data.documents import Document
from gemsmith.data.forms import FORMS, guess_columns
from gemsmith.data.image_folder import FORMAT, SUFFIXES, find_label_file
from gemsmith.data.images import validate_images
from gemsmith.data.packing import assign_rows
from gemsmith.data.reader import stored_rows
from gemsmith.data.workers import render_in_processes
from gemsmith.errors import CheckpointError, DataError, InputError
from gemsmith.images.check import ImageInfo
from gemsmith.images.patches import BUDGETS, count_soft_tokens
from gemsmith.plan.counts import BYTES_PER_TOKEN
from gemsmith.recipe.backends import OTHER_QUERY_BLOCK
from gemsmith.recipe.keys import value_at
from gemsmith.recipe.load import build_recipe, dump_recipe
from gemsmith.recipe.schema import Data, Recipe, ResolvedValue, eval_tasks
from gemsmith.runs.resolve import check_settings, place_recipe, resolve
from gemsmith.system.files import expanduser, write_text
from gemsmith.system.json import parse_json
from gemsmith.tasks.messages import images_of, text_of

_SAMPLE, _WITH_IMAGES, _LONGEST = 2000, 200, 50
"""Documents that are rendered: evenly spread ones, fewer of them with images, and the longest by their letters."""
_TEMPLATE_TOKENS = 24  # of a document, beside its texts; assumed where there is no tokenizer here
_LONG = 4096  # tokens of max_length from which on the longest rows no longer decide
_FEWEST_ROWS = 100  # with fewer none is held out: there might be none in a share of them
_UPDATES, _EPOCHS = 100, 3  # at least so many updates, where so many epochs at most make them
_ENOUGH_FILLED = 0.8  # of packed rows, from which on longer ones gain little
_LABELS = 100  # different answers, at most, that are taken for a classifier's
_HEADING = """\
# Drafted by gemsmith init: change what you like. A key that is not here has its default; gemsmith schema prints all.
#   gemsmith plan {out}    what fits, how long it takes, what it costs
#   gemsmith run {out}     every stage
"""


class OpenBase(NamedTuple):
    """The checkpoint as far as it could be looked at; without a folder, `why` no file of it was read."""

    variant: Variant
    folder: Path | None
    why: str = ""

    def __str__(self) -> str:
        how = "told by its hub id, as no file of it could be read" if self.folder is None else "by its config.json"
        sees = "takes images" if self.variant.vision else "takes text alone"
        return f"{self.variant.name}, {how}; reads {self.variant.context:,} tokens, {sees}"


class Measured(NamedTuple):
    """What the rows come to."""

    documents: Sequence[Document]
    lengths: np.ndarray  # tokens of evenly spread documents
    longest: int
    answer: int  # tokens of the longest answer
    image_tokens: int
    pixels: int = 0  # of the largest image; 0 where none was looked at


def write_draft(
    checkpoint: str, data: str, evaluated: str | None, out: Path, overrides: Sequence[str] = ()
) -> tuple[str, ...]:
    """Writes the recipe; returns what a reader must know. Raises InputError, and writes nothing, for bad arguments."""
    if out.exists():
        raise InputError(f"--out {out}: already exists; name another file, or delete it")
    if evaluated is not None and expanduser(evaluated) == expanduser(data):
        raise InputError(
            f"--eval {evaluated}: is --data itself, on which a score says nothing; name other rows, or none"
        )
    base = _open_base(checkpoint)
    start = {"checkpoint": checkpoint, "data.train": data}
    reasons = [ResolvedValue("checkpoint", checkpoint, str(base))]
    if evaluated is not None:
        start["data.eval"] = evaluated
    if not expanduser(checkpoint).is_dir() and not variant_of_hub_id(checkpoint):
        start["model"] = base.variant.name
        reasons.append(ResolvedValue("model", base.variant.name, "what the checkpoint's config.json describes"))
    folder = expanduser(data)
    by_class = (file for file in folder.glob("*/*") if file.suffix.lower() in SUFFIXES)
    if folder.is_dir() and (find_label_file(data) is not None or any(by_class)):
        start |= {"data.format": FORMAT, "data.prompt": "Which of these is it: {labels}?"}
        reasons.append(ResolvedValue("data.prompt", "", "the text after each image; {labels} becomes all answers"))
    recipe = build_recipe({}, [*(f"{key}={json.dumps(value)}" for key, value in start.items()), *overrides])
    guessed: dict[str, str] = {}
    if not _is_given(recipe, "data.format") and not _is_given(recipe, "data.columns"):
        _, row = next(stored_rows(data, lambda _name: False, on_bad=lambda _error: {}), ("", {}))
        guessed = guess_columns(row if isinstance(row, Mapping) else ())
        recipe = recipe.override({"data.columns": guessed} if guessed else {})
    dataset = read_train(resolve(recipe)[0], keep=None)
    rows = _measure(dataset.documents, recipe, base)
    reasons.append(ResolvedValue("data.train", data, _describe_rows(rows, base)))
    for choose in (_choose_data, _choose_training, _choose_scoring):
        chosen = [one for one in choose(recipe, base.variant, rows) if not _is_given(recipe, one.key)]
        recipe = recipe.override({one.key: one.value for one in chosen})
        reasons += chosen
    resolved, _ = resolve(recipe)
    check_settings(resolved)
    held_out = read_held_out(resolved).documents if eval_tasks(resolved) else []
    if evaluated is not None:
        reasons.append(ResolvedValue("data.eval", evaluated, f"{len(held_out):,} rows, which train must not hold"))
    out.parent.mkdir(parents=True, exist_ok=True)
    text = dump_recipe(place_recipe(recipe, out.parent), reasons, exclude_unset=True)
    write_text(out, _HEADING.format(out=out) + text)
    return tuple(_notices(dataset, base, guessed, scored=bool(held_out)))


def _open_base(source: str) -> OpenBase:
    """The checkpoint; of one that is elsewhere no weights are fetched. Raises CheckpointError."""
    try:
        opened = open_checkpoint(source, weights=False)
    except CheckpointError as error:
        known = variant_of_hub_id(source)
        if known is None or expanduser(source).is_dir():
            raise
        return OpenBase(known, None, str(error))
    return OpenBase(opened.variant, opened.folder)


def _is_given(recipe: Recipe, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    return name in value_at(recipe, parent).model_fields_set


def _measure(documents: Sequence[Document], recipe: Recipe, base: OpenBase) -> Measured:
    """Raises DataError for a row that cannot be rendered, or whose image cannot be used or is not taken."""
    data, counts = recipe.data, [len(images_of(document.messages)) for document in documents]
    if any(counts) and base.variant.vision is None:
        seen = documents[int(np.argmax(counts))]
        raise DataError(f"{seen.origin}: has an image, and checkpoint {recipe.checkpoint} takes text alone")
    sizes = np.array([sum(len(text_of(turn).encode()) for turn in document.messages) for document in documents])
    if base.folder is None:
        lengths = np.ceil(sizes / BYTES_PER_TOKEN + _TEMPLATE_TOKENS + data.image_tokens * np.array(counts)).astype(int)
        answer = max(len(text_of(document.messages[-1]).encode()) for document in documents)
        return Measured(documents, lengths, int(lengths.max()), math.ceil(answer / BYTES_PER_TOKEN), data.image_tokens)
    spread = range(0, len(documents), -(-len(documents) // (_WITH_IMAGES if any(counts) else _SAMPLE)))
    longest = [index for index in np.argsort(sizes)[-_LONGEST:].tolist() if index not in spread]
    sample, image_tokens, pixels = _look_at_images([documents[index] for index in (*spread, *longest)], recipe, base)
    bad, template = BadRows(), find_template(base.folder, data)
    rendered = [*render_in_processes(base.folder, template, sample, 1, on_bad=bad.add)]
    bad.settle(len(sample), data.on_bad_row)
    named = {documents[index].origin for index in spread}
    return Measured(
        documents,
        np.array([len(one.ids) for one in rendered if one.origin in named]),
        max(len(one.ids) for one in rendered),
        max(int(np.count_nonzero(one.trained)) for one in rendered),
        image_tokens,
        pixels,
    )


def _look_at_images(sample: list[Document], recipe: Recipe, base: OpenBase) -> tuple[list[Document], int, int]:
    """The documents with their soft tokens, the least budget that makes no image smaller, the largest's pixels."""
    assert base.folder is not None
    data, patching = recipe.data, patching_of(base.folder, recipe.data.image_tokens)
    dataset = Dataset(documents=sample)
    sample = validate_images(dataset, patching, bad=data.on_bad_image, key="data.train").documents
    pixels = max((image.width * image.height for one in sample for image in one.images), default=0)
    if not pixels or _is_given(recipe, "data.image_tokens"):
        return sample, data.image_tokens, pixels
    enough = [budget for budget in BUDGETS if budget * (patching.patch * patching.pooling) ** 2 >= pixels]
    patching = replace(patching, budget=min([data.image_tokens, *enough]))

    def fitted(image: ImageInfo) -> ImageInfo:
        return replace(image, soft_tokens=count_soft_tokens(image.width, image.height, patching))

    sample = [replace(one, images=tuple(map(fitted, one.images))) for one in sample]
    return sample, patching.budget, pixels


def _describe_rows(rows: Measured, base: OpenBase) -> str:
    middle, most = np.percentile(rows.lengths, [50, 99], method="inverted_cdf")
    how = f"estimated at {BYTES_PER_TOKEN} bytes each" if base.folder is None else "by the checkpoint's tokenizer"
    images = sum(len(images_of(document.messages)) for document in rows.documents)
    count = f"{len(rows.documents):,} rows{f' with {images:,} images' if images else ''}"
    return f"{count}; tokens ({how}): p50 {middle:,}, p99 {most:,}, longest {rows.longest:,}"


def _choose_data(recipe: Recipe, variant: Variant, rows: Measured) -> Iterator[ResolvedValue]:
    names = {name.partition("[")[0] for name in rows.documents[0].names}
    form = next(name for name, form in FORMS.items() if {*form.needed} <= names)
    if recipe.data.format == FORMAT:
        form = FORMAT
    told = "a folder of images by class" if form == FORMAT else f"the columns {' and '.join(FORMS[form].needed)}"
    yield ResolvedValue("data.format", form, told)
    if form == FORMAT or (len(rows.documents) >= _FEWEST_ROWS and FORMS[form].asks):
        share = "5%" if len(rows.documents) > 4 * _FEWEST_ROWS else "10%"
        yield ResolvedValue("data.eval", share, "of data.train, drawn by a hash of each row; or name other rows")
    if rows.pixels:
        why = f"the least that holds the largest image of {rows.pixels:,} pixels, at most {rows.image_tokens}"
        if rows.image_tokens == Data.model_fields["image_tokens"].default:
            why = "the default; small print may need 560 or 1120, which take memory and time"
        yield ResolvedValue("data.image_tokens", rows.image_tokens, why)
    yield _choose_length(variant, rows, packing=recipe.data.packing)
    yield ResolvedValue("data.packing", True, "short documents share a row, which costs as much as a full one")


def _choose_length(variant: Variant, rows: Measured, *, packing: bool) -> ResolvedValue:
    """The longest document in whole blocks, of long ones what holds 99 in 100; more where that packs better."""
    p99 = int(np.percentile(rows.lengths, 99, method="inverted_cdf"))
    whole, most = (-(-tokens // OTHER_QUERY_BLOCK) * OTHER_QUERY_BLOCK for tokens in (rows.longest, p99))
    length = least = min(variant.context, whole if whole <= _LONG else max(_LONG, most))
    while packing and 2 * length <= min(variant.context, _LONG) and _filled(rows, length) < _ENOUGH_FILLED:
        if _filled(rows, 2 * length) <= _filled(rows, length):
            break
        length *= 2
    why = f"the longest row in whole {OTHER_QUERY_BLOCK}s, attention's blocks"
    if length > least:
        why += f"; {least} would be {_filled(rows, least):.0%} full, this is {_filled(rows, length):.0%}"
    if length < rows.longest:
        share = np.mean(rows.lengths > length)
        why = f"{share:.1%} of the rows, up to {rows.longest:,} tokens, are longer: dropped, and counted; or raise it"
    return ResolvedValue("data.max_length", length, why)


def _filled(rows: Measured, length: int) -> float:
    """The share of packed rows of so many tokens that documents fill."""
    kept = rows.lengths[rows.lengths <= length].tolist()
    return sum(kept) / (length * len(assign_rows(kept, length))) if kept else 0.0


def _choose_training(recipe: Recipe, _variant: Variant, rows: Measured) -> Iterator[ResolvedValue]:
    if recipe.train.method == "lora":
        yield ResolvedValue("lora.rank", recipe.lora.rank, "the default; a lower one takes less memory and learns less")
    rate = resolve(recipe)[0].optimizer.learning_rate
    yield ResolvedValue("optimizer.learning_rate", rate, "the default; lower it where the loss jumps")
    length, batch = recipe.data.max_length, recipe.train.global_batch_size
    kept = rows.lengths[rows.lengths <= length]
    documents = len(rows.documents) * len(kept) / len(rows.lengths)
    if not len(kept):
        raise DataError(f"data.train: each row has more tokens than data.max_length, {length}; raise it")
    in_rows = documents * kept.mean() / length / _filled(rows, length) if recipe.data.packing else documents
    packed = max(1, round(in_rows))
    # A step needs as many rows as its batch has, also once some are held out.
    while batch > 1 and (batch > 0.8 * packed or (batch > 2 and _EPOCHS * packed < _UPDATES * batch)):
        batch //= 2
    epochs = recipe.train.epochs if _is_given(recipe, "train.epochs") else min(_EPOCHS, -(-_UPDATES * batch // packed))
    steps = max(1, epochs * packed // batch)
    yield ResolvedValue("train.epochs", epochs, f"about {steps:,} updates, of {packed:,} rows of max_length")
    why = "the default" if batch == recipe.train.global_batch_size else "less than the default: the rows are few"
    yield ResolvedValue("train.global_batch_size", batch, f"{why}; rows of max_length in one update")
    yield ResolvedValue("train.save_steps", min(100, max(1, steps // 5)), "so many updates a stopped run may lose")


def _choose_scoring(recipe: Recipe, variant: Variant, rows: Measured) -> Iterator[ResolvedValue]:
    scored = recipe.data.eval is not None
    if scored:
        answers = [text_of(document.messages[-1]) for document in rows.documents]
        different = len({*answers})
        scorer, why = "exact", "right is what equals the row's answer; or a Python file of your own"
        if any(document.messages[-1].tool_calls for document in rows.documents):
            why = "right is what equals the row's answer, a call as the model writes it"
        elif recipe.data.format == FORMAT or (different <= _LABELS and 5 * different <= len(answers)):
            scorer, why = "labels", f"the answers are {different} different texts"
        else:
            with contextlib.suppress(ValueError):
                if all(isinstance(parse_json(answer), dict) for answer in answers):
                    scorer, why = "json-fields", "the answers are JSON objects"
        yield ResolvedValue("eval.scorer", scorer, why)
        most = min(-(-rows.answer // 64) * 64, variant.context // 2)
        yield ResolvedValue("eval.max_tokens", most, f"the longest answer has {rows.answer:,}")
    if scored and any(images_of(document.messages) for document in rows.documents):
        yield ResolvedValue("bench.images", True, "requests are held-out rows with their images")
    else:
        yield ResolvedValue("bench.grid", "short", "six loads in minutes; own and paper measure more")
    machines = recipe.hardware.machines
    yield ResolvedValue("hardware.machines", machines, "what is planned for; gemsmith machines lists others")


def _notices(dataset: Dataset, base: OpenBase, guessed: Mapping[str, str], *, scored: bool) -> Iterator[str]:
    yield from dataset.warnings
    if guessed:
        pairs = ", ".join(f"{theirs!r} as {ours}" for ours, theirs in guessed.items())
        yield f"data.columns: reads {pairs}, by their names alone; see with gemsmith data --show 1 that it is so"
    if base.why:
        yield f"lengths are estimated, since no tokenizer is here: {base.why}"
    if dataset.ignored_columns:
        yield f"data.train: the columns {describe_columns(dataset.ignored_columns)} are ignored"
    if not scored:
        yield "nothing will be scored: the rows are raw text or few; name others with --eval"
