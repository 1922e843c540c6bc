"""The plan, and what became of it: memory and step time, estimated and measured.

Where the time went, stage by stage and within training, and what it cost.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from gemsmith.analysis.cost import ActualCost, HourPrice, actual_cost, trained_machine
from gemsmith.analysis.summary import RunRecords, stage_s, total_s
from gemsmith.runs.bench_records import BenchCell
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.records import TrainRecord, TrainSaves, TrainStep
from gemsmith.runs.run import Run
from gemsmith.runs.stages import STAGES
from gemsmith.system import format as numbers
from gemsmith.system.format import size
from gemsmith.train.logging import timed_steps

_RUNTIME = "runtime"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A bar of a waterfall: where it starts and how long it is, as shares of its full width."""

    name: str
    bytes: int
    start: float
    share: float
    color: str


def make_plan(_run: Run, findings: RunRecords) -> dict[str, Any]:
    """The memory of the machine that trained, or without training of the first planned one, and its step time."""
    trained = trained_machine(findings)
    shown = trained or (findings.plan.machines[0] if findings.plan and findings.plan.machines else None)
    used = findings.train.peak_memory_bytes if trained and findings.train else None
    return {
        "shown": shown,
        "used": used,
        "parts": memory_parts(shown, used) if shown and shown.parts else [],
        "steps": _steps(trained, findings.train) if trained and findings.train else None,
    }


def memory_parts(machine: MachinePlan, used: int | None) -> list[Part]:
    """What the plan holds on a chip, one part after the other, then their sum, what was used, and the limit.

    The limit is the full width, or where what is held is less than a tenth of it, twice what is held.
    """
    planned = sum(machine.parts.values())
    most = max(planned, used or 0, 1)
    limit = machine.hbm_limit_bytes_per_chip
    width = max(limit, most) if 10 * most > limit else 2 * most
    parts, start = [], 0
    for name, part_bytes in machine.parts.items():
        color = "line-strong" if name == _RUNTIME else "s1-soft"
        parts.append(Part(name=name, bytes=part_bytes, start=start / width, share=part_bytes / width, color=color))
        start += part_bytes
    parts.append(Part(name="planned in all", bytes=planned, start=0, share=planned / width, color="s1"))
    if used:
        color = "s3" if used <= limit else "bad"
        parts.append(Part(name="used at the peak, measured", bytes=used, start=0, share=used / width, color=color))
    share, beyond = min(limit / width, 1), ", beyond the edge" if limit > width else ""
    parts.append(Part(name=f"limit of a chip{beyond}", bytes=limit, start=0, share=share, color="line-strong"))
    return parts


def _steps(machine: MachinePlan, train: TrainRecord) -> str | None:
    """A step's time, planned and measured."""
    times = [step.step_s for step in timed_steps(train.steps, train.resumed_at)]
    if not times:
        return None
    measured, (low, high) = statistics.median(times), machine.step_s
    where = "within" if low <= measured <= high else "below" if measured < low else "above"
    planned = numbers.span(numbers.rough(low), numbers.rough(high))
    return f"A step took {numbers.duration(measured)} (median, measured), {where} the {planned} of the plan."


@dataclass(frozen=True, kw_only=True)
class Span:
    """A line of the waterfall: `start_s` seconds after the first stage's start, were there no pauses."""

    name: str
    start_s: float
    seconds: float
    inner: bool = False
    """Part of the stage above it."""
    reckoned: bool = False
    """From what others took, not timed itself."""
    missing: bool = False


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a served cell would cost if it went on."""

    cell: BenchCell
    per_million_tokens: float
    per_thousand_requests: float


def make_time(run: Run, findings: RunRecords) -> dict[str, Any]:
    """The waterfall, and dollars for each stage and each cell."""
    found = actual_cost(findings)
    return {
        "spans": stage_spans(findings, run.recipe.train.save_steps),
        "total_s": total_s(findings),
        "actual_cost": found,
        "served": served_costs(findings, found),
    }


def stage_spans(findings: RunRecords, save_steps: int) -> list[Span]:
    """Every stage after the one before it; training in its parts."""
    spans, at = [], 0.0
    for stage in STAGES:
        record = findings.records().get(stage)
        if record is None:
            spans.append(Span(name=stage, start_s=at, seconds=0.0, missing=True))
            continue
        spans.append(Span(name=stage, start_s=at, seconds=stage_s(record)))
        if isinstance(record, TrainRecord):
            spans += training_spans(record, at, save_steps)
        at += stage_s(record)
    return spans


def training_spans(train: TrainRecord, start_s: float, save_steps: int) -> list[Span]:
    """The steps of earlier starts, then compile, steps, saves and the rest of the last one.

    What earlier starts took beside their steps is in no record. One from before it told of saves has what steps next to
    them took above the others instead.
    """
    begun = max(train.resumed_at, default=0)
    steps = [step for step in train.steps if step.step > begun and math.isfinite(step.step_s)]
    if not steps:
        return []
    saves = train.saves
    beside_s = 0.0 if saves else _above_others(steps, begun, save_steps)
    saves_s = saves.s if saves else 0.0
    steps_s = sum(step.step_s for step in steps)
    rest_s = max(0.0, train.origin.duration_s - train.compile_s - steps_s - saves_s)
    earlier_s = sum(step.step_s for step in train.steps if step.step <= begun)
    parts = [
        (f"{begun:,} steps of earlier starts", earlier_s, False),
        ("load and start: the rest" if saves else "load, start and last save: the rest", rest_s, True),
        ("compile, from the cache" if train.compiled_from_cache else "compile", train.compile_s, False),
        (f"{len(steps):,} steps", steps_s - beside_s, False),
        ("what steps next to saves took above the others", beside_s, True),
        (_save_words(saves) if saves else "", saves_s, False),
    ]
    spans, at = [], start_s
    for name, seconds, reckoned in parts:
        if seconds > 0:
            spans.append(Span(name=name, start_s=at, seconds=seconds, inner=True, reckoned=reckoned))
        at += seconds
    return spans


def _save_words(saves: TrainSaves) -> str:
    return f"{saves.number:,} save{'s' if saves.number != 1 else ''} of {size(saves.bytes)} in all, waited for"


def _above_others(steps: list[TrainStep], begun: int, every: int) -> float:
    """Seconds of the steps at and after a save beyond the median of the rest; the first step warms up."""
    beside: list[float] = []
    others: list[float] = []
    for step in steps[1:]:
        (beside if step.step - begun > 1 and step.step % every in (0, 1 % every) else others).append(step.step_s)
    if not beside or not others:
        return 0.0
    return max(0.0, sum(beside) - len(beside) * statistics.median(others))


def served_costs(findings: RunRecords, found: ActualCost | None) -> list[Served]:
    """For each length the cell that costs least a token, where the server ran on the machine with a price."""
    if findings.bench is None or found is None or found.served is None or not found.price.usd_per_hour:
        return []
    best: dict[tuple[int, int], Served] = {}
    for cell in findings.bench.cells:
        cost = _served(cell, found.price)
        length = cell.input_tokens, cell.output_tokens
        if cost and (length not in best or cost.per_million_tokens < best[length].per_million_tokens):
            best[length] = cost
    return [best[length] for length in sorted(best)]


def _served(cell: BenchCell, price: HourPrice) -> Served | None:
    tokens, requests = price.usd_per_million_output_tokens(cell), price.usd_per_thousand_requests(cell)
    if not cell.completed or tokens is None or requests is None:
        return None
    return Served(cell=cell, per_million_tokens=tokens, per_thousand_requests=requests)
