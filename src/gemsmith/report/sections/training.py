"""What was run and made from what, what it was trained on, how training went, and whether the export is right."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from gemsmith.analysis.summary import RunRecords, count_checks, trained_tokens
from gemsmith.recipe.schema import Recipe
from gemsmith.report.charts import training_charts
from gemsmith.runs.records import Computer, TrainRecord
from gemsmith.system.format import count, plain

_STEP_ROWS, _ANSWERS = 24, 4
T = TypeVar("T")


def make_training(findings: RunRecords) -> dict[str, Any]:
    """Charts, some of the steps and of the sample answers, and how many tokens all steps had."""
    train = findings.train
    steps = train.steps if train else ()
    counts = [step.loss_tokens for step in steps]
    answers: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for evaluation in _spread([one for one in train.evaluations if one.answers] if train else [], _ANSWERS):
        for each in evaluation.answers:
            answers.setdefault((each.prompt, each.expected), []).append((evaluation.step, each.answer))
    return {
        "answers": answers,
        "charts": training_charts(train, findings.run.recipe.optimizer.max_grad_norm) if train else [],
        "step_rows": _spread(steps, _STEP_ROWS),
        "tokens": trained_tokens(train) if train else 0,
        "loss_tokens": sum(counts) if None not in counts else None,
    }


def _spread(items: Sequence[T], most: int) -> Sequence[T]:
    """All, or so many of them evenly spread, with the first and the last."""
    last = len(items) - 1
    return items if last < most else [items[round(row * last / (most - 1))] for row in range(most)]


def make_about(findings: RunRecords) -> dict[str, Any]:
    """Names and values, machines with the stages that ran on them, packages with each version that a stage had."""
    machines: dict[Computer, list[str]] = {}
    versions: dict[str, set[str]] = {}
    for stage, record in findings.records().items():
        machines.setdefault(record.provenance.machine, []).append(stage)
        for name, version in {"gemsmith": record.provenance.gemsmith, **record.provenance.versions}.items():
            versions.setdefault(name, set()).add(version)
    order = sorted(versions, key=lambda name: (name != "gemsmith", name.lower()))
    return {
        "settings": list(_settings(findings.run.recipe, findings.train)),
        "machines": list(machines.items()),
        "versions": {name: sorted(versions[name]) for name in order},
    }


def _settings(recipe: Recipe, trained: TrainRecord | None) -> Iterator[tuple[str, str]]:
    """The recipe in a few lines."""
    lora, optimizer, train = recipe.lora, recipe.optimizer, recipe.train
    rows = recipe.data.train
    if isinstance(rows, tuple):
        yield "Data", ", ".join(f"{one.path} × {plain(one.weight)}" for one in rows)
    else:
        yield "Data", rows if isinstance(rows, str) else f"{count(rows.rows)} made rows of the {rows.task} task"
    dropout = f", dropout {plain(lora.dropout)}" if lora.dropout else ""
    scale = f"{'rsLoRA with ' if lora.rslora else ''}alpha {plain(lora.alpha)}"
    if train.method == "full":
        yield "Trained", "every weight of the text model, in float32"
    else:
        yield "LoRA", f"rank {lora.rank}, {scale}{dropout}, on {', '.join(lora.targets)}"
    steps = trained.warmup_steps if optimizer.warmup_steps is None and trained else optimizer.warmup_steps
    if optimizer.warmup_ratio is not None:
        warmup = f"warm-up in {100 * optimizer.warmup_ratio:g} % of the steps"
    else:
        warmup = "warm-up in a tenth of the steps, at most 100" if steps is None else f"{count(steps)} warm-up steps"
    rate = f"peak {plain(optimizer.learning_rate)}, {optimizer.schedule}, {warmup}"
    clip = f"clip {plain(optimizer.max_grad_norm)}" if optimizer.max_grad_norm else "no clipping"
    yield "AdamW", f"{rate}, decay {plain(optimizer.weight_decay)}, {clip}"
    packed = "packed" if recipe.data.packing else "not packed"
    yield "Step", f"{train.global_batch_size} rows of {count(recipe.data.max_length)} tokens, {packed}"
    epochs = f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}"
    length = f"{count(train.max_steps)} steps" if train.max_steps else epochs
    yield "Length", f"{length}, backend {train.backend}, {train.dtype}, seed {recipe.seed}"


def make_data(findings: RunRecords) -> dict[str, Any]:
    """Shares of the positions, the longest document, rows that were read, and the contamination in words."""
    data = findings.data
    if data is None:
        return {}
    supervised = data.packing_efficiency * data.supervised_tokens / (data.tokens or 1)
    # How many held-out rows are trained on too: what eval saw counts over what data saw, which is older.
    scored = None if findings.eval is None else findings.eval.held_out_also_trained
    number, which = (
        (data.held_out_also_trained, "that data.eval named") if scored is None else (scored, "that were scored")
    )
    shared = "not told: no held-out rows were there to compare with"
    if number is not None:
        have = "has" if number <= 1 else "have"
        shared = f"{count(number) if number else 'none'} of the rows {which} {have} a prompt that is trained on"
    return {
        # What the positions of the packed rows hold: name, share, color.
        "positions": [
            ("tokens in the loss", supervised, "s1"),
            ("prompt and template tokens", data.packing_efficiency - supervised, "s1-soft"),
            ("padding", 1 - data.packing_efficiency, "line-strong"),
        ],
        "shared": shared,
    }


def make_provenance(findings: RunRecords) -> dict[str, Any]:
    """The records, and each line of the resolved recipe, cut in what it sets and why; none where the file is gone."""
    file = findings.run.recipe_file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {"records": findings.records(), "recipe_lines": [_cut_reason(line) for line in text.splitlines()]}


def _cut_reason(line: str) -> tuple[str, str]:
    """A line of the resolved recipe in two, after its value.

    >>> _cut_reason('  template: "a  # b"  # the checkpoint has one')
    ('  template: "a  # b"', '# the checkpoint has one')
    """
    key = re.match(r"\s*[\w-]+: ", line)
    if key is None:
        return line, ""
    try:
        _, end = json.JSONDecoder().raw_decode(line, key.end())
    except json.JSONDecodeError:
        return line, ""
    return line[:end], line[end:].strip()


def make_export(findings: RunRecords) -> dict[str, Any]:
    """How many checks passed, in words."""
    return {"checks": count_checks(findings.verify) if findings.verify else None}
