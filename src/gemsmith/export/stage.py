"""The stage `export`: a run's adapter, and the base with it merged in."""

from dataclasses import replace

from gemsmith.checkpoint import Checkpoint, open_checkpoint
from gemsmith.checkpoint.adapter import Adapter, read_peft_adapter, shared_projections, write_peft_adapter
from gemsmith.checkpoint.held import as_trained
from gemsmith.checkpoint.saved import has_checksums, is_peft_step, no_checksums, read_step_metadata
from gemsmith.errors import CheckpointError, DamageError, RunError
from gemsmith.export.adapters import find_step, good_step, read_run_adapter
from gemsmith.export.merge import check_mergeable, check_space, merged_bytes, no_space_named, write_merged
from gemsmith.files import replacing_folder
from gemsmith.provenance import start_clock
from gemsmith.records import DataRecord, ExportRecord, FileSum, TrainRecord, TrainStep
from gemsmith.run import Run, make_origin, read_record, write_record
from gemsmith.terminal import open_console
from gemsmith.zoo import class_names
from gemsmith.zoo.quantised import KINDS

PACKAGES = ("ml_dtypes", "numpy")
_ORBAX = "orbax-checkpoint"


def export(run: Run) -> ExportRecord:
    """Writes adapter/ and merged/ of the run from a saved step, and records what is in them.

    The step is export.step, or the last.
    """
    clock = start_clock()
    console = open_console()
    step = find_step(run, run.recipe.export.step)
    saved = run.checkpoints / str(step)
    base = open_checkpoint(run.recipe.checkpoint)
    fingerprint = base.fingerprint()
    _check_base(run, base, fingerprint)
    into = as_trained(base, run.recipe.train) if run.recipe.export.merge_into == "trained" else base
    with (
        no_space_named(run.merged),
        replacing_folder(run.adapter) as beside,
        replacing_folder(run.merged) as merged_beside,
    ):
        dtype = run.recipe.train.dtype
        quantized = dtype if dtype in KINDS else None
        adapter = replace(_read_saved(run, step), base_sha256=fingerprint, quantized=quantized)
        copies, names = shared_projections(base.variant), class_names(base.variant)
        dropout = run.recipe.lora.dropout
        written = write_peft_adapter(
            adapter, beside, run.recipe.checkpoint, dropout=dropout, v_of_k=copies, class_names=names
        )
        del adapter
        # From the file, one module at a time, so that all of them need not lie in memory.
        adapter = read_peft_adapter(beside)
        check_mergeable(into, adapter)
        check_space(run.merged, merged_bytes(into))
        merged = write_merged(into, adapter, merged_beside)
        # Both folders are replaced now; killed in between, there is no record of what they held, rather than one that
        # lies.
        run.record_file("export").unlink(missing_ok=True)
    total_bytes = sum(file.bytes for file in merged.files)
    record = ExportRecord(
        origin=make_origin(run, "export", clock, packages=PACKAGES if is_peft_step(saved) else (*PACKAGES, _ORBAX)),
        notices=() if has_checksums(read_step_metadata(saved)) else (no_checksums(saved),),
        step=step,
        base=run.recipe.checkpoint,
        base_sha256=fingerprint,
        merged_into=run.recipe.export.merge_into,
        adapter=tuple(
            FileSum(name=name, bytes=file.bytes, sha256=file.sha256) for name, file in sorted(written.items())
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


def _read_saved(run: Run, step: int) -> Adapter:
    """The adapter of a saved step; one that is damaged is told together with another that is good."""
    try:
        adapter = read_run_adapter(run, step)
    except DamageError as error:
        good = good_step(run, but=step)
        if good is None:
            raise CheckpointError(
                f"{error}; no other step is good: train again with: gemsmith train {run.path} --force"
            ) from None
        raise CheckpointError(
            f"{error}; step {good} is good: gemsmith export {run.path} --set export.step={good} --force"
        ) from None
    _refuse_another_training(run, step)
    return adapter


def _refuse_another_training(run: Run, step: int) -> None:
    """Raises RunError where a step's losses are not those of train.json; it may lack that, or them."""
    lines = read_step_metadata(run.checkpoints / str(step)).get("steps")
    if lines is None or not run.record_file("train").exists():
        return
    trained = read_record(run, TrainRecord).steps[:step]
    # As text, in which NaN is NaN.
    if [TrainStep.model_validate_json(line).model_dump_json() for line in lines] != [
        one.model_dump_json() for one in trained
    ]:
        raise RunError(
            f"{run.checkpoints}/{step}: was saved by another training than {run.record_file('train')} is of; put that "
            f"one's back, or train again with: gemsmith train {run.path} --force"
        )


def _check_base(run: Run, base: Checkpoint, fingerprint: str) -> None:
    """Raises CheckpointError where the run was begun with another base than is there now."""
    if not run.record_file("data").exists():
        return
    trained_on = read_record(run, DataRecord).origin.made_from.get("checkpoint")
    if trained_on not in (None, fingerprint):
        raise CheckpointError(
            f"checkpoint {base.source}: is not the base that {run.path} was trained on (fingerprint "
            f"{fingerprint[:12]}…, trained on "
            f"{trained_on[:12]}…); put that one back"
        )
