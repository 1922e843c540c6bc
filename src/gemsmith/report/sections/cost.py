"""Plan, time and cost: memory and step time estimated and measured, where the time went, and what it cost."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.cost import ActualCost, actual_cost, why_no_cost
from gemsmith.analysis.sides import planned_machine
from gemsmith.analysis.summary import RunRecords, stage_s, total_s
from gemsmith.runs.bench_records import BenchCell
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.stages import STAGES
from gemsmith.system.format import duration, rough, size, span
from gemsmith.train.logging import timed_steps


def make_plan(findings: RunRecords) -> dict[str, Any]:
    """The memory of the machine that trained, or without training of the first planned one, and its step time."""
    train = findings.train
    machine = planned_machine(findings.plan, train.machine) if train else None
    shown = machine or (findings.plan.machines[0] if findings.plan and findings.plan.machines else None)
    used, steps = None, None
    if machine and train:
        used = train.peak_memory_bytes
        times = [step.step_s for step in timed_steps(train.steps, train.resumed_at)]
        if times:
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
    inner: bool = False
    """Part of the stage above it."""
    reckoned: bool = False
    """From what others took, not timed itself."""
    missing: bool = False


def make_time(findings: RunRecords) -> dict[str, Any]:
    """The waterfall, and dollars for each stage and each cell."""
    found = actual_cost(findings)
    return {
        "spans": stage_spans(findings),
        "total_s": total_s(findings),
        "actual_cost": found,
        "why_no_cost": why_no_cost(findings),
        "served": served_cells(findings, found),
    }


def stage_spans(findings: RunRecords) -> list[StageSpan]:
    """Every stage after the one before it; training in its parts."""
    spans, at = [], 0.0
    for stage in STAGES:
        record = findings.records().get(stage)
        seconds = 0.0 if record is None else stage_s(record)
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
    saves_s, saves_words = 0.0, ""
    if saves := train.saves:
        saves_s = saves.s
        saves_words = f"{saves.number:,} save{'s' * (saves.number != 1)} of {size(saves.bytes)} in all, waited for"
    steps_s = sum(step.step_s for step in steps)
    rest_s = max(0.0, train.provenance.duration_s - train.compile_s - steps_s - saves_s)
    earlier_s = sum(step.step_s for step in train.steps if step.step <= begun)
    parts = [
        (f"{begun:,} steps of earlier starts", earlier_s, False),
        ("load and start: the rest", rest_s, True),
        ("compile, from the cache" if train.compiled_from_cache else "compile", train.compile_s, False),
        (f"{len(steps):,} steps", steps_s, False),
        (saves_words, saves_s, False),
    ]
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
    best: dict[tuple[int, int], BenchCell] = {}
    for cell in findings.bench.cells:
        if cell.completed and all(
            found.price.usd_of(1, each) for each in (cell.output_tokens_per_s, cell.requests_per_s)
        ):
            length = cell.input_tokens, cell.output_tokens
            best[length] = max(best.get(length, cell), cell, key=lambda cell: cell.output_tokens_per_s)
    return [best[length] for length in sorted(best)]
