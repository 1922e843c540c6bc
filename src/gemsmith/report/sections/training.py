"""Training's curves, and its steps as a table.

What was run: model, settings, machines, versions.

What was trained on: rows, tokens, packing, what was dropped and why, images, and what is held out too.
"""

from collections.abc import Iterator
from typing import Any

from gemsmith.analysis.summary import RunRecords, trained_tokens
from gemsmith.recipe.schema import Optimizer
from gemsmith.report.run_charts import training_charts
from gemsmith.runs.records import DataRecord, Machine, TrainRecord, TrainStep
from gemsmith.runs.run import Run
from gemsmith.system import format as numbers

_STEP_ROWS = 24


def make_training(run: Run, findings: RunRecords) -> dict[str, Any]:
    """Charts, some of the steps, and how many tokens they had."""
    train = findings.train
    counts = [step.loss_tokens for step in train.steps] if train else []
    return {
        "charts": training_charts(train, run.recipe.optimizer.max_grad_norm) if train else [],
        "step_rows": _step_rows(train) if train else [],
        "tokens": trained_tokens(train) if train else 0,
        "loss_tokens": sum(counts) if None not in counts else None,
    }


def _step_rows(train: TrainRecord) -> list[TrainStep]:
    """Some steps, evenly spread, with the first and the last."""
    last = len(train.steps) - 1
    if last < _STEP_ROWS:
        return list(train.steps)
    return [train.steps[round(row * last / (_STEP_ROWS - 1))] for row in range(_STEP_ROWS)]


def make_about(run: Run, findings: RunRecords) -> dict[str, Any]:
    """Names and values, machines with their stages, packages with their versions."""
    return {
        "model": findings.model(run.recipe),
        "settings": list(_settings(run, findings.train)),
        "machines": _machines(findings),
        "versions": _versions(findings),
    }


def _machines(findings: RunRecords) -> list[tuple[Machine, list[str]]]:
    """Each machine, with the stages that ran on it."""
    machines: dict[Machine, list[str]] = {}
    for stage, record in findings.records().items():
        machines.setdefault(record.origin.machine, []).append(stage)
    return list(machines.items())


def _versions(findings: RunRecords) -> dict[str, list[str]]:
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
    clip = f"clip {numbers.plain(optimizer.max_grad_norm)}" if optimizer.max_grad_norm else "no clipping"
    yield (
        "AdamW",
        f"peak {numbers.plain(optimizer.learning_rate)}, {optimizer.schedule}, {_warmup(optimizer, trained)}, {decay}, "
        f"{clip}",
    )
    packed = "packed" if recipe.data.packing else "not packed"
    yield "Step", f"{train.global_batch_size} rows of {numbers.count(recipe.data.max_length)} tokens, {packed}"
    length = (
        f"{numbers.count(train.max_steps)} steps"
        if train.max_steps
        else f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}"
    )
    yield "Length", f"{length}, backend {train.backend}, {train.dtype}, seed {recipe.seed}"


def make_data(_run: Run, findings: RunRecords) -> dict[str, Any]:
    """Shares of the positions, the longest document, rows that were read, and the contamination in words."""
    data = findings.data
    if data is None:
        return {"positions": [], "longest_tokens": 1, "rows_read": 0, "images": [], "shared": "", "shared_more": []}
    return {
        "positions": _positions(data),
        "longest_tokens": max((1, *data.length_percentiles.values())),
        "rows_read": data.rows + sum(data.dropped.values()),
        "images": _images(data),
        "shared": _shared(findings),
        "shared_more": _shared_more(data),
    }


def _positions(data: DataRecord) -> list[tuple[str, float, str]]:
    """What the positions of the packed rows hold, as shares of 1: name, share, color."""
    if not data.tokens:
        return []
    supervised = data.packing_efficiency * data.supervised_tokens / data.tokens
    return [
        ("tokens in the loss", supervised, "s1"),
        ("prompt and template tokens", data.packing_efficiency - supervised, "s1-soft"),
        ("padding", 1 - data.packing_efficiency, "line-strong"),
    ]


def _images(data: DataRecord) -> list[tuple[str, str]]:
    """Facts of the images; none where there are none."""
    if not data.images:
        return []
    return [
        ("Images", numbers.count(data.images)),
        ("Soft tokens of images", f"{numbers.count(data.soft_tokens)} of the tokens"),
        ("Soft tokens a image, mean", numbers.decimal(data.soft_tokens / data.images)),
        ("Patches of a row, at most", numbers.count(data.most_patches)),
    ]


def _shared(findings: RunRecords) -> str:
    """How many held-out rows are trained on too: what eval saw counts over what data saw, which is older."""
    scored = None if findings.eval is None else findings.eval.held_out_also_trained
    prepared = None if findings.data is None else findings.data.held_out_also_trained
    number = prepared if scored is None else scored
    if number is None:
        return "not told: no held-out rows were there to compare with"
    which = "that data.eval named" if scored is None else "that were scored"
    have = "has" if number <= 1 else "have"
    return f"{numbers.count(number) if number else 'none'} of the rows {which} {have} a prompt that is trained on"


def _shared_more(data: DataRecord) -> list[tuple[str, str]]:
    """What the data stage has compared of the held-out rows, and what nobody has."""
    found = data.held_out
    if found is None:
        return []
    rows = [
        (
            "Held out, prompt and answer trained on",
            f"{numbers.count(found.same_answer)} of {numbers.count(found.rows)} rows",
        )
    ]
    if found.same_image is not None:
        image = f"{numbers.count(found.same_image)} of {numbers.count(found.rows)} rows"
        rows.append(("Held out, a image of it trained on", image))
    return [
        *rows,
        ("Held out and nearly trained on", "not looked for: prompts are compared whole, but for white space"),
    ]
