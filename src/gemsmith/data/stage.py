"""The data stage: reads, renders, drops what is too long, packs, and writes the arrays and their record."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gemsmith.arch import VARIANTS
from gemsmith.checkpoints import Checkpoint, open_checkpoint
from gemsmith.checkpoints.folder import read_config
from gemsmith.data.batches import IMAGES, count_rows, count_steps, find_buckets, rows_sha256, shuffled_order
from gemsmith.data.chat_template import ChatTemplateSource, find_template
from gemsmith.data.dataset import (
    BadRows,
    Dataset,
    describe_columns,
    read_eval,
    read_held_out,
    read_train,
    source_sha256,
)
from gemsmith.data.dedup import count_shared_images, find_overlap, hash_turns, overlap_notices, write_answers
from gemsmith.data.documents import Document
from gemsmith.data.image_folder import FORMAT
from gemsmith.data.images import ValidatedRows, validate_images, write_images
from gemsmith.data.packing import ARRAYS, Rows, assign_rows, drawn_order, pack_rows
from gemsmith.data.tokenize import Rendered, open_tokenizer
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import CheckpointError, DataError, MachineError, RunError
from gemsmith.images.decode import keep_bytes, prune_cache
from gemsmith.images.patches import PatchConfig, read_patching
from gemsmith.recipe.schema import Data, Recipe, eval_tasks
from gemsmith.runs.provenance import start_clock
from gemsmith.runs.records import DataRecord, HeldOut, ImageBucket
from gemsmith.runs.resolve import check_lengths
from gemsmith.runs.run import Run, make_provenance, read_record, write_record
from gemsmith.system.console import open_console, track
from gemsmith.system.files import atomic_replace_dir, sha256_file
from gemsmith.tasks import is_task_file
from gemsmith.tasks.messages import images_of

_PACKAGES = ("numpy", "tokenizers", "jinja2", "grain", "pillow")
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
    """The record of the packed rows, which are written to the run's data folder.

    Raises DataError for rows, CheckpointError for a tokenizer or a template, that cannot be used.
    """
    clock, data = start_clock(), run.recipe.data
    console = open_console(soft_wrap=False)
    # Before the checkpoint, which may first have to be fetched.
    dataset = read_train(run.recipe, partial(keep_bytes, run.images))
    checkpoint, template = _open_checkpoint(run)
    patching = read_patching(read_config(checkpoint.folder), data.image_tokens)
    held_out = _validate(checkpoint, _read_held_out(run.recipe), patching, bad="error", key="data.eval").documents
    seen = _validate(checkpoint, dataset.documents, patching, bad=data.on_bad_image, key="data.train")
    bad = BadRows()
    rendered, hashes = _render(checkpoint.folder, template, seen.documents, bad)
    left_out = bad.settle(len(seen.documents), data.on_bad_row)
    kept, dropped = _keep_fitting(rendered, data, patching)
    patches = [patching.per_token * document.soft_tokens for document in kept]
    # A folder of images is read class by class, and one class's documents are of one length: rows of it alone.
    order: Literal["drawn", "longest first"] = "drawn" if data.format == FORMAT else "longest first"
    rows = _assign(kept, patches, run.recipe, drawn=order == "drawn")
    try:
        before = read_record(run, DataRecord)
    except RunError:
        before = None
    chunks, shape = pack_rows(kept, rows, data.max_length), (len(rows), data.max_length)
    files = _write_rows(run, chunks, shape, with_images=any(patches))
    prune_cache(run.images, {Path(image.path).name for document in kept for image in document.images})
    trained = {row.origin for row in kept}
    answers = write_answers(run.data, (digest for origin, digest in hashes.items() if origin in trained))
    overlap, notices = _compare(answers, [one for one in seen.documents if one.origin in trained], held_out)
    record = DataRecord(
        provenance=make_provenance(run, "data", clock, packages=_PACKAGES, sources=_sources(run, checkpoint, template)),
        dropped={**dataset.dropped, **bad.counts, **dropped, **seen.dropped},
        ignored_columns=dict(dataset.ignored_columns),
        packing_order=order if data.packing else None,
        template_sha256=template.sha256,
        rows_sha256=rows_sha256(files, run.data / IMAGES),
        files=files,
        warnings=(*_notices(dataset), *seen.warnings, *left_out, *notices),
        **_count(run.recipe, rendered, kept, rows, patches),
        **overlap,
    )
    # The same rows from the same sources: the record stays, and with it what was made from it since.
    inputs = record.provenance.inputs_sha256
    if before and (before.rows_sha256, before.provenance.inputs_sha256) == (record.rows_sha256, inputs):
        record = before
    write_record(run, record)
    console.print(_summary(record, run), soft_wrap=True)
    return record


def _open_checkpoint(run: Run) -> tuple[Checkpoint, ChatTemplateSource]:
    checkpoint = open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""))
    check_lengths(run.recipe, checkpoint.variant)
    template = find_template(checkpoint.folder, run.recipe.data.template)
    highest = max(open_tokenizer(checkpoint.folder).get_vocab().values())
    if highest >= checkpoint.variant.vocabulary:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its tokenizer has the id {highest}, its embedding "
            f"{checkpoint.variant.vocabulary} rows; give the tokenizer that the weights came with"
        )
    return checkpoint, template


def _read_held_out(recipe: Recipe) -> list[Document]:
    """The rows of data.eval: those that eval cannot read are better found now than after training."""
    if recipe.data.eval is None:
        return []
    if any(is_task_file(task.task) for task in eval_tasks(recipe)):  # whose code no stage runs that does not score
        return read_eval(recipe).documents
    return read_held_out(recipe).documents


def _validate(
    checkpoint: Checkpoint, documents: Sequence[Document], patching: PatchConfig, *, bad: str, key: str
) -> ValidatedRows:
    """What validate_images gives. Raises CheckpointError where there are images and the checkpoint takes none."""
    first = next((document for document in documents if images_of(document.messages)), None)
    if first and not read_config(checkpoint.folder).get("vision_config"):
        raise CheckpointError(
            f"{key}, {first.origin}: has an image, and the config.json of checkpoint {checkpoint.source} has no "
            "vision_config, so it takes text alone; give one that takes images"
        )
    return validate_images(documents, patching, bad=bad, key=key)


def _keep_fitting(
    rendered: Sequence[Rendered], data: Data, patching: PatchConfig
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
            raise DataError(
                f"{before[sizes.index(most)].origin}: has {most} {unit}, {key} is {limit}; raise it, or set "
                "data.on_too_long to drop"
            )
        if not kept:
            raise DataError(
                f"data.train: each of its {len(before)} rows has more than {key} = {limit} {unit} "
                f"(the longest {most}), so none is left; raise {key}"
            )
        if len(kept) < len(before):
            dropped[reason] = len(before) - len(kept)
    return kept, dropped


def _assign(kept: Sequence[Rendered], patches: Sequence[int], recipe: Recipe, *, drawn: bool) -> list[list[int]]:
    data = recipe.data
    if not data.packing:
        return [[index] for index in range(len(kept))]
    order = drawn_order(len(kept), recipe.seed) if drawn else None
    lengths = [len(document.ids) for document in kept]
    return assign_rows(lengths, data.max_length, patches=patches, max_patches=data.max_patches, order=order)


def _write_rows(run: Run, chunks: Iterable[Rows], shape: tuple[int, int], *, with_images: bool) -> dict[str, str]:
    """Writes a .npy file for each array, and the images' lines, whole or not at all; returns the SHA-256 of each file.

    Plain writes: a memory map on a full disk ends the process instead of raising.
    """
    try:
        with atomic_replace_dir(run.data) as beside:
            with ExitStack() as stack:
                files = {name: stack.enter_context((beside / f"{name}.npy").open("wb")) for name in ARRAYS}
                for name, file in files.items():
                    descr = np.lib.format.dtype_to_descr(ARRAYS[name])
                    header = {"descr": descr, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                for chunk in chunks:
                    for name, array in chunk.arrays().items():
                        files[name].write(array.data)
                    if with_images:
                        seen = [chunk.images[row] if chunk.images else () for row in range(len(chunk))]
                        write_images(beside / IMAGES, seen, run.path.absolute())
            hashes = {name: sha256_file(beside / f"{name}.npy") for name in ARRAYS}
            if with_images:
                hashes[IMAGES] = sha256_file(beside / IMAGES)
            # The folder is replaced now; killed in between, there is no record of the rows, rather than one that lies.
            run.record_file("data").unlink(missing_ok=True)
    except OSError as error:
        need_bytes = shape[0] * shape[1] * sum(dtype.itemsize for dtype in ARRAYS.values())
        raise MachineError(
            f"{run.data}: cannot be written ({error.strerror or error}); "
            f"{need_bytes / 1e6:.2f} MB are needed, make room or use another --run"
        ) from None
    return hashes


def _render(
    folder: Path, template: ChatTemplateSource, documents: Sequence[Document], bad: BadRows
) -> tuple[list[Rendered], dict[str, bytes]]:
    """The documents in tokens, and by origin the hashes of each one's turns, which are made meanwhile.

    Rows that cannot be rendered are added to `bad`.
    """
    hashes: dict[str, bytes] = {}

    def hashed() -> Iterator[Document]:
        for document in track(documents, "rendering rows", open_console(soft_wrap=False)):
            hashes[document.origin] = hash_turns(document)
            yield document

    processes = count_processes(documents)
    return list(render_in_processes(folder, template, hashed(), processes, on_bad=bad.add)), hashes


def _compare(
    answers: np.ndarray, trained: Sequence[Document], held_out: Sequence[Document]
) -> tuple[dict[str, Any], Sequence[str]]:
    """The record's fields on held-out rows among what is trained on, whose hashes are `answers`, and warnings."""
    if not held_out:
        return {}, ()
    found = find_overlap(answers, held_out)
    same = HeldOut(
        rows=found.rows,
        same_prompt=found.prompts,
        same_answer=found.answers,
        same_image=count_shared_images(trained, held_out),
    )
    return {"held_out_also_trained": found.prompts, "held_out": same}, overlap_notices(found)


def _count(
    recipe: Recipe,
    rendered: Sequence[Rendered],
    kept: Sequence[Rendered],
    rows: Sequence[Sequence[int]],
    patches: Sequence[int],
) -> dict[str, Any]:
    """The fields of the record that count rows, tokens and images; `rows` are the documents of each packed row."""
    tokens, train = sum(len(document.ids) for document in kept), recipe.train
    levels = np.percentile([len(document.ids) for document in rendered], [50, 90, 99, 100], method="inverted_cdf")
    buckets: tuple[ImageBucket, ...] = ()
    if any(patches):
        soft_tokens = [[image.soft_tokens for index in members for image in kept[index].images] for members in rows]
        steps = find_buckets(
            soft_tokens,
            shuffled_order(len(rows), recipe.seed),
            total_rows=count_rows(train, len(rows)),
            global_batch_size=train.global_batch_size,
        ).count_steps()
        buckets = tuple(ImageBucket(**bucket._asdict(), steps=count) for bucket, count in steps.items())
    return {
        "rows": len(kept),
        "packed_rows": len(rows),
        "tokens": tokens,
        "supervised_tokens": sum(np.count_nonzero(document.trained) for document in kept),
        "packing_efficiency": tokens / (len(rows) * recipe.data.max_length),
        "length_percentiles": dict(zip(("p50", "p90", "p99", "p100"), map(int, levels), strict=True)),
        "steps": count_steps(train, len(rows)),
        "images": sum(len(document.images) for document in kept),
        "soft_tokens": sum(document.soft_tokens for document in kept),
        "most_patches": max(sum(patches[index] for index in members) for members in rows),
        "most_images": max(sum(len(kept[index].images) for index in members) for members in rows),
        "buckets": buckets,
    }


def _sources(run: Run, checkpoint: Checkpoint, template: ChatTemplateSource) -> dict[str, str]:
    return {
        "data.train": source_sha256(run.recipe.data.train, run.recipe.data.format),
        "checkpoint": checkpoint.fingerprint(),
        "tokenizer.json": sha256_file(checkpoint.folder / "tokenizer.json"),
        "chat template": template.sha256,
    }


def _notices(dataset: Dataset) -> tuple[str, ...]:
    marking = [(name, dataset.ignored_columns[name]) for name in _MARKING if name in dataset.ignored_columns]
    ignored = (
        f"data.train: the column {name} ({count:,} rows) is ignored: every row is trained on, whatever its {name}"
        for name, count in marking
    )
    return (*dataset.warnings, *ignored)


def _summary(record: DataRecord, run: Run) -> str:
    data, per_step = run.recipe.data, run.recipe.train.global_batch_size
    text = (
        f"data: {record.rows:,} rows, {record.tokens:,} tokens ({record.supervised_tokens:,} in the loss), in "
        f"{record.packed_rows:,} rows of {data.max_length} ({record.packing_efficiency:.0%} full), "
        f"{record.steps:,} steps"
    )
    if record.images:
        text += f"; {record.images:,} images in {record.soft_tokens:,} soft tokens"
    for reason, count in record.dropped.items():
        text += {
            "held_out": f"; held out {count:,}",
            "limit": f"; left {count:,} beyond data.limit",
            "too_long": f"; dropped {count:,} longer than {data.max_length} (longest "
            f"{record.length_percentiles['p100']:,})",
            "too_many_patches": f"; dropped {count:,} with more than {data.max_patches:,} patches",
        }.get(reason, f"; dropped {count:,} ({reason})")
    if record.ignored_columns:
        text += f"; ignored the columns {describe_columns(record.ignored_columns)}"
    if record.packed_rows < per_step:
        text += f"; too few for one step of train.global_batch_size = {per_step}, so training will ask to lower that"
    return text
