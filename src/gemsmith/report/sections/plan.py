"""The plan, and what became of it: memory and step time, modelled and measured."""

import statistics
from dataclasses import dataclass
from typing import Any

from gemsmith.plan_records import MachinePlan
from gemsmith.records import TrainRecord
from gemsmith.report import numbers
from gemsmith.report.cost import trained_machine
from gemsmith.report.findings import Findings
from gemsmith.run import Run
from gemsmith.train.timed import timed_steps

_RUNTIME = "runtime"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A bar of a waterfall: where it starts and how long it is, as shares of its full width."""

    name: str
    bytes: int
    start: float
    share: float
    colour: str


def make(_run: Run, findings: Findings) -> dict[str, Any]:
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
    for name, size in machine.parts.items():
        colour = "line-strong" if name == _RUNTIME else "s1-soft"
        parts.append(Part(name=name, bytes=size, start=start / width, share=size / width, colour=colour))
        start += size
    parts.append(Part(name="planned in all", bytes=planned, start=0, share=planned / width, colour="s1"))
    if used:
        colour = "s3" if used <= limit else "bad"
        parts.append(Part(name="used at the peak, measured", bytes=used, start=0, share=used / width, colour=colour))
    share, beyond = min(limit / width, 1), ", beyond the edge" if limit > width else ""
    parts.append(Part(name=f"limit of a chip{beyond}", bytes=limit, start=0, share=share, colour="line-strong"))
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
