"""The data stage: reads, renders, drops what is too long, packs, and writes the arrays and their record."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from gemsmith.arch import VARIANTS
from gemsmith.checkpoints import Checkpoint, open_checkpoint
from gemsmith.checkpoints.folder import read_config
from gemsmith.data.batches import IMAGES, count_rows, count_steps, find_buckets, rows_sha256, shuffled_order
from gemsmith.data.chat_template import ChatTemplateSource, find_template
from gemsmith.data.dataset import Dataset, describe_columns, read_dataset, read_held_out, read_train, source_sha256
from gemsmith.data.dedup import Overlap, count_shared_images, find_overlap, overlap_notices, write_answers
from gemsmith.data.documents import Document
from gemsmith.data.image_folder import FORMAT, recipe_classes
from gemsmith.data.images import ValidatedRows, validate_images, write_images
from gemsmith.data.packing import ARRAYS, Rows, assign_rows, drawn_order, pack_rows
from gemsmith.data.tokenize import Rendered, open_tokenizer
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import CheckpointError, DataError, MachineError, RunError
from gemsmith.images.decode import keep_bytes, prune_cache
from gemsmith.images.patches import PatchConfig, read_patching
from gemsmith.recipe.schema import Data, Recipe, eval_tasks
from gemsmith.runs.provenance import Clock, start_clock
from gemsmith.runs.records import DataRecord, HeldOut, ImageBucket
from gemsmith.runs.resolve import check_lengths
from gemsmith.runs.run import Run, make_origin, read_record, write_record
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

    Raises DataError for rows that cannot be used, CheckpointError for a checkpoint without a usable tokenizer or
    template.
    """
    clock = start_clock()
    console = open_console(soft_wrap=False)
    data = run.recipe.data
    # Before the checkpoint, which may first have to be fetched.
    dataset = read_train(run.recipe, partial(keep_bytes, run.images))
    checkpoint, template = _open_checkpoint(run)
    patching = read_patching(read_config(checkpoint.folder), data.image_tokens)
    held_out = _look(checkpoint, _read_held_out(run.recipe), patching, bad="error", key="data.eval").documents
    seen = _look(checkpoint, dataset.documents, patching, bad=data.on_bad_image, key="data.train")
    progress = track(seen.documents, "rendering rows", console)
    rendered = list(render_in_processes(checkpoint.folder, template, progress, count_processes(seen.documents)))
    kept, dropped = _keep_fitting(rendered, data, patching)
    patches = [patching.per_token * document.soft_tokens for document in kept]
    rows = _assign(kept, patches, run.recipe)
    before = _earlier(run)
    chunks, shape = pack_rows(kept, rows, data.max_length), (len(rows), data.max_length)
    files = _write_rows(run, chunks, shape, with_images=any(patches))
    prune_cache(run.images, {Path(image.path).name for document in kept for image in document.images})
    trained = {row.origin for row in kept}
    trained_on = [document for document in seen.documents if document.origin in trained]
    answers = write_answers(run.data, trained_on)
    record = _make_record(run, clock, rendered, kept, len(rows), files, _sources(run, checkpoint, template))
    found = {
        "dropped": {**dropped, **seen.dropped},
        "packing_order": _packing_order(data),
        "buckets": _buckets(kept, rows, run.recipe) if any(patches) else (),
        "most_patches": max(sum(patches[index] for index in members) for members in rows),
        "most_images": max(sum(len(kept[index].images) for index in members) for members in rows),
        "ignored_columns": dataset.ignored_columns,
        "warnings": (*_notices(dataset), *seen.warnings),
    }
    record = record.model_copy(update=found)
    if held_out:
        shared = count_shared_images(trained_on, held_out)
        record = _with_overlap(record, find_overlap(answers, held_out), shared)
    record = before if before and _same_rows(before, record) else record
    write_record(run, record)
    console.print(_summary(record, run), soft_wrap=True)
    return record


def _open_checkpoint(run: Run) -> tuple[Checkpoint, ChatTemplateSource]:
    checkpoint = open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""))
    check_lengths(run.recipe, checkpoint.variant)
    template = find_template(checkpoint.folder, run.recipe.data.template)
    _check_tokenizer(checkpoint)
    return checkpoint, template


def _read_held_out(recipe: Recipe) -> list[Document]:
    """The rows of data.eval: those that eval cannot read are better found now than after training."""
    data = recipe.data
    if data.eval is None:
        return []
    if any(is_task_file(task.task) for task in eval_tasks(recipe)):  # whose code no stage runs that does not score
        classes = recipe_classes(data, "held-out")
        return read_dataset(data.eval, format=data.format, seed=recipe.seed, classes=classes).documents
    return read_held_out(recipe).documents


def _assign(kept: Sequence[Rendered], patches: Sequence[int], recipe: Recipe) -> list[list[int]]:
    data, lengths = recipe.data, [len(document.ids) for document in kept]
    order = drawn_order(len(kept), recipe.seed) if _packing_order(data) == "drawn" else None
    if not data.packing:
        return assign_rows(lengths, data.max_length, packing=False)
    return assign_rows(lengths, data.max_length, patches=patches, max_patches=data.max_patches, order=order)


def _packing_order(data: Data) -> Literal["longest first", "drawn"] | None:
    """A folder of images is read class by class, and one class's documents are of one length: rows of it alone."""
    if not data.packing:
        return None
    return "drawn" if data.format == FORMAT else "longest first"


def _look(
    checkpoint: Checkpoint, documents: Sequence[Document], patching: PatchConfig, *, bad: str, key: str
) -> ValidatedRows:
    """What validate_images gives. Raises CheckpointError where there are images and the checkpoint takes none."""
    first = next((document for document in documents if images_of(document.messages)), None)
    if first and not read_config(checkpoint.folder).get("vision_config"):
        raise CheckpointError(
            f"{key}, {first.origin}: has a image, and the config.json of checkpoint {checkpoint.source} has no "
            "vision_config, so it takes text alone; give one that takes images"
        )
    return validate_images(documents, patching, bad=bad, key=key)


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    highest = max(open_tokenizer(checkpoint.folder).get_vocab().values())
    if highest >= checkpoint.variant.vocabulary:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its tokenizer has the id {highest}, its embedding "
            f"{checkpoint.variant.vocabulary} rows; "
            "give the tokenizer that the weights came with"
        )


class _Limit(NamedTuple):
    """What a document may not have more of; `size` counts it."""

    key: str
    limit: int
    unit: str
    size: Callable[[Rendered], int]


def _limits(data: Data, patching: PatchConfig) -> dict[str, _Limit]:
    """By the reason that a document is dropped for."""
    return {
        "too_long": _Limit("data.max_length", data.max_length, "tokens", lambda document: len(document.ids)),
        "too_many_patches": _Limit(
            "data.max_patches", data.max_patches, "patches", lambda document: patching.per_token * document.soft_tokens
        ),
    }


def _keep_fitting(
    rendered: Sequence[Rendered], data: Data, patching: PatchConfig
) -> tuple[list[Rendered], dict[str, int]]:
    """The documents that fit into a row, and how many do not, by reason.

    Raises DataError where none is left, or one is too long and that is an error.
    """
    kept, dropped = list(rendered), {}
    for reason, (key, limit, unit, size) in _limits(data, patching).items():
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


def _buckets(kept: Sequence[Rendered], rows: Sequence[Sequence[int]], recipe: Recipe) -> tuple[ImageBucket, ...]:
    soft_tokens = [[image.soft_tokens for index in members for image in kept[index].images] for members in rows]
    places = {"total_rows": count_rows(recipe.train, len(rows)), "global_batch_size": recipe.train.global_batch_size}
    steps = find_buckets(soft_tokens, shuffled_order(len(rows), recipe.seed), **places).count_steps()
    return tuple(ImageBucket(**bucket._asdict(), steps=count) for bucket, count in steps.items())


def _earlier(run: Run) -> DataRecord | None:
    """The record that is about to be replaced, where it can be read."""
    try:
        return read_record(run, DataRecord)
    except RunError:
        return None


def _same_rows(before: DataRecord, record: DataRecord) -> bool:
    """Whether the same rows were made from the same sources again.

    Then the record stays, and with it what was made from it since.
    """
    return (before.rows_sha256, before.origin.inputs_sha256) == (record.rows_sha256, record.origin.inputs_sha256)


def _write_rows(run: Run, chunks: Iterable[Rows], shape: tuple[int, int], *, with_images: bool) -> dict[str, str]:
    """Writes one .npy file an array into the data folder, whole or not at all, and returns the SHA-256 of each.

    With images, their lines as well.

    Plain writes: a memory map on a full disk ends the process instead of raising.
    """
    try:
        with atomic_replace_dir(run.data) as beside:
            with ExitStack() as stack:
                files = {name: stack.enter_context((beside / f"{name}.npy").open("wb")) for name in ARRAYS}
                for name, file in files.items():
                    header = {
                        "descr": np.lib.format.dtype_to_descr(ARRAYS[name]),
                        "fortran_order": False,
                        "shape": shape,
                    }
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


def _notices(dataset: Dataset) -> tuple[str, ...]:
    marking = [(name, dataset.ignored_columns[name]) for name in _MARKING if name in dataset.ignored_columns]
    ignored = (
        f"data.train: the column {name} ({count:,} rows) is ignored: every row is trained on, whatever its {name}"
        for name, count in marking
    )
    return (*dataset.warnings, *ignored)


def _sources(run: Run, checkpoint: Checkpoint, template: ChatTemplateSource) -> dict[str, str]:
    return {
        "data.train": source_sha256(run.recipe.data.train, run.recipe.data.format),
        "checkpoint": checkpoint.fingerprint(),
        "tokenizer.json": sha256_file(checkpoint.folder / "tokenizer.json"),
        "chat template": template.sha256,
    }


def _make_record(
    run: Run,
    clock: Clock,
    rendered: Sequence[Rendered],
    kept: Sequence[Rendered],
    packed_rows: int,
    files: dict[str, str],
    sources: dict[str, str],
) -> DataRecord:
    tokens = sum(len(document.ids) for document in kept)
    lengths = [len(document.ids) for document in rendered]
    levels = np.percentile(lengths, [50, 90, 99, 100], method="inverted_cdf")
    return DataRecord(
        origin=make_origin(run, "data", clock, packages=_PACKAGES, sources=sources),
        rows=len(kept),
        dropped={},
        packed_rows=packed_rows,
        tokens=tokens,
        supervised_tokens=sum(np.count_nonzero(document.trained) for document in kept),
        packing_efficiency=tokens / (packed_rows * run.recipe.data.max_length),
        length_percentiles=dict(zip(("p50", "p90", "p99", "p100"), map(int, levels), strict=True)),
        template_sha256=sources["chat template"],
        steps=count_steps(run.recipe.train, packed_rows),
        rows_sha256=rows_sha256(files, run.data / IMAGES),
        files=files,
        images=sum(len(document.images) for document in kept),
        soft_tokens=sum(document.soft_tokens for document in kept),
    )


def _with_overlap(record: DataRecord, overlap: Overlap, same_image: int | None) -> DataRecord:
    found = {
        "held_out_also_trained": overlap.prompts,
        "held_out": HeldOut(
            rows=overlap.rows, same_prompt=overlap.prompts, same_answer=overlap.answers, same_image=same_image
        ),
        "warnings": (*record.warnings, *overlap_notices(overlap)),
    }
    return record.model_copy(update=found)


def _summary(record: DataRecord, run: Run) -> str:
    data, per_step = run.recipe.data, run.recipe.train.global_batch_size
    text = (
        f"data: {record.rows:,} rows, {record.tokens:,} tokens ({record.supervised_tokens:,} in the loss), in "
        f"{record.packed_rows:,} rows of "
        f"{data.max_length} ({record.packing_efficiency:.0%} full), {record.steps:,} steps"
    )
    if record.images:
        text += f"; {record.images:,} images in {record.soft_tokens:,} soft tokens"
    for reason, count in record.dropped.items():
        text += f"; dropped {count:,} " + {
            "too_long": f"longer than {data.max_length} (longest {record.length_percentiles['p100']:,})",
            "too_many_patches": f"with more than {data.max_patches:,} patches",
        }.get(reason, f"({reason})")
    if record.ignored_columns:
        text += f"; ignored the columns {describe_columns(record.ignored_columns)}"
    if record.packed_rows < per_step:
        text += f"; too few for one step of train.global_batch_size = {per_step}, so training will ask to lower that"
    return text
