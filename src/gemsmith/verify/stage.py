"""The stage `verify`: proof that merged/ is the base plus what was trained, and nothing else.

Nothing of the merge's own arithmetic is trusted: bytes are compared, weights recomputed in float64, and logits taken
from transformers and PEFT.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from gemsmith.checkpoints import Checkpoint, TensorPlace, open_checkpoint
from gemsmith.checkpoints.peft import Adapter, LoraPair, read_peft_adapter, some
from gemsmith.checkpoints.quantized import as_trained
from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import CheckpointError, CorruptCheckpointError, RunError, VerifyError
from gemsmith.export.adapters import delta_norm, read_run_adapter
from gemsmith.export.merge import DTYPES, Rounding, rounding_notices, row_blocks
from gemsmith.export.stage import ADAPTER, MERGED, RECORD, VERIFIED, make_folder_origin
from gemsmith.runs.checksums import changed_files
from gemsmith.runs.provenance import start_clock
from gemsmith.runs.records import Check, ExportRecord, VerifyRecord, read_record_file
from gemsmith.runs.run import Run, make_origin, read_record, write_record
from gemsmith.system.console import open_console
from gemsmith.system.files import sha256_file, write_text
from gemsmith.verify.checks import check_losses, compare_beside
from gemsmith.verify.logits import compare_logits
from gemsmith.verify.prompts import make_prompts, trained_rows

PACKAGES = ("numpy", "peft", "safetensors", "torch", "transformers")
_COMPARED_BYTES = 32 * 2**20
# Tensors up to this many values are recomputed whole, larger ones in blocks spread over them.
_WHOLE_VALUES = 8 * 2**20
_SAMPLED_BLOCKS = 4
_BLOCK_VALUES = 2**20
# Significand bits: rounding to nearest is off by at most half of 2**-bits of the value's power of two.
_BITS = {"BF16": 7, "F16": 10, "F32": 23}
_SMALLEST_STEP = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}
# An adapter this much larger than its weight has run away; a strong one on a tiny model reaches about 1.
_LARGEST_RELATIVE_DELTA = 10.0
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Which tensors of merged/ are not the base's, and what is wrong with them.

    Those whose adapter is lost in rounding, and what should not be so.
    """

    changed: tuple[str, ...]
    swallowed: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What is wrong with merged weights, and what share of the changes rounding took.

    The share: the norm of what rounding took from the adapter's changes over the norm of those changes.
    """

    problems: tuple[str, ...]
    rounding_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of a merged weight, judged.

    How many values are wrong, and the sums of squares of what rounding took and of what the adapter adds.
    """

    wrong: int
    lost: float
    added: float


def verify(run: Run) -> VerifyRecord:
    """Checks the run's adapter/ and merged/ and records each check.

    Raises VerifyError naming those that failed, once that is recorded.
    """
    clock = start_clock()
    exported: ExportRecord = read_record(run, ExportRecord)
    base = open_checkpoint(run.recipe.checkpoint)
    found = _run_checks(exported, base, run.adapter, run.merged, run)
    record = VerifyRecord(origin=make_origin(run, "verify", clock, packages=PACKAGES), **found)
    write_record(run, record)
    _finish(record, run.path)
    return record


def verify_folder(out: Path, *, base_source: str | None = None) -> VerifyRecord:
    """The same of a folder that export wrote without a run, against the base that it names (or `base_source`).

    Writes OUT/verify.json.
    """
    clock = start_clock()
    exported = read_export(out)
    base = open_checkpoint(base_source or exported.base)
    found = _run_checks(exported, base, out / ADAPTER, out / MERGED)
    inputs_sha256 = {RECORD: sha256_file(out / RECORD), "base": base.fingerprint()}
    record = VerifyRecord(origin=make_folder_origin(clock, PACKAGES, inputs_sha256), **found)
    write_text(out / VERIFIED, record.model_dump_json(indent=1) + "\n")
    _finish(record, out)
    return record


def read_export(out: Path) -> ExportRecord:
    """The record of a folder that export wrote without a run. Raises RunError where there is none."""
    missing = "give a run directory, or a folder that gemsmith export wrote"
    return read_record_file(out / RECORD, ExportRecord, missing=missing, damaged="export again, with --overwrite")


def read_verify(out: Path) -> VerifyRecord:
    command = f"gemsmith verify {out}"
    return read_record_file(out / VERIFIED, VerifyRecord, missing=f"run first: {command}", damaged=f"run: {command}")


def compare_tensors(base: Checkpoint, merged: Checkpoint, adapter: Adapter) -> Difference:
    """Every tensor of both folders, byte by byte: those with an adapter must differ, all others must not.

    Where an adapter is so weak that rounding gives the base's weights again, every value of them is recomputed to show
    it.
    """
    expected = {f"{module}.weight" for module in adapter.modules}
    problems = [f"{name} is missing" for name in sorted(base.places.keys() - merged.places.keys())]
    problems += [f"{name} is extra" for name in sorted(merged.places.keys() - base.places.keys())]
    changed, swallowed = [], []
    for name in sorted(base.places.keys() & merged.places.keys()):
        one, other = base.places[name], merged.places[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            problems.append(f"{name} is {other.dtype} {list(other.shape)}, the base's is {one.dtype} {list(one.shape)}")
        elif not _same_values(one, other):
            changed.append(name)
            if name not in expected:
                problems.append(f"{name} differs from the base and has no adapter")
        elif name in expected:
            pair, blocks = adapter.modules[name.removesuffix(".weight")], row_blocks(one.shape, _BLOCK_VALUES)
            if not _fits(pair, one) or any(
                _compare_block(one, other, pair, adapter.scale, rows).wrong for rows in blocks
            ):
                problems.append(f"{name} has an adapter and is the base's")
            else:
                swallowed.append(name)
    if swallowed and not changed:
        problems.append(
            f"the adapter changes nothing: rounding gives the base's weights again in all {len(swallowed)} tensors"
        )
    return Difference(changed=tuple(changed), swallowed=tuple(swallowed), problems=tuple(problems))


def recompute(base: Checkpoint, merged: Checkpoint, adapter: Adapter) -> Recomputed:
    """Which merged weights are not W + scale * B A, recomputed in float64 and allowed one rounding.

    And what that rounding took.

    Where a value lies within float32's own error of the middle between two of the base's dtype, either is right.
    """
    problems, lost, added = [], 0.0, 0.0
    for module, pair in adapter.modules.items():
        name = f"{module}.weight"
        one, other = base.places.get(name), merged.places.get(name)
        if one is None or other is None or one.shape != other.shape:
            continue  # compare_tensors has named it
        if not _fits(pair, one):
            problems.append(f"{name} is {list(one.shape)}, its adapter is for {[len(pair.b), pair.a.shape[1]]}")
            continue
        blocks = [_compare_block(one, other, pair, adapter.scale, rows) for rows in _sample(one)]
        if wrong := sum(block.wrong for block in blocks):
            problems.append(f"{name} has {wrong} values that are not W + scale * B A")
        lost, added = lost + sum(block.lost for block in blocks), added + sum(block.added for block in blocks)
    return Recomputed(problems=tuple(problems), rounding_loss=math.sqrt(lost / added) if added else None)


def relative_deltas(base: Checkpoint, adapter: Adapter) -> dict[str, float]:
    """Module -> norm of what its adapter adds over the norm of its weight."""
    return {
        module: delta_norm(pair, adapter.scale) / max(_norm(base.places[f"{module}.weight"]), 1e-30)
        for module, pair in adapter.modules.items()
    }


def _run_checks(
    exported: ExportRecord, base: Checkpoint, adapter_folder: Path, merged_folder: Path, run: Run | None = None
) -> dict[str, Any]:
    """What verify.json says, but for its origin."""

    def found(**more: Any) -> dict[str, Any]:
        return {
            "passed": all(check.passed is not False for check in checks),
            "checks": tuple(checks),
            "changed_tensors": 0,
            "expected_tensors": exported.merged_tensors,
            "logits_max_abs_difference": None,
        } | more

    trained_on = as_trained(base, run.recipe.train) if run else base
    into = trained_on if exported.merged_into == "trained" else base
    checks = [
        _check(
            "files",
            changed_files(adapter_folder, exported.adapter) + changed_files(merged_folder, exported.merged),
            "as exported",
        )
    ]
    checks += _check_base(exported, base)
    try:
        adapter, merged = read_peft_adapter(adapter_folder), open_checkpoint(str(merged_folder))
    except CheckpointError as error:
        checks.append(Check(name="readable", passed=False, detail=str(error)))
        return found()
    if run:
        checks.append(_check_trained(run, exported, adapter))
    checks.append(_check("beside", compare_beside(base, merged), "tokenizer, chat template and configs are the base's"))
    difference = compare_tensors(into, merged, adapter)
    held = ", dequantized as it was trained on" if into is not base else ""
    count = f"{len(difference.changed)} of {len(base.places)} tensors differ from the base{held}, as expected"
    if lost := len(difference.swallowed):
        count += (
            f"; {lost} more have adapters so weak that rounding gives the base's weights again "
            f"({some(difference.swallowed)})"
        )
    checks.append(_check("tensors", list(difference.problems), count))
    recomputed = recompute(into, merged, adapter)
    checks.append(_check("values", list(recomputed.problems), "W + scale * B A, recomputed in float64"))
    checks.append(_check_norms(base, adapter))
    if any(check.passed is False for check in checks):
        checks.append(Check(name="logits", passed=None, detail="not compared, because other checks failed"))
        return found(changed_tensors=len(difference.changed))
    of_run = {"image_tokens": run.recipe.data.image_tokens, "seed": run.recipe.seed} if run else {}
    prompts = make_prompts(base, trained_rows(run) if run else None, adapter, **of_run)
    logits = compare_logits(into, adapter_folder, merged_folder, adapter, prompts, trained_on=trained_on)
    dtypes = sorted({base.places[f"{module}.weight"].dtype for module in adapter.modules})
    rounding = Rounding(dtypes=dtypes, away=recomputed.rounding_loss, effect=logits.effect, moved=logits.rounding)
    checks.append(logits.check)
    warnings = rounding_notices(rounding)
    if logits.losses and run:
        check, told = check_losses(logits.losses, dtype=run.recipe.train.dtype, original=into is not trained_on)
        checks.append(check)
        warnings += told
    return found(
        changed_tensors=len(difference.changed),
        logits_max_abs_difference=logits.max_abs_difference,
        logits_effect=logits.effect,
        logits_rounding=logits.rounding,
        rounding_loss=recomputed.rounding_loss,
        losses=logits.losses,
        warnings=warnings,
    )


def _finish(record: VerifyRecord, place: Path) -> None:
    print_checks(record.checks)
    if failed := [check for check in record.checks if check.passed is False]:
        raise VerifyError(f"{place}: " + "; ".join(f"{check.name}: {check.detail}" for check in failed))


def _check_base(exported: ExportRecord, base: Checkpoint) -> list[Check]:
    """Whether the base is still the one that was merged into; records of earlier versions do not say."""
    if not exported.base_sha256:
        return []
    found = base.fingerprint()
    problem = f"{base.source} has the fingerprint {found[:12]}…, exported was from {exported.base_sha256[:12]}…"
    return [_check("base", [problem] if found != exported.base_sha256 else [], "the one that was exported from")]


def _check_trained(run: Run, exported: ExportRecord, adapter: Adapter) -> Check:
    """adapter/ is what training saved at that step, bit for bit; training may since have deleted the step."""
    if exported.step not in checkpoint_steps(run.checkpoints):
        return Check(
            name="adapter", passed=None, detail=f"not compared: step {exported.step} is no longer among the checkpoints"
        )
    try:
        saved = read_run_adapter(run, exported.step)
    except CorruptCheckpointError as error:
        return Check(name="adapter", passed=None, detail=f"not compared: {error}")
    except (CheckpointError, RunError) as error:
        return Check(name="adapter", passed=False, detail=str(error))
    problems = [f"{name} is missing or not trained" for name in sorted(saved.modules.keys() ^ adapter.modules.keys())]
    if (saved.rank, saved.alpha) != (adapter.rank, adapter.alpha):
        problems.append(
            f"rank and alpha are {adapter.rank}, {adapter.alpha:g}; trained were {saved.rank}, {saved.alpha:g}"
        )
    if saved.rslora != adapter.rslora:
        problems.append(f"use_rslora is {adapter.rslora}, trained was {saved.rslora}")
    for name in sorted(saved.modules.keys() & adapter.modules.keys()):
        one, other = saved.modules[name], adapter.modules[name]
        if not (np.array_equal(one.a, other.a) and np.array_equal(one.b, other.b)):
            problems.append(f"{name} is not what step {exported.step} saved")
    return _check("adapter", problems, f"{len(saved.modules)} modules, bit for bit those of step {exported.step}")


def _check_norms(base: Checkpoint, adapter: Adapter) -> Check:
    known = {module: pair for module, pair in adapter.modules.items() if f"{module}.weight" in base.places}
    ratios = relative_deltas(base, replace(adapter, modules=known))
    problems = [
        f"{module}: its adapter has {ratio:.3g} times the norm of its weight"
        for module, ratio in ratios.items()
        if not 0 < ratio < _LARGEST_RELATIVE_DELTA
    ]
    return _check(
        "norms",
        problems,
        f"adapters have {min(ratios.values(), default=0):.2g} to {max(ratios.values(), default=0):.2g} of their "
        "weights' norms",
    )


def _check(name: str, problems: list[str], passed: str) -> Check:
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return Check(name=name, passed=not problems, detail="; ".join(problems[:_LISTED]) + more if problems else passed)


def _same_values(one: TensorPlace, other: TensorPlace) -> bool:
    """Bit for bit."""
    if one.held:
        blocks = row_blocks(one.matrix, _BLOCK_VALUES)
        return all(one.rows(rows).tobytes() == other.rows(rows).tobytes() for rows in blocks)
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.begin)
        right.seek(other.begin)
        for begin in range(0, one.end - one.begin, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, one.end - one.begin - begin)
            if left.read(length) != right.read(length):
                return False
    return True


def _fits(pair: LoraPair, place: TensorPlace) -> bool:
    return (len(pair.b), pair.a.shape[1]) == place.shape


def _sample(place: TensorPlace) -> Iterator[slice]:
    """All blocks of rows of a small matrix; of a large one the first, the last and some between."""
    blocks = list(row_blocks(place.shape, _BLOCK_VALUES))
    if place.shape[0] * place.shape[1] <= _WHOLE_VALUES:
        return iter(blocks)
    chosen = np.linspace(0, len(blocks) - 1, min(_SAMPLED_BLOCKS, len(blocks))).astype(int)
    return (blocks[number] for number in sorted(set(chosen.tolist())))


def _compare_block(base: TensorPlace, merged: TensorPlace, pair: LoraPair, scale: float, rows: slice) -> Block:
    a, b = pair.a.astype(np.float64), pair.b[rows].astype(np.float64)
    weight, found = base.rows(rows).astype(np.float64), merged.rows(rows).astype(np.float64)
    delta = scale * (b @ a)
    exact = weight + delta
    # float32's error of a sum of R products, of the scaling and of the addition, each by the size of what is added.
    float32_error = 2.0**-24 * ((len(a) + 2) * abs(scale) * (np.abs(b) @ np.abs(a)) + np.abs(exact))
    _, exponent = np.frexp(np.abs(exact))
    step = np.maximum(np.ldexp(1.0, exponent - 1 - _BITS[base.dtype]), _SMALLEST_STEP[base.dtype])
    error = found - exact
    wrong = int((~(np.abs(error) <= 0.5 * step + float32_error)).sum())
    return Block(wrong=wrong, lost=float(np.vdot(error, error)), added=float(np.vdot(delta, delta)))


def _norm(place: TensorPlace) -> float:
    assert place.dtype in DTYPES, place.dtype
    array = place.read()
    return float(
        np.sqrt(
            sum(
                float(np.square(array[rows].astype(np.float32)).sum(dtype=np.float64))
                for rows in row_blocks(place.shape)
            )
        )
    )


def print_checks(checks: Sequence[Check]) -> None:
    console = open_console()
    words: Mapping[bool | None, tuple[str, str]] = {
        True: ("ok  ", "green"),
        False: ("fail", "red"),
        None: ("not done", "yellow"),
    }
    for check in checks:
        console.print(Text.assemble(words[check.passed], f" {check.name}: {check.detail}"))
