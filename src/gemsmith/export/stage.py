"""The stage `export`: a run's adapter, and the base with it merged in."""

from rich.console import Console

from gemsmith.checkpoint import open_checkpoint
from gemsmith.checkpoint.adapter import write_peft_adapter
from gemsmith.export.adapters import find_step, read_run_adapter
from gemsmith.export.merge import merge
from gemsmith.records import ExportRecord, FileSum
from gemsmith.run import Run, make_origin, replacing_folder, sha256_file, start_clock, write_record

PACKAGES = ("numpy", "orbax-checkpoint", "safetensors")


def export(run: Run) -> ExportRecord:
    """Writes adapter/ and merged/ of the run from a saved step (export.step, or the last) and records what is in them."""
    clock = start_clock()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    step = find_step(run, run.recipe.export.step)
    adapter = read_run_adapter(run, step)
    base = open_checkpoint(run.recipe.checkpoint)
    with replacing_folder(run.adapter) as beside:
        write_peft_adapter(adapter, beside, run.recipe.checkpoint, dropout=run.recipe.lora.dropout)
    merged = merge(base, adapter, run.merged)
    total_bytes = sum(file.bytes for file in merged.files)
    record = ExportRecord(
        origin=make_origin(run, "export", clock, packages=PACKAGES),
        step=step,
        adapter=tuple(
            FileSum(name=file.name, bytes=file.stat().st_size, sha256=sha256_file(file)) for file in sorted(run.adapter.iterdir())
        ),
        merged=merged.files,
        merged_tensors=merged.merged_tensors,
        copied_tensors=merged.copied_tensors,
    )
    write_record(run, record)
    console.print(
        f"step {step}: {merged.merged_tensors} tensors merged, {merged.copied_tensors} copied, "
        f"{total_bytes / 1e9:.2f} GB in {clock.elapsed_s():.1f} s -> {run.merged}"
    )
    return record
