"""The sections of the page, in order: numbers from the records, and a template of the section's name."""

import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gemsmith.analysis import summary
from gemsmith.analysis.cost import ActualCost, actual_cost, why_no_cost
from gemsmith.analysis.sides import planned_machine
from gemsmith.analysis.summary import RunRecords
from gemsmith.recipe.schema import Recipe
from gemsmith.report import scores
from gemsmith.report.bench_charts import load_charts, load_of
from gemsmith.report.charts import training_charts
from gemsmith.runs.bench_records import BenchCell, BenchRecord
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.records import Computer, ServerFacts, TrainRecord
from gemsmith.runs.stages import STAGES
from gemsmith.system.format import count, duration, plain, rough, size, span
from gemsmith.train.logging import timed_steps

_STEP_ROWS, _ANSWERS = 24, 4
_NAMES = {
    "version": "vLLM",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "KV cache dtype",
    "tensor_parallel": "tensor parallel",
    "data_parallel": "data parallel",
    "max_model_len": "longest context, tokens",
    "chunked_prefill": "chunked prefill",
    "prefix_caching": "prefix caching",
    "kv_blocks": "KV blocks",
    "kv_block_tokens": "tokens of a KV block",
    "kv_cache_tokens": "tokens that the KV cache holds",
}
"""What a server says of itself -> what the page calls that."""
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
        "tokens": summary.trained_tokens(train) if train else 0,
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
    if (data := findings.data) is None:
        return {}
    supervised = data.packing_efficiency * data.supervised_tokens / (data.tokens or 1)
    # How many held-out rows are trained on too: what eval saw counts over what data saw, which is older.
    seen = None if findings.eval is None else findings.eval.held_out_also_trained
    number, which = (data.held_out_also_trained, "that data.eval named") if seen is None else (seen, "that were scored")
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
    if (key := re.match(r"\s*[\w-]+: ", line)) is None:
        return line, ""
    try:
        _, end = json.JSONDecoder().raw_decode(line, key.end())
    except json.JSONDecodeError:
        return line, ""
    return line[:end], line[end:].strip()


def make_export(findings: RunRecords) -> dict[str, Any]:
    return {"checks": summary.count_checks(findings.verify) if findings.verify else None}


def make_use(findings: RunRecords) -> dict[str, Any]:
    """The run directory as a word of a command, and the tokens of prompt and answer that a server takes at once."""
    server, settings = findings.serve and findings.serve.server, findings.run.recipe.serve
    context = server.max_model_len if server and server.max_model_len else settings.max_model_len
    return {"folder": shlex.quote(findings.run.path.resolve().name), "context": context}


def make_serve(findings: RunRecords) -> dict[str, Any]:
    """`servers`: which stages' server -> name -> value in words; stages whose servers said the same share one."""
    told: dict[ServerFacts, list[str]] = {}
    for stage, record in (("serve", findings.serve), ("bench", findings.bench), ("eval", findings.eval)):
        if record is not None and record.server is not None:
            told.setdefault(record.server, []).append(stage)
    return {"servers": {", ".join(stages): server_rows(facts) for facts, stages in told.items()}, "names": _NAMES}


def server_rows(facts: ServerFacts) -> dict[str, str]:
    """Field -> what the server said; "not told" where it said nothing that could be read."""

    def said(name: str, value: str | int | bool | None) -> str:
        if value is None:
            return "not told"
        if isinstance(value, bool):
            return "on" if value else "off"
        if name == "kv_cache_dtype" and value == "auto":
            return "auto: as the weights"
        return value if isinstance(value, str) else count(value)

    return {name: said(name, getattr(facts, name)) for name in _NAMES}


def make_bench(findings: RunRecords) -> dict[str, Any]:
    if (bench := findings.bench) is None:
        return {}
    cells = sorted(bench.cells, key=lambda cell: (cell.input_tokens, cell.output_tokens, *load_of(cell)))
    return {"charts": load_charts(bench), "lengths": lengths(bench, cells), "cells": cells}


def lengths(bench: BenchRecord, cells: Sequence[BenchCell]) -> list[tuple[BenchCell, BenchCell, str | None]]:
    """For each length that completed a request its lightest and fastest cell, and with an SLO where it saturates."""
    found = []
    for key in dict.fromkeys((cell.input_tokens, cell.output_tokens) for cell in cells):
        row = [cell for cell in cells if (cell.input_tokens, cell.output_tokens) == key and cell.completed]
        saturates = (each for each in bench.saturations if (each.input_tokens, each.output_tokens) == key)
        if fastest := summary.fastest_cell(row):
            found.append((row[0], fastest, next(map(summary.saturation_rate, saturates), None)))
    return found


def make_plan(findings: RunRecords) -> dict[str, Any]:
    """The memory of the machine that trained, or without training of the first planned one, and its step time."""
    train = findings.train
    machine = planned_machine(findings.plan, train.machine) if train else None
    shown = machine or (findings.plan.machines[0] if findings.plan and findings.plan.machines else None)
    used, steps = None, None
    if machine and train:
        used = train.peak_memory_bytes
        if times := [step.step_s for step in timed_steps(train.steps, train.resumed_at)]:
            measured, (low, high) = statistics.median(times), machine.step_s
            where = "within" if low <= measured <= high else "below" if measured < low else "above"
            of = span(rough(low), rough(high))
            steps = f"A step took {duration(measured)} (median, measured), {where} the {of} of the plan."
    parts = memory_parts(shown, used) if shown and shown.parts else []
    return {"shown": shown, "used": used, "parts": parts, "steps": steps}


def memory_parts(machine: MachinePlan, used: int | None) -> list[tuple[str, int, float, float, str]]:
    """What the plan holds on a chip, one part after the other, then their sum, what was used, and the limit.

    Each is a bar: name, bytes, start and length as shares of the full width, color. The limit is the full width, or
    where what is held is less than a tenth of it, twice what is held.
    """
    planned = sum(machine.parts.values())
    most = max(planned, used or 0, 1)
    limit = machine.hbm_limit_bytes_per_chip
    width = max(limit, most) if 10 * most > limit else 2 * most
    rows, start = [], 0
    for name, held in machine.parts.items():
        rows.append((name, held, start, "line-strong" if name == "runtime" else "s1-soft"))
        start += held
    rows.append(("planned in all", planned, 0, "s1"))
    if used:
        rows.append(("used at the peak, measured", used, 0, "s3" if used <= limit else "bad"))
    rows.append((f"limit of a chip{', beyond the edge' if limit > width else ''}", limit, 0, "line-strong"))
    return [(name, held, start / width, min(held / width, 1), color) for name, held, start, color in rows]


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """A line of the waterfall: `start_s` seconds after the first stage's start, were there no pauses."""

    name: str
    start_s: float
    seconds: float
    inner: bool = False  # part of the stage above it
    reckoned: bool = False  # from what others took, not timed itself
    missing: bool = False


def make_time(findings: RunRecords) -> dict[str, Any]:
    found = actual_cost(findings)
    return {
        "spans": stage_spans(findings),
        "total_s": summary.total_s(findings),
        "actual_cost": found,
        "why_no_cost": why_no_cost(findings),
        "served": served_cells(findings, found),
    }


def stage_spans(findings: RunRecords) -> list[StageSpan]:
    """Every stage after the one before it; training in its parts."""
    spans, at = [], 0.0
    for stage in STAGES:
        record = findings.records().get(stage)
        seconds = 0.0 if record is None else summary.stage_s(record)
        spans.append(StageSpan(name=stage, start_s=at, seconds=seconds, missing=record is None))
        if isinstance(record, TrainRecord):
            spans += training_spans(record, at)
        at += seconds
    return spans


def training_spans(train: TrainRecord, start_s: float) -> list[StageSpan]:
    """The steps of earlier starts, whose rest no record has, then compile, steps, saves and the rest of the last."""
    begun = max(train.resumed_at, default=0)
    steps = [step for step in train.steps if step.step > begun and math.isfinite(step.step_s)]
    if not steps:
        return []
    saves_s = train.saves.s if train.saves else 0.0
    steps_s = sum(step.step_s for step in steps)
    rest_s = max(0.0, train.provenance.duration_s - train.compile_s - steps_s - saves_s)
    parts = [
        (f"{begun:,} steps of earlier starts", sum(step.step_s for step in train.steps if step.step <= begun), False),
        ("load and start: the rest", rest_s, True),
        ("compile, from the cache" if train.compiled_from_cache else "compile", train.compile_s, False),
        (f"{len(steps):,} steps", steps_s, False),
    ]
    if saves := train.saves:
        words = f"{saves.number:,} save{'s' * (saves.number != 1)} of {size(saves.bytes)} in all, waited for"
        parts.append((words, saves_s, False))
    spans, at = [], start_s
    for name, seconds, reckoned in parts:
        if seconds > 0:
            spans.append(StageSpan(name=name, start_s=at, seconds=seconds, inner=True, reckoned=reckoned))
        at += seconds
    return spans


def served_cells(findings: RunRecords, found: ActualCost | None) -> list[BenchCell]:
    """For each length the cell that costs least a token, where the server ran on the machine with a price."""
    if findings.bench is None or found is None or found.served is None or not found.price.usd_per_hour:
        return []
    price, best = found.price, dict[tuple[int, int], BenchCell]()
    for cell in findings.bench.cells:
        if cell.completed and all(price.usd_of(1, each) for each in (cell.output_tokens_per_s, cell.requests_per_s)):
            length = cell.input_tokens, cell.output_tokens
            best[length] = max(best.get(length, cell), cell, key=lambda cell: cell.output_tokens_per_s)
    return [best[length] for length in sorted(best)]


SECTIONS = {
    "scores": ("Scores", scores.make_scores),
    "labels": ("Labels", scores.make_labels),
    "use": ("Use this model", make_use),
    "training": ("Training", make_training),
    "data": ("Data", make_data),
    "about": ("About", make_about),
    "plan": ("Plan", make_plan),
    "export": ("Export", make_export),
    "serve": ("Server", make_serve),
    "bench": ("Load test", make_bench),
    "time": ("Time and cost", make_time),
    "provenance": ("Provenance", make_provenance),
}
"""Id -> title in the navigation, and what gives the names that `templates/<id>.html` shows, beside `recipe`, `found`
and the macros. A section whose template shows nothing is left out."""
