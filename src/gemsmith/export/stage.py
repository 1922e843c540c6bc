"""The stage `export`: a run's adapter, and the base with it merged in.

Exports that need no run: any PEFT adapter or Tunix checkpoint and a base, into one folder in the form of a run's.

OUT/export.json  OUT/adapter/ (PEFT, full module paths)  OUT/merged/ (to be served)
"""

import dataclasses
import platform
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemsmith.arch import class_names, text_tensors
from gemsmith.arch.lora_targets import KINDS
from gemsmith.arch.tensors import PREFIX
from gemsmith.checkpoints import Checkpoint, open_checkpoint
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, read_peft_adapter, shared_projections, some, write_peft_adapter
from gemsmith.checkpoints.peft_config import CONFIG, PeftConfig, read_peft_config
from gemsmith.checkpoints.quantized import as_trained
from gemsmith.checkpoints.safetensors import Written
from gemsmith.checkpoints.steps import has_checksums, is_peft_step, no_checksums, read_step_metadata
from gemsmith.errors import CheckpointError, CorruptCheckpointError, InputError, RunError
from gemsmith.export.adapters import find_step, latest_restorable_step, read_run_adapter
from gemsmith.export.merge import (
    FileStates,
    check_mergeable,
    check_space,
    file_states,
    merged_bytes,
    no_space_named,
    unchanged,
    write_merged,
)
from gemsmith.runs.provenance import Clock, host_info, start_clock
from gemsmith.runs.records import DataRecord, ExportRecord, FileSum, Origin, TrainRecord, TrainStep
from gemsmith.runs.run import Run, make_origin, read_record, write_record
from gemsmith.system.console import open_console
from gemsmith.system.files import atomic_replace_dir, expanduser, sha256_file, write_text
from gemsmith.system.version import __version__

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
        atomic_replace_dir(run.adapter) as beside,
        atomic_replace_dir(run.merged) as merged_beside,
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
        warnings=() if has_checksums(read_step_metadata(saved)) else (no_checksums(saved),),
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
    except CorruptCheckpointError as error:
        good = latest_restorable_step(run, but=step)
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
    trained_on = read_record(run, DataRecord).origin.inputs_sha256.get("checkpoint")
    if trained_on not in (None, fingerprint):
        raise CheckpointError(
            f"checkpoint {base.source}: is not the base that {run.path} was trained on (fingerprint "
            f"{fingerprint[:12]}…, trained on "
            f"{trained_on[:12]}…); put that one back"
        )


RECORD, VERIFIED, ADAPTER, MERGED, LOGS = "export.json", "verify.json", "adapter", "merged", "logs"
_PACKAGES = ("ml_dtypes", "numpy")


def export_folder(
    *,
    of_a_run: bool = False,
    base: str = "",
    out: Path | None = None,
    adapter: Path | None = None,
    from_tunix: Path | None = None,
    **options: Any,
) -> ExportRecord:
    """What the command line's options ask for. Raises InputError where they do not go together."""
    if of_a_run:
        raise InputError(
            "--run, --set and --force: go with SOURCE, a recipe or run directory; give one, or leave them out"
        )
    if not base or out is None or (adapter is None) == (from_tunix is None):
        raise InputError(
            "export: give a recipe or run directory; or --base, --out, and one of --adapter and --from-tunix"
        )
    if from_tunix is not None:
        return export_tunix(base, from_tunix, out, **options)
    if odd := [name for name in ("step", "rank", "alpha") if name in options]:
        raise InputError(f"--{odd[0]}: goes with --from-tunix; a PEFT adapter says it itself")
    assert adapter is not None
    return export_peft(base, adapter, out, **options)


def export_peft(base_source: str, adapter_folder: Path, out: Path, *, overwrite: bool = False) -> ExportRecord:
    """Writes a PEFT folder's adapter and the base with it merged in to `out`, and records what is in them.

    Raises InputError where anything does not fit together, before a byte is written.
    """
    clock = start_clock()
    if not adapter_folder.is_dir():
        raise CheckpointError(f"--adapter {adapter_folder}: is not a folder; give one that PEFT or Gemsmith wrote")
    check_target = partial(_check_target, out, overwrite=overwrite, sources=(Path(base_source), adapter_folder))
    check_target()
    before = file_states(adapter_folder / name for name in (CONFIG, WEIGHTS))
    config, adapter = read_peft_config(adapter_folder), read_peft_adapter(adapter_folder)
    base = open_checkpoint(base_source)
    check_base(adapter, base, source=str(adapter_folder))
    check_modules(adapter, config, base, source=str(adapter_folder))
    return _write(
        base, adapter, out, clock, check_target, source=str(adapter_folder), dropout=config.dropout, read=before
    )


def export_tunix(
    base_source: str,
    checkpoint: Path,
    out: Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    alpha: float | None = None,
    overwrite: bool = False,
) -> ExportRecord:
    """Writes an ordinary Tunix run's adapter and the base with it merged in to `out`, and records what they hold."""
    from gemsmith.export.tunix import read_tunix_adapter

    clock = start_clock()
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"--from-tunix {checkpoint}: is not a folder; give the root of the run's checkpoints, or one step's folder"
        )
    check_target = partial(_check_target, out, overwrite=overwrite, sources=(Path(base_source), checkpoint))
    check_target()
    base = open_checkpoint(base_source)
    found = read_tunix_adapter(checkpoint, base.variant, step=step, rank=rank, alpha=alpha)
    for note in found.notes:
        open_console().print(f"note: {note}")
    packages = (*_PACKAGES, "orbax-checkpoint")
    return _write(
        base, found.adapter, out, clock, check_target, source=str(checkpoint), step=found.step, packages=packages
    )


def check_base(adapter: Adapter, base: Checkpoint, *, source: str) -> None:
    """Raises CheckpointError where the adapter says which base it was trained on, and this is another."""
    if adapter.base_sha256 is not None and adapter.base_sha256 != (found := base.fingerprint()):
        raise CheckpointError(
            f"checkpoint {base.source}: is not the base that {source} was trained on (fingerprint {found[:12]}…, "
            "trained on "
            f"{adapter.base_sha256[:12]}…); give that one"
        )


def check_modules(adapter: Adapter, config: PeftConfig, base: Checkpoint, *, source: str) -> None:
    """Raises CheckpointError unless the adapter has the modules of the base that its config names, as PEFT would."""
    unused = {tensor.module for tensor in text_tensors(base.variant, optional=True) if tensor.optional}
    missing: list[str] = []
    extra: list[str] = []
    try:
        for name, place in base.places.items():
            module = name.removesuffix(".weight")
            if len(place.shape) != 2 or name == module or module in unused or "embed_tokens" in module:
                continue
            wanted = _any_name(config.targets, module)
            if wanted is not None and wanted != (module in adapter.modules):
                (missing if wanted else extra).append(module)
    except re.error as error:
        raise CheckpointError(
            f"adapter {source}: target_modules in {CONFIG} is no regular expression ({error})"
        ) from None
    if missing or extra:
        parts = [
            f"{len(names)} {word} ({some(names)})"
            for word, names in (("missing", missing), ("not named there", extra))
            if names
        ]
        raise CheckpointError(
            f"adapter {source}: its modules are not those that target_modules in {CONFIG} names: {'; '.join(parts)}"
        )


def _any_name(targets: Callable[[str], bool | None], module: str) -> bool | None:
    """Whether the module is meant, under its multimodal name or that of the text-only class."""
    names = [module, *([f"model.{module.removeprefix(PREFIX)}"] if module.startswith(PREFIX) else [])]
    answers = [targets(name) for name in names]
    return None if None in answers else any(answers)


def _check_target(out: Path, *, overwrite: bool, sources: tuple[Path, ...]) -> None:
    """Raises RunError where writing `out` would lose something."""
    place = out.absolute()
    for source in (entry for folder in sources for entry in (folder, *_links_in(expanduser(folder)))):
        read = expanduser(source).resolve()
        if read.exists() and (
            place.resolve() == read or place.resolve().is_relative_to(read) or read.is_relative_to(place.resolve())
        ):
            raise RunError(f"--out {out}: lies in {source}, which is read, or holds it; name another folder")
    if out.name in ("", ".."):
        raise RunError(
            f"--out {out}: has no name that a new folder could take; name the folder itself ({out.resolve()})"
        )
    if out.is_symlink():
        raise RunError(f"--out {out}: is a symbolic link; name the folder itself ({out.resolve()})")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise RunError(
            f"--out {out}: already exists; name another, or add --overwrite, which replaces it once the new one is "
            "complete"
        )
    if not (out / RECORD).is_file():
        raise RunError(
            f"--out {out}: was not written by gemsmith export (it holds no {RECORD}), so it is not replaced; name "
            "another"
        )
    if foreign := sorted({file.name for file in out.iterdir()} - {RECORD, VERIFIED, ADAPTER, MERGED, LOGS}):
        raise RunError(
            f"--out {out}: holds {foreign[0]}, which gemsmith export did not write, so it is not replaced; name another"
        )


def _links_in(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_symlink()] if folder.is_dir() else []


def _write(
    base: Checkpoint,
    adapter: Adapter,
    out: Path,
    clock: Clock,
    check_target: Callable[[], None],
    *,
    source: str,
    step: int | None = None,
    dropout: float = 0.0,
    read: FileStates = MappingProxyType({}),
    packages: tuple[str, ...] = _PACKAGES,
) -> ExportRecord:
    """Writes both folders and the record.

    The small files are written and hashed beside the merge, which uses every core. `read`: the adapter's
    files, as they were before they were read.

    The target is checked again once no other export can write it, and right before it is replaced: another may have
    finished there, one that was killed between its renames is put back, and a merge takes minutes.
    """
    check_mergeable(base, adapter)
    check_space(out, merged_bytes(base) + adapter.float32_bytes)
    fingerprint = base.fingerprint()
    with no_space_named(out), atomic_replace_dir(out) as beside, unchanged(read), ThreadPoolExecutor(1) as aside:
        check_target()
        known = dataclasses.replace(adapter, base_sha256=fingerprint)
        writing = aside.submit(
            write_peft_adapter,
            known,
            beside / ADAPTER,
            base.source,
            dropout=dropout,
            v_of_k=shared_projections(base.variant),
            class_names=class_names(base.variant),
        )
        hashing = aside.submit(lambda: {str(file): sha256_file(file) for file in read})
        (beside / MERGED).mkdir()
        merged = write_merged(base, known, beside / MERGED)
        written = writing.result()
        record = ExportRecord(
            origin=make_folder_origin(clock, packages, {"base": fingerprint} | hashing.result()),
            warnings=_other_weights(adapter, source),
            source=source,
            step=step,
            base=str(base.folder.absolute()) if expanduser(base.source).is_dir() else base.source,
            base_sha256=fingerprint,
            adapter=_sums(written),
            merged=merged.files,
            merged_tensors=merged.merged_tensors,
            copied_tensors=merged.copied_tensors,
        )
        write_text(beside / RECORD, record.model_dump_json(indent=1) + "\n")
        check_target()
    size = f"{sum(file.bytes for file in merged.files) / 1e9:.2f} GB in {clock.elapsed_s():.1f} s"
    counts = f"{merged.merged_tensors} tensors merged, {merged.copied_tensors} copied"
    open_console().print(f"{counts}, {size} -> {out / MERGED}, {out / ADAPTER}")
    return record


def _other_weights(adapter: Adapter, source: str) -> tuple[str, ...]:
    if adapter.quantized is None:
        return ()
    return (
        f"{source} was trained on the base in {adapter.quantized} and is merged into its original weights: part of "
        "what training gained may be lost. For the weights that it was trained on, export its run, with "
        "export.merge_into: trained.",
    )


def _sums(written: Mapping[str, Written]) -> tuple[FileSum, ...]:
    return tuple(FileSum(name=name, bytes=file.bytes, sha256=file.sha256) for name, file in sorted(written.items()))


def make_folder_origin(clock: Clock, packages: tuple[str, ...], inputs_sha256: Mapping[str, str]) -> Origin:
    """Where a record comes from that no run has."""
    return Origin(
        started=clock.started,
        duration_s=round(clock.elapsed_s(), 3),
        gemsmith=__version__,
        versions={"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        machine=host_info(),
        seed=0,
        inputs_sha256=dict(inputs_sha256),
    )
