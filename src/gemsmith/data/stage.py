"""The data stage: reads, renders, drops what is too long, packs, and writes the arrays and their record."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from rich.console import Console
from rich.progress import track

from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.data.batches import count_steps
from gemsmith.data.pack import ARRAYS, PackedRows, assign_rows, pack_rows
from gemsmith.data.render import Rendered, Renderer, open_renderer, render_documents
from gemsmith.data.rows import Document, read_documents, source_sha256
from gemsmith.data.workers import count_processes, render_in_processes
from gemsmith.errors import CheckpointError, DataError, MachineError, RecipeError
from gemsmith.records import DataRecord
from gemsmith.run import Clock, Run, make_origin, replacing_folder, sha256_file, start_clock, write_record
from gemsmith.zoo import VARIANTS

_PACKAGES = ("numpy", "tokenizers", "jinja2", "grain")


def prepare_data(run: Run) -> DataRecord:
    """The record of the packed rows, which are written to the run's data folder.

    Raises DataError for rows that cannot be used, CheckpointError for a checkpoint without a usable tokenizer or template.
    """
    clock = start_clock()
    console = Console(stderr=True)
    data = run.recipe.data
    checkpoint = open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""))
    if data.max_length > checkpoint.variant.context:
        raise RecipeError(
            f"data.max_length: {data.max_length} was given, but {checkpoint.variant.name} reads at most {checkpoint.variant.context} tokens"
        )
    renderer = _open_renderer(checkpoint, data.template)
    documents = read_documents(data.train, format=data.format, seed=run.recipe.seed)
    progress = track(documents, description="rendering rows", console=console, transient=True, disable=not console.is_terminal)
    rendered = list(_render(checkpoint, renderer, data.template, progress, count_processes(documents)))
    kept = _keep_fitting(rendered, data.max_length, too_long=data.too_long)
    rows = assign_rows([len(document.ids) for document in kept], data.max_length, packing=data.packing)
    rows_sha256 = _write_rows(run, pack_rows(kept, rows, data.max_length), (len(rows), data.max_length))
    record = _make_record(run, clock, rendered, kept, len(rows), rows_sha256, _sources(run, checkpoint, renderer))
    write_record(run, record)
    console.print(_summary(record, run), highlight=False, soft_wrap=True)
    return record


def _render(
    checkpoint: Checkpoint, renderer: Renderer, template: str | None, documents: Iterable[Document], processes: int
) -> Iterator[Rendered]:
    if processes == 1:
        return render_documents(renderer, documents)
    return render_in_processes(checkpoint.folder, template, documents, processes)


def _open_renderer(checkpoint: Checkpoint, template: str | None) -> Renderer:
    renderer = open_renderer(checkpoint.folder, template)
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= checkpoint.variant.vocabulary:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its tokenizer has the id {highest}, its embedding {checkpoint.variant.vocabulary} rows; "
            "give the tokenizer that the weights came with"
        )
    return renderer


def _keep_fitting(rendered: Sequence[Rendered], max_length: int, *, too_long: str) -> list[Rendered]:
    """The documents of at most max_length tokens. Raises DataError where none is left, or one is too long and that is an error."""
    kept = [document for document in rendered if len(document.ids) <= max_length]
    longest = max(rendered, key=lambda document: len(document.ids))
    if too_long == "error" and len(kept) < len(rendered):
        raise DataError(
            f"{longest.origin}: has {len(longest.ids)} tokens, data.max_length is {max_length}; raise it, or set data.too_long to drop"
        )
    if not kept:
        raise DataError(
            f"data.train: each of its {len(rendered)} rows has more than data.max_length = {max_length} tokens "
            f"(the longest {len(longest.ids)}), so none is left; raise data.max_length"
        )
    return kept


def _write_rows(run: Run, chunks: Iterable[PackedRows], shape: tuple[int, int]) -> str:
    """Writes one .npy file an array into the data folder, whole or not at all, and returns the SHA-256 of their SHA-256s.

    Plain writes: a memory map on a full disk ends the process instead of raising.
    """
    try:
        with replacing_folder(run.data) as beside:
            with ExitStack() as stack:
                files = {name: stack.enter_context((beside / f"{name}.npy").open("wb")) for name in ARRAYS}
                for name, file in files.items():
                    header = {"descr": np.lib.format.dtype_to_descr(ARRAYS[name]), "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                for chunk in chunks:
                    for name, file in files.items():
                        file.write(getattr(chunk, name).tobytes())
            hashes = [sha256_file(beside / f"{name}.npy") for name in ARRAYS]
            # The folder is replaced now; killed in between, there is no record of the rows, rather than one that lies.
            run.record_file("data").unlink(missing_ok=True)
    except OSError as error:
        need_bytes = shape[0] * shape[1] * sum(dtype.itemsize for dtype in ARRAYS.values())
        raise MachineError(
            f"{run.data}: cannot be written ({error.strerror or error}); "
            f"{need_bytes / 1e6:.0f} MB are needed, make room or use another --run"
        ) from None
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _sources(run: Run, checkpoint: Checkpoint, renderer: Renderer) -> dict[str, str]:
    return {
        "data.train": source_sha256(run.recipe.data.train),
        "checkpoint": checkpoint.fingerprint(),
        "tokenizer.json": sha256_file(checkpoint.folder / "tokenizer.json"),
        "chat template": renderer.template.sha256,
    }


def _make_record(
    run: Run,
    clock: Clock,
    rendered: Sequence[Rendered],
    kept: Sequence[Rendered],
    packed_rows: int,
    rows_sha256: str,
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
        rows_sha256=rows_sha256,
    )


def _summary(record: DataRecord, run: Run) -> str:
    data, per_step = run.recipe.data, run.recipe.train.rows_per_step
    text = (
        f"data: {record.rows:,} rows, {record.tokens:,} tokens ({record.supervised_tokens:,} trained), in {record.packed_rows:,} rows of "
        f"{data.max_length} ({record.packing_efficiency:.0%} full), {record.steps:,} steps"
    )
    if record.dropped:
        text += f"; dropped {sum(record.dropped.values()):,} longer than {data.max_length} (longest {record.length_percentiles['p100']:,})"
    if record.packed_rows < per_step:
        text += f"; too few for one step of train.rows_per_step = {per_step}, so training will ask to lower that"
    return text
