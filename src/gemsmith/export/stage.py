"""The stage `export`: an adapter, and the base with it merged in.

A run's lie in its directory. Of a base and any PEFT adapter or Tunix checkpoint they are written into one folder:

    OUT/export.json  OUT/adapter/ (PEFT, full module paths)  OUT/merged/ (to be served)

And the way back: a recipe whose training starts from a PEFT adapter.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gemsmith.arch import ALL_LINEAR, Variant, kinds_of, lora_targets
from gemsmith.arch.lora_targets import KINDS
from gemsmith.arch.tensors import PREFIX, class_names, text_tensors
from gemsmith.checkpoints import peft
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.checkpoints.peft import Adapter, read_peft_adapter
from gemsmith.checkpoints.peft_config import CONFIG, PeftConfig, read_peft_config
from gemsmith.checkpoints.quantized import as_trained, with_trained
from gemsmith.checkpoints.steps import is_peft_step, read_step_metadata
from gemsmith.errors import CheckpointError, CorruptCheckpointError, InputError, RunError
from gemsmith.export import merge
from gemsmith.export.adapters import NO_ADAPTER, find_step, latest_restorable_step, read_trained
from gemsmith.recipe.load import build_recipe, load_recipe
from gemsmith.runs.records import DataRecord, ExportRecord, FileSum, TrainRecord, TrainStep
from gemsmith.runs.run import Clock, ExportDir, Run, make_provenance, read_record, start_clock, write_record
from gemsmith.system.console import open_console
from gemsmith.system.files import atomic_replace_dir, expanduser, sha256_file, write_text
from gemsmith.system.format import duration, size

PACKAGES = ("ml_dtypes", "numpy")
_ORBAX = "orbax-checkpoint"


def export(run: Run) -> ExportRecord:
    """Writes adapter/ and merged/ of the run from the step export.step, or the last, and records what is in them.

    Where train.method is full there is no adapter/, and merged/ has the trained weights.
    """
    clock, step = start_clock(), find_step(run, run.recipe.export.step)
    base = open_checkpoint(run.recipe.checkpoint)
    fingerprint = base.fingerprint()
    if run.record_file("data").exists():
        begun_on = read_record(run, DataRecord).provenance.inputs_sha256.get("checkpoint")
        check_base(base, begun_on, fingerprint, source=str(run.path))
    into = as_trained(base, run.recipe.train) if run.recipe.export.merge_into == "trained" else base
    full, saved = run.recipe.train.method == "full", _read_saved(run, step)
    with (
        merge.no_space_named(run.merged),
        nullcontext(run.adapter) if full else atomic_replace_dir(run.adapter) as adapter_folder,
        atomic_replace_dir(run.merged) as merged_folder,
    ):
        written: tuple[FileSum, ...] = ()
        if isinstance(saved, Adapter):
            quantized = run.recipe.train.dtype if run.recipe.train.dtype in KINDS else None
            saved = replace(saved, base_sha256=fingerprint, quantized=quantized)
            written = _write_adapter(base, saved, adapter_folder, run.recipe.lora.dropout)
            saved = {}
            # From the file, one module at a time, so that all of them need not lie in memory.
            adapter = read_peft_adapter(adapter_folder)
        else:
            into, adapter = with_trained(base, saved), NO_ADAPTER
        merge.check_mergeable(into, adapter)
        merge.check_space(run.merged, merge.merged_bytes(into))
        files, copied = merge.write_merged(into, adapter, merged_folder)
        # Both folders are replaced now; killed in between, there is no record rather than one that lies.
        run.record_file("export").unlink(missing_ok=True)
    if full and run.adapter.exists():
        shutil.rmtree(run.adapter)  # of the run's earlier adapters
    packages = PACKAGES if is_peft_step(run.checkpoints / str(step)) else (*PACKAGES, _ORBAX)
    record = ExportRecord(
        provenance=make_provenance(run, "export", clock, packages=packages),
        step=step,
        base=run.recipe.checkpoint,
        base_sha256=fingerprint,
        merged_into=run.recipe.export.merge_into,
        adapter=written,
        merged=files,
        merged_tensors=len(saved) if full else len(adapter.modules),
        copied_tensors=copied,
    )
    write_record(run, record)
    open_console().print(f"step {step}: {_summary(record, clock)} -> {run.merged}")
    return record


def _read_saved(run: Run, step: int) -> Adapter | dict[str, Any]:
    """What a saved step trained; one that is damaged is told together with another that is good."""
    try:
        adapter = read_trained(run, step)
    except CorruptCheckpointError as error:
        good = latest_restorable_step(run, but=step)
        remedy = f"step {good} is good: gemsmith export {run.path} --set export.step={good} --force"
        if good is None:
            remedy = f"no other step is good: train again with: gemsmith train {run.path} --force"
        raise CheckpointError(f"{error}; {remedy}") from None
    lines = read_step_metadata(run.checkpoints / str(step)).get("steps")
    if lines is None or not run.record_file("train").exists():
        return adapter
    saved = [TrainStep.model_validate_json(line).model_dump_json() for line in lines]
    # As text, in which NaN is NaN.
    if saved != [one.model_dump_json() for one in read_record(run, TrainRecord).steps[:step]]:
        raise RunError(
            f"{run.checkpoints}/{step}: was saved by another training than {run.record_file('train')} is of; put that "
            f"one's back, or train again with: gemsmith train {run.path} --force"
        )
    return adapter


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
        raise InputError("--run and --set: go with SOURCE, a recipe or run directory; give one, or leave them out")
    if not base or out is None or (adapter is None) == (from_tunix is None):
        raise InputError(
            "SOURCE is missing; give a recipe or run directory; or --base, --out, and one of --adapter and --from-tunix"
        )
    if from_tunix is not None:
        return export_tunix(base, from_tunix, out, **options)
    if odd := [name for name in ("step", "rank", "alpha") if name in options]:
        raise InputError(f"--{odd[0]}: goes with --from-tunix; a PEFT adapter says it itself")
    assert adapter is not None
    return export_peft(base, adapter, out, **options)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An adapter without a run, and what is recorded of where it came from."""

    folder: Path
    adapter: Adapter
    step: int | None = None
    dropout: float = 0.0
    files: merge.FileStates = field(default_factory=dict)  # as they were before the adapter was read
    packages: tuple[str, ...] = PACKAGES


def export_peft(base_source: str, adapter_folder: Path, out: Path, *, force: bool = False) -> ExportRecord:
    """Writes a PEFT folder's adapter and the base with it merged in to `out`, and records what is in them.

    Raises InputError, before a byte is written, where anything does not fit together.
    """
    clock = start_clock()
    if not adapter_folder.is_dir():
        raise CheckpointError(f"--adapter {adapter_folder}: is not a folder; give one that PEFT or Gemsmith wrote")
    check_target = partial(_check_target, out, force=force, sources=(Path(base_source), adapter_folder))
    check_target()
    files = merge.file_states(adapter_folder / name for name in (CONFIG, peft.WEIGHTS))
    config, adapter = read_peft_config(adapter_folder), read_peft_adapter(adapter_folder)
    base = open_checkpoint(base_source)
    check_base(base, adapter.base_sha256, base.fingerprint(), source=str(adapter_folder))
    _check_modules(adapter, config, base, source=str(adapter_folder))
    source = _Source(folder=adapter_folder, adapter=adapter, dropout=config.dropout, files=files)
    return _write(base, source, out, clock, check_target)


def export_tunix(
    base_source: str,
    checkpoint: Path,
    out: Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    alpha: float | None = None,
    force: bool = False,
) -> ExportRecord:
    """Writes an ordinary Tunix run's adapter and the base with it merged in to `out`, and records what they hold."""
    from gemsmith.export.tunix import read_tunix_adapter

    clock = start_clock()
    if not checkpoint.is_dir():
        remedy = "give the root of the run's checkpoints, or one step's folder"
        raise CheckpointError(f"--from-tunix {checkpoint}: is not a folder; {remedy}")
    check_target = partial(_check_target, out, force=force, sources=(Path(base_source), checkpoint))
    check_target()
    base = open_checkpoint(base_source)
    adapter, step, notes = read_tunix_adapter(checkpoint, base.variant, step=step, rank=rank, alpha=alpha)
    for note in notes:
        open_console().print(f"note: {note}")
    source = _Source(folder=checkpoint, adapter=adapter, step=step, packages=(*PACKAGES, _ORBAX))
    return _write(base, source, out, clock, check_target)


def check_base(base: Checkpoint, trained_on: str | None, fingerprint: str, *, source: str) -> None:
    """Raises CheckpointError where the base that was trained on is known, and another than this."""
    if trained_on not in (None, fingerprint):
        raise CheckpointError(
            f"checkpoint {base.source}: is not the base that {source} was trained on (fingerprint {fingerprint[:12]}…, "
            f"trained on {trained_on[:12]}…); give that one"
        )


def _check_modules(adapter: Adapter, config: PeftConfig, base: Checkpoint, *, source: str) -> None:
    """Raises CheckpointError unless the adapter has the modules of the base that its config names, as PEFT would."""
    unused = {tensor.module for tensor in text_tensors(base.variant, optional=True) if tensor.optional}
    missing: list[str] = []
    extra: list[str] = []
    for name, place in base.places.items():
        module = name.removesuffix(".weight")
        if len(place.shape) != 2 or name == module or module in unused or "embed_tokens" in module:
            continue
        # By its multimodal name, or that of the text-only class.
        names = {module, module.replace(PREFIX, "model.", 1) if module.startswith(PREFIX) else module}
        wanted = [config.targets(name) for name in names]
        if None not in wanted and any(wanted) != (module in adapter.modules):
            (missing if any(wanted) else extra).append(module)
    if missing or extra:
        raise CheckpointError(
            f"adapter {source}: its modules are not those that target_modules in {CONFIG} names: "
            + peft.some_of_each({"missing": missing, "not named there": extra})
        )


def _check_target(out: Path, *, force: bool, sources: tuple[Path, ...]) -> None:
    """Raises RunError where writing `out` would lose something."""
    place = out.absolute().resolve()
    for source in sources:
        folder = expanduser(source)
        links = [file for file in folder.iterdir() if file.is_symlink()] if folder.is_dir() else []
        for entry in (source, *links):
            read = expanduser(entry).resolve()
            if read.exists() and (place.is_relative_to(read) or read.is_relative_to(place)):
                raise RunError(f"--out {out}: lies in {entry}, which is read, or holds it; name another folder")
    if out.name in ("", ".."):
        remedy = f"name the folder itself ({out.resolve()})"
        raise RunError(f"--out {out}: has no name that a new folder could take; {remedy}")
    if out.is_symlink():
        raise RunError(f"--out {out}: is a symbolic link; name the folder itself ({out.resolve()})")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        remedy = "name another, or add --force, which replaces it once the new one is complete"
        raise RunError(f"--out {out}: already exists; {remedy}")
    if not (out / "export.json").is_file():
        raise RunError(
            f"--out {out}: was not written by gemsmith export (it holds no export.json), so it is not replaced; name "
            "another"
        )
    ours = {"export.json", "verify.json", "adapter", "merged", "logs"}
    if foreign := sorted({file.name for file in out.iterdir()} - ours):
        raise RunError(
            f"--out {out}: holds {foreign[0]}, which gemsmith export did not write, so it is not replaced; name another"
        )


def _write(base: Checkpoint, source: _Source, out: Path, clock: Clock, check: Callable[[], None]) -> ExportRecord:
    """Writes both folders and the record. The small files are hashed beside the merge, which uses every core.

    The target is checked again once no other export can write it, and right before it is replaced: another may have
    finished there, one that was killed between its renames is put back, and a merge takes minutes.
    """
    merge.check_mergeable(base, source.adapter)
    merge.check_space(out, merge.merged_bytes(base) + source.adapter.float32_bytes)
    fingerprint = base.fingerprint()
    other_weights = (
        f"{source.folder} was trained on the base in {source.adapter.quantized} and is merged into its original "
        "weights: part of what training gained may be lost. For the weights that it was trained on, export its run, "
        "with export.merge_into: trained."
    )
    with (
        merge.no_space_named(out),
        atomic_replace_dir(out) as beside,
        merge.unchanged(source.files),
        ThreadPoolExecutor(1) as aside,
    ):
        check()
        new, adapter = ExportDir(path=beside), replace(source.adapter, base_sha256=fingerprint)
        writing = aside.submit(_write_adapter, base, adapter, new.adapter, source.dropout)
        hashing = aside.submit(lambda: {str(file): sha256_file(file) for file in source.files})
        new.merged.mkdir()
        files, copied = merge.write_merged(base, adapter, new.merged)
        written, sources = writing.result(), {"base": fingerprint} | hashing.result()
        record = ExportRecord(
            provenance=make_provenance(new, "export", clock, packages=source.packages, sources=sources),
            warnings=() if source.adapter.quantized is None else (other_weights,),
            source=str(source.folder),
            step=source.step,
            base=str(base.folder.absolute()) if expanduser(base.source).is_dir() else base.source,
            base_sha256=fingerprint,
            adapter=written,
            merged=files,
            merged_tensors=len(adapter.modules),
            copied_tensors=copied,
        )
        write_record(new, record)
        check()
    open_console().print(f"{_summary(record, clock)} -> {out / 'merged'}, {out / 'adapter'}")
    return record


def _write_adapter(base: Checkpoint, adapter: Adapter, folder: Path, dropout: float) -> tuple[FileSum, ...]:
    copies, names = peft.shared_projections(base.variant), class_names(base.variant)
    written = peft.write_peft_adapter(adapter, folder, base.source, dropout=dropout, v_of_k=copies, class_names=names)
    return tuple(FileSum(name=name, **vars(one)) for name, one in sorted(written.items()))


def _summary(record: ExportRecord, clock: Clock) -> str:
    written = f"{size(sum(file.bytes for file in record.merged))} in {duration(clock.elapsed_s())}"
    return f"{record.merged_tensors} tensors merged, {record.copied_tensors} copied, {written}"


def start_recipe(base_source: str, adapter_folder: Path, *, recipe: Path | None = None, out: Path | None = None) -> str:
    """The text of a recipe that trains on from the adapter, with train.init_adapter and its lora; written to `out`.

    Raises InputError where the adapter is damaged, does not fit the base, or no choice of lora.targets gives it.
    """
    if out is not None and out.exists():
        raise RunError(f"--out {out}: already exists; name another")
    adapter = read_peft_adapter(adapter_folder)
    base = open_checkpoint(base_source)
    check_base(base, adapter.base_sha256, base.fingerprint(), source=str(adapter_folder))
    targets = _targets(adapter, base.variant, adapter_folder)
    peft.check_fit(adapter, lora_targets(base.variant, targets), source=str(adapter_folder))
    peft.check_finite(adapter, source=str(adapter_folder), otherwise="start from another")
    values: dict[str, Any] = {"data": {"train": "FILL-IN.jsonl"}}
    if recipe is not None:
        values = load_recipe(recipe).model_dump(mode="json", exclude_unset=True)
    values["checkpoint"] = str(Path(base_source).absolute()) if Path(base_source).is_dir() else base_source
    values.pop("model", None)
    lora = {"rank": adapter.rank, "alpha": adapter.alpha, "rslora": adapter.rslora, "targets": list(targets)}
    values["lora"] = (values.get("lora") or {}) | lora
    values["train"] = (values.get("train") or {}) | {"init_adapter": str(adapter_folder.absolute())}
    build_recipe(values, source=f"recipe {recipe}" if recipe else "recipe")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    if out is not None:
        write_text(out, text)
    return text


def _targets(adapter: Adapter, variant: Variant, folder: Path) -> tuple[str, ...]:
    """The kinds of projection whose modules the adapter has. What is missing or too much, check_fit names."""
    by_module = {target.module: target.role for target in lora_targets(variant, kinds_of(variant))}
    if not (kinds := tuple(dict.fromkeys(by_module[module] for module in adapter.modules if module in by_module))):
        remedy = "is it another model's adapter?"
        raise CheckpointError(f"adapter {folder}: none of its modules is one that can be trained here; {remedy}")
    every = {target.module for target in lora_targets(variant, [ALL_LINEAR])}
    return (ALL_LINEAR,) if adapter.modules.keys() == every and every - by_module.keys() else kinds
