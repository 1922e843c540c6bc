"""The stage `verify`: proof that merged/ is the base plus what was trained, and nothing else.

Nothing of the merge's own arithmetic is trusted: bytes are compared, weights recomputed in float64, logits are PEFT's.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.checkpoints.peft import Adapter, LoraPair, read_peft_adapter, some
from gemsmith.checkpoints.quantized import as_trained, with_trained
from gemsmith.checkpoints.safetensors import FLOATS, TensorPlace
from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import CheckpointError, CorruptCheckpointError, RunError
from gemsmith.export.adapters import NO_ADAPTER, delta_norm, read_run_adapter, read_run_weights
from gemsmith.export.merge import row_blocks
from gemsmith.runs.checksums import changed_files
from gemsmith.runs.records import Check, ExportRecord, VerifyRecord
from gemsmith.runs.run import ExportDir, Run, make_provenance, read_record, start_clock, write_record
from gemsmith.system.console import open_console
from gemsmith.system.files import sha256_file
from gemsmith.system.format import size
from gemsmith.verify.checks import check_losses, compare_other_files, make_check, report_checks, rounding_notices
from gemsmith.verify.logits import compare_logits
from gemsmith.verify.prompts import make_prompts, trained_rows

PACKAGES = ("numpy", "peft", "safetensors", "torch", "transformers")
# Tensors up to this many values are recomputed whole, larger ones in blocks spread over them.
_WHOLE_VALUES = 8 * 2**20
_SAMPLED_BLOCKS = 4
_BLOCK_VALUES = 2**20
# Significand bits: rounding to nearest is off by at most half of 2**-bits of the value's power of two.
_BITS = {"BF16": 7, "F16": 10, "F32": 23}
_SMALLEST_STEP = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}
# An adapter this much larger than its weight has run away; a strong one on a tiny model reaches about 1.
_LARGEST_RELATIVE_DELTA = 10.0
_NO_LOGITS = Check(name="logits", passed=None, detail="not compared, because other checks failed")


def verify(place: ExportDir, *, base_source: str | None = None) -> VerifyRecord:
    """Checks adapter/ and merged/ of a run, or of a folder that export wrote without one, and records each check.

    A folder's base is `base_source`, or that of its record. Raises VerifyError naming failed checks, once recorded.
    """
    clock, sources = start_clock(), {}
    exported: ExportRecord = read_record(place, ExportRecord)
    if isinstance(place, Run):
        base = open_checkpoint(place.recipe.checkpoint)
    else:
        base, file = open_checkpoint(base_source or exported.base), place.record_file("export")
        sources = {file.name: sha256_file(file), "base": base.fingerprint()}
    size_bytes = sum(file.bytes for file in exported.merged)
    open_console().print(
        f"verify: {size(size_bytes)} are compared with the base, then logits of transformers; minutes where they are "
        "many GB"
    )
    checks, found = _run_checks(exported, base, place)
    record = VerifyRecord(
        provenance=make_provenance(place, "verify", clock, packages=PACKAGES, sources=sources),
        passed=not _failed(checks),
        checks=tuple(checks),
        expected_tensors=exported.merged_tensors,
        **{"changed_tensors": 0, "logits_max_abs_difference": None} | found,
    )
    write_record(place, record)
    report_checks(record.checks, place.path)
    return record


Found = tuple[list[Check], dict[str, Any]]  # checks, and what else the record says of them


def _failed(checks: Sequence[Check]) -> bool:
    return any(check.passed is False for check in checks)


def _run_checks(exported: ExportRecord, base: Checkpoint, place: ExportDir) -> Found:
    run = place if isinstance(place, Run) else None
    changed_since = changed_files(place.adapter, exported.adapter) + changed_files(place.merged, exported.merged)
    checks = [make_check("files", changed_since, "as exported")]
    mark, other = base.fingerprint(), exported.base_sha256
    another = f"{base.source} has the fingerprint {mark[:12]}…, exported was from {other[:12]}…"
    checks.append(make_check("base", [another] if mark != other else [], "the one that was exported from"))
    if run and run.recipe.train.method == "full":
        return _check_full(run, exported, base, checks)
    try:
        adapter, merged = read_peft_adapter(place.adapter), open_checkpoint(str(place.merged))
    except CheckpointError as error:
        return [*checks, Check(name="readable", passed=False, detail=str(error))], {}
    trained_on = as_trained(base, run.recipe.train) if run else base
    into = trained_on if exported.merged_into == "trained" else base
    if run:
        checks.append(_check_trained(run, exported, adapter))
    others, same = compare_other_files(base, merged), "tokenizer, chat template and configs are the base's"
    tensors, changed = compare_tensors(into, merged, adapter)
    problems, rounding_loss = recompute(into, merged, adapter)
    checks += [make_check("other files", others, same), tensors]
    checks += [make_check("values", problems, "W + scale * B A, recomputed in float64"), _check_norms(base, adapter)]
    if _failed(checks):
        return [*checks, _NO_LOGITS], {"changed_tensors": changed}
    of_run = {"image_tokens": run.recipe.data.image_tokens, "seed": run.recipe.seed} if run else {}
    prompts = make_prompts(into, trained_rows(run) if run else None, adapter, **of_run)
    check, found = compare_logits(into, place.adapter, place.merged, adapter, prompts, trained_on=trained_on)
    dtypes = sorted({into.places[f"{module}.weight"].dtype for module in adapter.modules})
    effect, moved = found.get("logits_effect"), found.get("logits_rounding")
    found["warnings"] = rounding_notices(dtypes, lost=rounding_loss, effect=effect, moved=moved)
    found |= {"changed_tensors": changed, "rounding_loss": rounding_loss}
    return _with_losses([*checks, check], found, run, original=into is not trained_on)


def _with_losses(checks: list[Check], found: dict[str, Any], run: Run | None, *, original: bool) -> Found:
    """The same with the check of losses, where rows have targets."""
    if not run or not found.get("losses"):
        return checks, found
    check, told = check_losses(found["losses"], dtype=run.recipe.train.dtype, original=original)
    return [*checks, check], found | {"warnings": (*found.get("warnings", ()), *told)}


def _check_full(run: Run, exported: ExportRecord, base: Checkpoint, checks: list[Check]) -> Found:
    """The same where weights were trained: those are the step's in the base's dtype, others the base's, bit for bit."""
    try:
        merged = open_checkpoint(str(run.merged))
        checks.append(make_check("other files", compare_other_files(base, merged), "all are the base's"))
        weights = read_run_weights(run, exported.step)
        trained = with_trained(base, weights)
    except (CheckpointError, RunError) as error:
        detail = f"not compared with step {exported.step}: {error}"
        gone = isinstance(error, CorruptCheckpointError | RunError)  # the step, which training may have deleted
        return [*checks, Check(name="tensors", passed=None if gone else False, detail=detail)], {}
    tensors, changed = compare_tensors(trained, merged, NO_ADAPTER)[0], compare_tensors(base, merged, NO_ADAPTER)[1]
    detail = f"those of step {exported.step}, rounded to the base's dtype, {changed} of them other than the base's"
    passed = f"{len(weights)} are {detail}; the other {len(base.places) - len(weights)} are the base's"
    problems = [] if changed else ["training changed nothing: every tensor is the base's"]
    checks.append(make_check("tensors", problems, passed) if tensors.passed else tensors)
    if _failed(checks):
        return [*checks, _NO_LOGITS], {"changed_tensors": changed}
    rows, recipe = trained_rows(run), run.recipe
    prompts = make_prompts(base, rows, NO_ADAPTER, image_tokens=recipe.data.image_tokens, seed=recipe.seed)
    check, found = compare_logits(base, run.adapter, run.merged, weights, prompts)
    return _with_losses([*checks, check], found | {"changed_tensors": changed}, run, original=False)


def _check_trained(run: Run, exported: ExportRecord, adapter: Adapter) -> Check:
    """adapter/ is what training saved at that step, bit for bit; training may since have deleted the step."""
    if exported.step not in checkpoint_steps(run.checkpoints):
        detail = f"not compared: step {exported.step} is no longer among the checkpoints"
        return Check(name="adapter", passed=None, detail=detail)
    try:
        saved = read_run_adapter(run, exported.step)
    except CorruptCheckpointError as error:
        return Check(name="adapter", passed=None, detail=f"not compared: {error}")
    except (CheckpointError, RunError) as error:
        return Check(name="adapter", passed=False, detail=str(error))
    problems = [f"{name} is missing or not trained" for name in sorted(saved.modules.keys() ^ adapter.modules.keys())]
    if (saved.rank, saved.alpha) != (adapter.rank, adapter.alpha):
        trained = f"trained were {saved.rank}, {saved.alpha:g}"
        problems.append(f"rank and alpha are {adapter.rank}, {adapter.alpha:g}; {trained}")
    if saved.rslora != adapter.rslora:
        problems.append(f"use_rslora is {adapter.rslora}, trained was {saved.rslora}")
    for name in sorted(saved.modules.keys() & adapter.modules.keys()):
        one, other = saved.modules[name], adapter.modules[name]
        if not (np.array_equal(one.a, other.a) and np.array_equal(one.b, other.b)):
            problems.append(f"{name} is not what step {exported.step} saved")
    return make_check("adapter", problems, f"{len(saved.modules)} modules, bit for bit those of step {exported.step}")


def compare_tensors(base: Checkpoint, merged: Checkpoint, adapter: Adapter) -> tuple[Check, int]:
    """Every tensor of both folders, byte by byte: those with an adapter must differ, all others must not; how many do.

    Where rounding gives a weak adapter's weights again, all are recomputed. `base`: as trained on, if merged into that.
    """
    problems = [f"{name} is missing" for name in sorted(base.places.keys() - merged.places.keys())]
    problems += [f"{name} is extra" for name in sorted(merged.places.keys() - base.places.keys())]
    changed, swallowed = 0, []
    for name in sorted(base.places.keys() & merged.places.keys()):
        one, other, module = base.places[name], merged.places[name], name.removesuffix(".weight")
        adapted, blocks = module != name and module in adapter.modules, [*row_blocks(one.matrix, _BLOCK_VALUES)]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            problems.append(f"{name} is {other.dtype} {list(other.shape)}, the base's is {one.dtype} {list(one.shape)}")
        elif any(one.rows(rows).tobytes() != other.rows(rows).tobytes() for rows in blocks):
            changed += 1
            if not adapted:
                problems.append(f"{name} differs from the base and has no adapter")
        elif adapted:
            pair = adapter.modules[module]
            if not _fits(pair, one) or any(_compare_block(one, other, pair, adapter.scale, rows)[0] for rows in blocks):
                problems.append(f"{name} has an adapter and is the base's")
            else:
                swallowed.append(name)
    if swallowed and not changed:
        problems.append(
            f"the adapter changes nothing: rounding gives the base's weights again in all {len(swallowed)} tensors"
        )
    held = ", dequantized as it was trained on" if any(place.held for place in base.places.values()) else ""
    detail = f"{changed} of {len(base.places)} tensors differ from the base{held}, as expected"
    if swallowed:
        weak = "have adapters so weak that rounding gives the base's weights again"
        detail += f"; {len(swallowed)} more {weak} ({some(swallowed)})"
    return make_check("tensors", problems, detail), changed


def recompute(base: Checkpoint, merged: Checkpoint, adapter: Adapter) -> tuple[list[str], float | None]:
    """Which merged weights are not W + scale * B A in float64, but for rounding; rounding's share of the change."""
    problems, lost, added = [], 0.0, 0.0
    for module, pair in adapter.modules.items():
        name = f"{module}.weight"
        one, other = base.places.get(name), merged.places.get(name)
        if one is None or other is None or one.shape != other.shape:
            continue  # compare_tensors has named it
        if not _fits(pair, one):
            problems.append(f"{name} is {list(one.shape)}, its adapter is for {[len(pair.b), pair.a.shape[1]]}")
            continue
        wrong = 0
        for rows in _sample(one):
            wrong_here, lost_here, added_here = _compare_block(one, other, pair, adapter.scale, rows)
            wrong, lost, added = wrong + wrong_here, lost + lost_here, added + added_here
        if wrong:
            problems.append(f"{name} has {wrong} values that are not W + scale * B A")
    return problems, math.sqrt(lost / added) if added else None


def _fits(pair: LoraPair, place: TensorPlace) -> bool:
    return (len(pair.b), pair.a.shape[1]) == place.shape


def _sample(place: TensorPlace) -> list[slice]:
    """All blocks of rows of a small matrix; of a large one the first, the last and some between."""
    blocks = list(row_blocks(place.shape, _BLOCK_VALUES))
    if math.prod(place.shape) <= _WHOLE_VALUES:
        return blocks
    chosen = np.linspace(0, len(blocks) - 1, min(_SAMPLED_BLOCKS, len(blocks))).astype(int)
    return [blocks[number] for number in sorted(set(chosen.tolist()))]


def _compare_block(
    base: TensorPlace, merged: TensorPlace, pair: LoraPair, scale: float, rows: slice
) -> tuple[int, float, float]:
    """How many values are wrong, and the sums of squares of what rounding took and of what the adapter adds."""
    a, b = pair.a.astype(np.float64), pair.b[rows].astype(np.float64)
    weight, found = base.rows(rows).astype(np.float64), merged.rows(rows).astype(np.float64)
    delta = scale * (b @ a)
    exact = weight + delta
    # float32's error of a sum of R products, of the scaling and of the addition, each by the size of what is added.
    float32_error = 2.0**-24 * ((len(a) + 2) * abs(scale) * (np.abs(b) @ np.abs(a)) + np.abs(exact))
    _, exponent = np.frexp(np.abs(exact))
    step = np.maximum(np.ldexp(1.0, exponent - 1 - _BITS[base.dtype]), _SMALLEST_STEP[base.dtype])
    error = found - exact
    # Within float32's own error of the middle between two of the base's values, either is right.
    wrong = int((~(np.abs(error) <= 0.5 * step + float32_error)).sum())
    return wrong, float(np.vdot(error, error)), float(np.vdot(delta, delta))


def _check_norms(base: Checkpoint, adapter: Adapter) -> Check:
    """Of each module, the norm of what its adapter adds over the norm of its weight."""
    ratios = {}
    for module, pair in adapter.modules.items():
        if place := base.places.get(f"{module}.weight"):
            assert place.dtype in FLOATS, place.dtype
            blocks = (place.rows(rows).astype(np.float32) for rows in row_blocks(place.matrix))
            squares = sum(float(np.square(block).sum(dtype=np.float64)) for block in blocks)
            ratios[module] = delta_norm(pair, adapter.scale) / max(math.sqrt(squares), 1e-30)
    problems = [
        f"{module}: its adapter has {ratio:.3g} times the norm of its weight"
        for module, ratio in ratios.items()
        if not 0 < ratio < _LARGEST_RELATIVE_DELTA
    ]
    least, most = min(ratios.values(), default=0), max(ratios.values(), default=0)
    return make_check("norms", problems, f"adapters have {least:.2g} to {most:.2g} of their weights' norms")
