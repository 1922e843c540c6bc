"""What was run: model, settings, machines, versions."""

from collections.abc import Iterator
from typing import Any

from gemsmith.recipe import Optimizer
from gemsmith.records import Machine, TrainRecord
from gemsmith.report import numbers
from gemsmith.report.findings import Findings
from gemsmith.run import Run


def make(run: Run, findings: Findings) -> dict[str, Any]:
    """Names and values, machines with their stages, packages with their versions."""
    return {
        "model": findings.model(run.recipe),
        "settings": list(_settings(run, findings.train)),
        "machines": _machines(findings),
        "versions": _versions(findings),
    }


def _machines(findings: Findings) -> list[tuple[Machine, list[str]]]:
    """Each machine, with the stages that ran on it."""
    machines: dict[Machine, list[str]] = {}
    for stage, record in findings.records().items():
        machines.setdefault(record.origin.machine, []).append(stage)
    return list(machines.items())


def _versions(findings: Findings) -> dict[str, list[str]]:
    """Package -> the versions that took part.

    More than one where stages differ, as training's and serving's environments may.
    """
    versions: dict[str, set[str]] = {}
    for record in findings.records().values():
        for name, version in {"gemsmith": record.origin.gemsmith, **record.origin.versions}.items():
            versions.setdefault(name, set()).add(version)
    return {
        name: sorted(versions[name]) for name in sorted(versions, key=lambda name: (name != "gemsmith", name.lower()))
    }


def _warmup(optimizer: Optimizer, trained: TrainRecord | None) -> str:
    if optimizer.warmup_ratio is not None:
        return f"warm-up in {100 * optimizer.warmup_ratio:g} % of the steps"
    steps = optimizer.warmup_steps
    if trained is not None and steps is None:
        steps = 100 if trained.warmup_steps is None else trained.warmup_steps  # see TrainRecord
    return "warm-up in a tenth of the steps, at most 100" if steps is None else f"{numbers.count(steps)} warm-up steps"


def _settings(run: Run, trained: TrainRecord | None) -> Iterator[tuple[str, str]]:
    """The recipe in a few lines."""
    recipe = run.recipe
    lora, optimizer, train = recipe.lora, recipe.optimizer, recipe.train
    rows = recipe.data.train
    yield "Data", rows if isinstance(rows, str) else f"{numbers.count(rows.rows)} made rows of the {rows.task} task"
    dropout = f", dropout {numbers.plain(lora.dropout)}" if lora.dropout else ""
    scale = f"{'rsLoRA with ' if lora.rslora else ''}alpha {numbers.plain(lora.alpha)}"
    yield "LoRA", f"rank {lora.rank}, {scale}{dropout}, on {', '.join(lora.targets)}"
    decay = f"decay {numbers.plain(optimizer.weight_decay)}"
    clip = f"clip {numbers.plain(optimizer.clip_norm)}" if optimizer.clip_norm else "no clipping"
    yield (
        "AdamW",
        f"peak {numbers.plain(optimizer.learning_rate)}, {optimizer.schedule}, {_warmup(optimizer, trained)}, {decay}, "
        f"{clip}",
    )
    packed = "packed" if recipe.data.packing else "not packed"
    yield "Step", f"{train.rows_per_step} rows of {numbers.count(recipe.data.max_length)} tokens, {packed}"
    length = (
        f"{numbers.count(train.optimizer_steps)} steps"
        if train.optimizer_steps
        else f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}"
    )
    yield "Length", f"{length}, backend {train.backend}, {train.dtype}, seed {recipe.seed}"
