"""Dollars: measured time at the price that the plan's record has for the machine. So what comes out is modelled."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gemsmith.bench_records import BenchCell
from gemsmith.plan_records import MachinePlan
from gemsmith.records import Machine
from gemsmith.report.findings import Findings, fastest_cell, trained_tokens

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class Price:
    """What an hour of the machine that trained costs on demand."""

    machine: str
    usd_per_hour: float
    basis: str = ""
    """Seller, source and date, where the plan tells."""

    def usd(self, seconds: float) -> float:
        return self.usd_per_hour * seconds / 3600

    def usd_per_million_output_tokens(self, cell: BenchCell) -> float | None:
        """None where the cell's throughput is zero, NaN or infinite."""
        return self._each(cell.output_tokens_per_s, 1e6)

    def usd_per_thousand_requests(self, cell: BenchCell) -> float | None:
        return self._each(cell.requests_per_s, 1e3)

    def _each(self, per_s: float, number: float) -> float | None:
        return self.usd(number / per_s) if math.isfinite(per_s) and per_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Dollars of the stages that ran on the machine that trained."""

    price: Price
    stages: dict[str, float]
    training: float | None
    per_million_trained_tokens: float | None
    """Over the steps' time alone, which is what more of them would cost."""
    served: BenchCell | None
    """The cell with the most output tokens/s, where the server ran on that machine."""

    @property
    def total(self) -> float:
        return sum(self.stages.values())


def trained_machine(findings: Findings) -> MachinePlan | None:
    """The plan's machine that training ran on; None where its record does not tell which that was."""
    if findings.plan is None or findings.train is None:
        return None
    if findings.train.against_plan is not None:
        named = findings.train.against_plan.machine
        return next((machine for machine in findings.plan.machines if machine.name == named), None)
    devices = findings.train.origin.machine.accelerators
    same = [machine for machine in findings.plan.machines if _has_devices(machine, devices)]
    return same[0] if len(same) == 1 else None


def _has_devices(machine: MachinePlan, devices: Sequence[str]) -> bool:
    """Whether a machine of this name has just these devices, named as their drivers do.

    >>> machine = MachinePlan.model_construct(name="2xh100", chips=2)
    >>> _has_devices(machine, ["NVIDIA H100 80GB HBM3"] * 2), _has_devices(machine, ["TPU v5"] * 2)
    (True, False)
    """
    if not devices or machine.name == CPU:
        return not devices and machine.name == CPU
    kind = devices[0].lower()
    if kind.startswith("tpu"):
        generation = "".join(re.findall(r"\d+", kind)[:1])
        light = kind.endswith(("lite", "e"))
        named = re.match(rf"(?:v|tpu){generation}(e|x|p)?", machine.name)
        # A chip may be one device or two; v6e is called lite too.
        return named is not None and light == (named[1] == "e") and len(devices) in (machine.chips, 2 * machine.chips)
    chip = machine.name.partition("x")[2]
    return bool(chip) and chip.partition("-")[0] in kind and len(devices) == machine.chips


def price_of(machine: MachinePlan) -> Price | None:
    """What the plan reckoned an hour with; None where it has no cost, by which plans of earlier versions tell it."""
    if machine.price is not None:
        basis = f"{machine.price.basis}, {machine.price.date}"
        return Price(machine=machine.name, usd_per_hour=machine.price.usd_per_hour, basis=basis)
    if machine.usd is None or machine.hours is None or not machine.hours[1]:
        return None
    return Price(machine=machine.name, usd_per_hour=machine.usd[1] / machine.hours[1])


def spent(findings: Findings) -> Spent | None:
    """None where it is not known which machine of the plan trained, or the plan has no price of it."""
    machine = trained_machine(findings)
    price = None if machine is None else price_of(machine)
    if price is None or findings.train is None:
        return None
    where = _without_devices(findings.train.origin.machine)
    stages = {
        stage: price.usd(record.origin.duration_s)
        for stage, record in findings.records().items()
        if _without_devices(record.origin.machine) == where
    }
    tokens, seconds = trained_tokens(findings.train), sum(step.step_s for step in findings.train.steps)
    return Spent(
        price=price,
        stages=stages,
        training=stages["train"],
        per_million_trained_tokens=price.usd(seconds) * 1e6 / tokens if tokens and math.isfinite(seconds) else None,
        served=fastest_cell(findings.bench) if findings.bench and _served_there(findings, where) else None,
    )


def _served_there(findings: Findings, where: Machine) -> bool:
    bench = findings.bench
    if bench is None or _without_devices(bench.origin.machine) != where:
        return False
    return bench.endpoint.get("url", "").startswith(("http://127.0.0.1", "http://localhost"))


def _without_devices(machine: Machine) -> Machine:
    """Only training's record names the accelerators."""
    return machine.model_copy(update={"accelerators": ()})
