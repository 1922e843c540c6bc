"""The data stage: reads, renders, drops what is too long, packs, and writes the arrays and their record."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch import VARIANTS
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.data.batches import EVAL_ROWS, check_batch, count_steps, plan_buckets, rows_sha256, write_rows
from gemsmith.data.chat_template import ChatTemplate, find_template
from gemsmith.data.dataset import BadRows, Dataset, describe_columns, read_eval, read_train, source_sha256
from gemsmith.data.dedup import find_overlap, hash_turns, overlap_notices, write_answers
from gemsmith.data.documents import Document
from gemsmith.data.image_folder import FORMAT
from gemsmith.data.images import validate_images
from gemsmith.data.packing import ARRAYS, assign_rows, drawn_order, pack_rows
from gemsmith.data.tokenize import Rendered, open_tokenizer
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import CheckpointError, DataError, MachineError, RunError
from gemsmith.images.check import ImageInfo
from gemsmith.images.decode import keep_bytes, prune_cache
from gemsmith.images.patches import PatchConfig, read_patching
from gemsmith.recipe.schema import Data, Recipe
from gemsmith.runs.records import DataRecord, EvalRows, ImageBucket
from gemsmith.runs.resolve import check_lengths
from gemsmith.runs.run import Run, make_provenance, read_record, start_clock, write_record
from gemsmith.system.console import open_console, track
from gemsmith.system.files import atomic_replace_dir, sha256_file
from gemsmith.tasks.messages import images_of

_PACKAGES = ("numpy", "tokenizers", "jinja2", "grain", "pillow")
# What makes two records those of the same rows.
_made_from = attrgetter("rows_sha256", "eval_rows", "provenance.inputs_sha256")
# Columns by which some datasets mark rows that are not to be trained on.
_MARKING = ("label", "split")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Rows are many objects that stay, and none of them is a cycle: looking for some takes a third of reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def prepare_data(run: Run) -> DataRecord:
    """The record of the packed rows, which are written to the run's data folder. Raises DataError, CheckpointError."""
    clock, recipe, keep = start_clock(), run.recipe, partial(keep_bytes, run.images)
    dataset = read_train(recipe, keep)  # before the checkpoint, which may first have to be fetched
    checkpoint = open_checkpoint(recipe.checkpoint, variant=VARIANTS.get(recipe.model or ""))
    check_lengths(recipe, checkpoint.variant)
    template = find_template(checkpoint.folder, recipe.data)
    check_tokenizer(checkpoint)
    parts, documents, held_out = _pack(recipe, checkpoint, template, dataset, keep)
    trained, evaluated = parts[""], parts.get(EVAL_ROWS)
    try:
        before = read_record(run, DataRecord)
    except RunError:
        before = None
    files = _write_rows(run, parts)
    prune_cache(run.images, {Path(image.path).name for part in parts.values() for image in part.images})
    origins = {row.origin for row in trained.documents}
    answers = write_answers(run.data, (digest for origin, digest in trained.hashes.items() if origin in origins))
    overlap = find_overlap(answers, held_out, (document for document in documents if document.origin in origins))
    sources = {
        "data.train": source_sha256(recipe.data.train, recipe.data.format),
        "checkpoint": checkpoint.fingerprint(),
        "tokenizer.json": sha256_file(checkpoint.folder / "tokenizer.json"),
        "chat template": template.sha256,
    }
    record = DataRecord(
        provenance=make_provenance(run, "data", clock, packages=_PACKAGES, sources=sources),
        ignored_columns=dict(dataset.ignored_columns),
        sources=dict(dataset.sources),
        template_sha256=template.sha256,
        eval_rows=EvalRows(**evaluated.counts(files[EVAL_ROWS], run.data / EVAL_ROWS)) if evaluated else None,
        warnings=(*trained.warnings, *overlap_notices(overlap), *(evaluated.warnings if evaluated else ())),
        **trained.counts(files[""], run.data),
        **_count(recipe, trained),
        held_out_also_trained=overlap.counts.same_prompt if held_out else None,
        held_out=overlap.counts if held_out else None,
    )
    # The same rows from the same sources: the record stays, and with it what was made from it since.
    if before and _made_from(before) == _made_from(record):
        record = before
    write_record(run, record)
    open_console(soft_wrap=False).print(_summary(record, run), soft_wrap=True)
    return record


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a tokenizer that cannot be read, or has ids that the model has not."""
    highest = max(open_tokenizer(checkpoint.folder).get_vocab().values())
    if highest >= checkpoint.variant.vocabulary:
        what = f"its tokenizer has the id {highest}, its embedding {checkpoint.variant.vocabulary} rows"
        remedy = "give the tokenizer that the weights came with"
        raise CheckpointError(f"checkpoint {checkpoint.source}: {what}; {remedy}")


def count_usable(recipe: Recipe, checkpoint: Checkpoint) -> tuple[int, Mapping[str, int]]:
    """How many rows of data.train would be trained on, and how many would not, by reason; nothing is written.

    Raises what prepare_data does of rows, those of data.eval, too, and DataError where they are too few for one step.
    """
    template = find_template(checkpoint.folder, recipe.data)
    parts, *_ = _pack(recipe, checkpoint, template, read_train(recipe, keep=None), None)
    check_batch(recipe, len(parts[""].rows))
    return len(parts[""].documents), parts[""].dropped


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Documents in packed rows: those that are trained on, or those of data.eval, of which some may be left out."""

    documents: Sequence[Rendered]
    rows: Sequence[Sequence[int]]  # the documents of each packed row
    patches: Sequence[int]  # of each document
    dropped: Mapping[str, int]
    warnings: tuple[str, ...]
    lengths: Sequence[int]  # tokens of all documents that could be rendered, those that were then too long counted
    hashes: Mapping[str, bytes]  # by origin, of all that could be seen, the hashes of their turns

    @cached_property
    def images(self) -> list[ImageInfo]:
        return [image for document in self.documents for image in document.images]

    def counts(self, files: dict[str, str], folder: Path) -> dict[str, Any]:
        """The fields of a record on the part, whose files are in the folder: name -> SHA-256."""
        return {
            "rows": len(self.documents),
            "dropped": dict(self.dropped),
            "packed_rows": len(self.rows),
            "tokens": sum(len(document.ids) for document in self.documents),
            "supervised_tokens": sum(np.count_nonzero(document.trained) for document in self.documents),
            "rows_sha256": rows_sha256(files, folder),
            "files": files,
        }


def _pack(
    recipe: Recipe,
    checkpoint: Checkpoint,
    template: ChatTemplate,
    dataset: Dataset,
    keep: Callable[[bytes], str] | None,
) -> tuple[dict[str, _Part], Sequence[Document], Sequence[Document]]:
    """The rows in parts by their folder, of which "" is trained on; nothing is written.

    With them the documents of data.train that can be seen, and those of data.eval.
    """
    data = recipe.data
    patching = read_patching(checkpoint.config, data.image_tokens)
    held_out = _validate(checkpoint, read_eval(recipe, keep), patching, bad="error", key="data.eval")
    marking = (
        f"data.train: the column {name} ({dataset.ignored_columns[name]:,} rows) is ignored: every row is trained on, "
        f"whatever its {name}"
        for name in _MARKING
        if name in dataset.ignored_columns
    )
    of_eval = (warning for warning in held_out.warnings if warning not in dataset.warnings)
    dataset = replace(dataset, warnings=(*dataset.warnings, *marking, *of_eval))
    dataset = _validate(checkpoint, dataset, patching, bad=data.on_bad_image, key="data.train")
    # A folder of images is read class by class, and one class's documents are of one length: rows of it alone.
    order = partial(drawn_order, seed=recipe.seed) if data.format == FORMAT else None
    parts = {"": _pack_part(data, checkpoint.folder, template, dataset, patching, order=order)}
    if recipe.train.eval_steps is not None:
        part = _pack_eval(data, checkpoint.folder, template, held_out.documents, patching)
        if part.images and not parts[""].images:
            what = "has rows with images, and data.train none, so training could not see them"
            raise DataError(f"data.eval: {what}; take them out, or leave train.eval_steps out")
        parts[EVAL_ROWS] = part
    return parts, dataset.documents, held_out.documents


def _pack_part(
    data: Data,
    folder: Path,
    template: ChatTemplate,
    dataset: Dataset,
    patching: PatchConfig,
    *,
    key: str = "data.train",
    order: Callable[[int], list[int]] | None = None,
) -> _Part:
    """The rows of `key` in packed rows, which take so many documents in that order, or else the longest first."""
    documents, bad, hashes = dataset.documents, BadRows(), dict[str, bytes]()

    def hashed() -> Iterator[Document]:  # meanwhile others are rendered
        for document in track(documents, "rendering rows", open_console(soft_wrap=False)):
            hashes[document.origin] = hash_turns(document)
            yield document

    rendered = [*render_in_processes(folder, template, hashed(), count_processes(documents), on_bad=bad.add)]
    warnings = (*dataset.warnings, *bad.settle(len(documents), data.on_bad_row, key))
    kept, too_long = _keep_fitting(rendered, data, patching, key)
    patches, lengths = [patching.per_token * one.soft_tokens for one in kept], [len(one.ids) for one in kept]
    rows = [[index] for index in range(len(kept))]
    if data.packing:
        drawn = order(len(kept)) if order else None
        rows = assign_rows(lengths, data.max_length, patches=patches, max_patches=data.max_patches, order=drawn)
    return _Part(
        documents=kept,
        rows=rows,
        patches=patches,
        dropped={**dataset.dropped, **bad.counts, **too_long},
        warnings=warnings,
        lengths=[len(one.ids) for one in rendered],
        hashes=hashes,
    )


def _pack_eval(
    data: Data, folder: Path, template: ChatTemplate, documents: list[Document], patching: PatchConfig
) -> _Part:
    """The rows of data.eval that fit, in packed rows. Raises DataError where none has a token in the loss."""
    fitting = data.model_copy(update={"on_too_long": "drop"})
    part = _pack_part(fitting, folder, template, Dataset(documents=documents), patching, key="data.eval")
    if not any(np.count_nonzero(document.trained[1:]) for document in part.documents):
        what = "none of its rows has an answer, so there is no token to measure a loss on"
        raise DataError(f"data.eval: {what}; give rows with answers, or leave train.eval_steps out")
    if too_long := len(part.lengths) - len(part.documents):
        what = "rows beyond data.max_length or data.max_patches, which the losses of train.eval_steps leave out"
        part = replace(part, warnings=(*part.warnings, f"data.eval: {what}: {too_long:,} of {len(documents):,}"))
    return part


def _validate(checkpoint: Checkpoint, dataset: Dataset, patching: PatchConfig, *, bad: str, key: str) -> Dataset:
    """What validate_images gives. Raises CheckpointError where there are images and the checkpoint takes none."""
    first = next((document for document in dataset.documents if images_of(document.messages)), None)
    if first and not checkpoint.config.get("vision_config"):
        what = f"the config.json of checkpoint {checkpoint.source} has no vision_config, so it takes text alone"
        raise CheckpointError(f"{key}, {first.origin}: has an image, and {what}; give one that takes images")
    return validate_images(dataset, patching, bad=bad, key=key)


def _keep_fitting(
    rendered: Sequence[Rendered], data: Data, patching: PatchConfig, rows: str
) -> tuple[list[Rendered], dict[str, int]]:
    """The documents that fit into a row, and how many do not, by reason. Raises DataError where the recipe says so."""
    limits: tuple[tuple[str, str, int, str, Callable[[Rendered], int]], ...] = (
        ("too_long", "data.max_length", data.max_length, "tokens", lambda one: len(one.ids)),
        ("too_many_patches", "data.max_patches", data.max_patches, "patches",
         lambda one: patching.per_token * one.soft_tokens),
    )  # fmt: skip
    kept, dropped = list(rendered), {}
    for reason, key, limit, unit, size in limits:
        before, sizes = kept, [size(document) for document in kept]
        kept = [document for document, count in zip(before, sizes, strict=True) if count <= limit]
        most = max(sizes)
        if data.on_too_long == "error" and len(kept) < len(before):
            longest, remedy = before[sizes.index(most)], "raise it, or set data.on_too_long to drop"
            raise DataError(f"{longest.origin}: has {most} {unit}, {key} is {limit}; {remedy}")
        if not kept:
            what = f"each of its {len(before)} rows has more than {key} = {limit} {unit} (the longest {most})"
            raise DataError(f"{rows}: {what}, so none is left; raise {key}")
        if len(kept) < len(before):
            dropped[reason] = len(before) - len(kept)
    return kept, dropped


def _write_rows(run: Run, parts: Mapping[str, _Part]) -> dict[str, dict[str, str]]:
    """Writes each part into its folder, all or nothing; returns the SHA-256 of each file of each folder."""
    length, base, hashes = run.recipe.data.max_length, run.path.absolute(), dict[str, dict[str, str]]()
    try:
        with atomic_replace_dir(run.data) as beside:
            for name, part in parts.items():
                chunks, shape = pack_rows(part.documents, part.rows, length), (len(part.rows), length)
                hashes[name] = write_rows(beside / name, chunks, shape, base if part.images else None)
            # The folder is replaced now; killed in between, there is no record of the rows, rather than one that lies.
            run.record_file("data").unlink(missing_ok=True)
    except OSError as error:
        packed_rows = sum(len(part.rows) for part in parts.values())
        need_bytes = packed_rows * length * sum(dtype.itemsize for dtype in ARRAYS.values())
        remedy = f"{need_bytes / 1e6:.2f} MB are needed, make room or use another --run"
        raise MachineError(f"{run.data}: cannot be written ({error.strerror or error}); {remedy}") from None
    return hashes


def _count(recipe: Recipe, part: _Part) -> dict[str, Any]:
    """The fields of the record on the rows that are trained on, beside those of both parts."""
    data, train, kept, rows = recipe.data, recipe.train, part.documents, part.rows
    levels = np.percentile(part.lengths, [50, 90, 99, 100], method="inverted_cdf")
    buckets: tuple[ImageBucket, ...] = ()
    if part.images:
        soft_tokens = [[image.soft_tokens for index in members for image in kept[index].images] for members in rows]
        found = plan_buckets(recipe, soft_tokens)
        buckets = tuple(ImageBucket(**one._asdict(), steps=found.of_step.count(one)) for one in found.buckets)
    return {
        "packing_efficiency": sum(len(document.ids) for document in kept) / (len(rows) * data.max_length),
        "packing_order": ("drawn" if data.format == FORMAT else "longest first") if data.packing else None,
        "length_percentiles": dict(zip(("p50", "p90", "p99", "p100"), map(int, levels), strict=True)),
        "steps": count_steps(train, len(rows)),
        "images": len(part.images),
        "soft_tokens": sum(document.soft_tokens for document in kept),
        "most_patches": max(sum(part.patches[index] for index in members) for members in rows),
        "most_images": max(sum(len(kept[index].images) for index in members) for members in rows),
        "buckets": buckets,
    }


def describe_dropped(dropped: Mapping[str, int], data: Data, longest: str = "") -> str:
    """Why rows are not trained on and how many, each after a semicolon."""
    words = {
        "held_out": "held out {:,}",
        "limit": "left {:,} beyond data.limit",
        "too_long": f"dropped {{:,}} longer than {data.max_length}{longest}",
        "too_many_patches": f"dropped {{:,}} with more than {data.max_patches:,} patches",
    }
    return "".join(
        "; " + (words[reason].format(count) if reason in words else f"dropped {count:,} ({reason})")
        for reason, count in dropped.items()
    )


def _summary(record: DataRecord, run: Run) -> str:
    data, per_step = run.recipe.data, run.recipe.train.global_batch_size
    text = (
        f"data: {record.rows:,} rows, {record.tokens:,} tokens ({record.supervised_tokens:,} in the loss), in "
        f"{record.packed_rows:,} rows of {data.max_length} ({record.packing_efficiency:.0%} full), "
        f"{record.steps:,} steps"
    )
    if record.images:
        text += f"; {record.images:,} images in {record.soft_tokens:,} soft tokens"
    text += describe_dropped(record.dropped, data, f" (longest {record.length_percentiles['p100']:,})")
    if record.sources:
        text += f"; taken of {describe_columns(record.sources)}"
    if record.ignored_columns:
        text += f"; ignored the columns {describe_columns(record.ignored_columns)}"
    if found := record.eval_rows:
        text += f"; {found.rows:,} rows of data.eval for losses while it trains"
        text += "".join(f" (left out {count:,}: {reason})" for reason, count in found.dropped.items())
    if record.packed_rows < per_step:
        text += f"; too few for one step of train.global_batch_size = {per_step}, so training will ask to lower that"
    return text
