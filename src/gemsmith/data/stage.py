"""The data stage: reads, renders, drops what is too long, packs, and writes the arrays and their record."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np

from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.data.batches import count_steps, rows_sha256
from gemsmith.data.overlap import Overlap, find_overlap, overlap_notices, write_answers
from gemsmith.data.pack import ARRAYS, Rows, assign_rows, pack_rows
from gemsmith.data.render import Rendered, open_tokenizer
from gemsmith.data.rows import Dataset, describe_columns, read_dataset, read_held_out, source_sha256
from gemsmith.data.template import TemplateText, find_template
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import CheckpointError, DataError, MachineError, RunError
from gemsmith.files import replacing_folder, sha256_file
from gemsmith.lengths import check_lengths
from gemsmith.provenance import Clock, start_clock
from gemsmith.records import DataRecord
from gemsmith.run import Run, make_origin, read_record, write_record
from gemsmith.terminal import open_console, track
from gemsmith.zoo import VARIANTS

_PACKAGES = ("numpy", "tokenizers", "jinja2", "grain")
# Columns by which some datasets mark rows that are not to be trained on.
_MARKING = ("label", "split")


def prepare_data(run: Run) -> DataRecord:
    """The record of the packed rows, which are written to the run's data folder.

    Raises DataError for rows that cannot be used, CheckpointError for a checkpoint without a usable tokenizer or
    template.
    """
    clock = start_clock()
    console = open_console(soft_wrap=False)
    data = run.recipe.data
    # Before the checkpoint, which may first have to be fetched.
    dataset = read_dataset(data.train, format=data.format, seed=run.recipe.seed)
    checkpoint = open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""))
    check_lengths(run.recipe, checkpoint.variant)
    template = find_template(checkpoint.folder, data.template)
    _check_tokenizer(checkpoint)
    # Rows that eval cannot read are better found now than after training.
    held_out = [] if data.eval is None else read_held_out(run.recipe).documents
    progress = track(dataset.documents, "rendering rows", console)
    rendered = list(render_in_processes(checkpoint.folder, template, progress, count_processes(dataset.documents)))
    kept = _keep_fitting(rendered, data.max_length, too_long=data.too_long)
    rows = assign_rows([len(document.ids) for document in kept], data.max_length, packing=data.packing)
    before = _earlier(run)
    files = _write_rows(run, pack_rows(kept, rows, data.max_length), (len(rows), data.max_length))
    trained = {row.origin for row in kept}
    answers = write_answers(run.data, (document for document in dataset.documents if document.origin in trained))
    record = _make_record(run, clock, rendered, kept, len(rows), files, _sources(run, checkpoint, template))
    record = record.model_copy(update={"ignored_columns": dataset.ignored_columns, "notices": _notices(dataset)})
    if held_out:
        record = _with_overlap(record, find_overlap(answers, held_out))
    record = before if before and _same_rows(before, record) else record
    write_record(run, record)
    console.print(_summary(record, run), soft_wrap=True)
    return record


def _check_tokenizer(checkpoint: Checkpoint) -> None:
    highest = max(open_tokenizer(checkpoint.folder).get_vocab().values())
    if highest >= checkpoint.variant.vocabulary:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its tokenizer has the id {highest}, its embedding "
            f"{checkpoint.variant.vocabulary} rows; "
            "give the tokenizer that the weights came with"
        )


def _keep_fitting(rendered: Sequence[Rendered], max_length: int, *, too_long: str) -> list[Rendered]:
    """The documents of at most max_length tokens.

    Raises DataError where none is left, or one is too long and that is an error.
    """
    kept = [document for document in rendered if len(document.ids) <= max_length]
    longest = max(rendered, key=lambda document: len(document.ids))
    if too_long == "error" and len(kept) < len(rendered):
        raise DataError(
            f"{longest.origin}: has {len(longest.ids)} tokens, data.max_length is {max_length}; raise it, or set "
            "data.too_long to drop"
        )
    if not kept:
        raise DataError(
            f"data.train: each of its {len(rendered)} rows has more than data.max_length = {max_length} tokens "
            f"(the longest {len(longest.ids)}), so none is left; raise data.max_length"
        )
    return kept


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
    return (before.rows_sha256, before.origin.made_from) == (record.rows_sha256, record.origin.made_from)


def _write_rows(run: Run, chunks: Iterable[Rows], shape: tuple[int, int]) -> dict[str, str]:
    """Writes one .npy file an array into the data folder, whole or not at all, and returns the SHA-256 of each.

    Plain writes: a memory map on a full disk ends the process instead of raising.
    """
    try:
        with replacing_folder(run.data) as beside:
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
                        files[name].write(array.tobytes())
            hashes = {name: sha256_file(beside / f"{name}.npy") for name in ARRAYS}
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
    return tuple(
        f"data.train: the column {name} ({count:,} rows) is ignored: every row is trained on, whatever its {name}"
        for name, count in marking
    )


def _sources(run: Run, checkpoint: Checkpoint, template: TemplateText) -> dict[str, str]:
    return {
        "data.train": source_sha256(run.recipe.data.train),
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
    dropped = len(rendered) - len(kept)
    return DataRecord(
        origin=make_origin(run, "data", clock, packages=_PACKAGES, sources=sources),
        rows=len(kept),
        dropped={"too_long": dropped} if dropped else {},
        packed_rows=packed_rows,
        tokens=tokens,
        supervised_tokens=sum(int(document.trained.sum()) for document in kept),
        packing_efficiency=tokens / (packed_rows * run.recipe.data.max_length),
        length_percentiles=dict(zip(("p50", "p90", "p99", "p100"), map(int, levels), strict=True)),
        template_sha256=sources["chat template"],
        steps=count_steps(run.recipe.train, packed_rows),
        rows_sha256=rows_sha256(files.values()),
        files=files,
    )


def _with_overlap(record: DataRecord, overlap: Overlap) -> DataRecord:
    return record.model_copy(
        update={"held_out_also_trained": overlap.prompts, "notices": (*record.notices, *overlap_notices(overlap))}
    )


def _summary(record: DataRecord, run: Run) -> str:
    data, per_step = run.recipe.data, run.recipe.train.rows_per_step
    text = (
        f"data: {record.rows:,} rows, {record.tokens:,} tokens ({record.supervised_tokens:,} trained), in "
        f"{record.packed_rows:,} rows of "
        f"{data.max_length} ({record.packing_efficiency:.0%} full), {record.steps:,} steps"
    )
    if record.dropped:
        text += (
            f"; dropped {sum(record.dropped.values()):,} longer than {data.max_length} (longest "
            f"{record.length_percentiles['p100']:,})"
        )
    if record.ignored_columns:
        text += f"; ignored the columns {describe_columns(record.ignored_columns)}"
    if record.packed_rows < per_step:
        text += f"; too few for one step of train.rows_per_step = {per_step}, so training will ask to lower that"
    return text
