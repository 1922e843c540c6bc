"""Dollars: measured time at the price that the plan's record has for the machine. So what comes out is modelled."""

import math
from dataclasses import dataclass

from gemsmith.bench_records import BenchCell
from gemsmith.compare.run_side import served_where_trained
from gemsmith.plan_records import MachinePlan
from gemsmith.report.findings import Findings, fastest_cell, stage_s, trained_tokens


@dataclass(frozen=True, kw_only=True)
class Price:
    """What an hour of the machine that trained costs on demand."""

    machine: str
    usd_per_hour: float
    basis: str = ""
    """Seller, source and date."""

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
    training: float
    per_million_trained_tokens: float | None
    """`training` over all real tokens of its steps."""
    served: BenchCell | None
    """The cell with the most output tokens/s, where the server ran on that machine."""

    @property
    def total(self) -> float:
        return sum(self.stages.values())


def trained_machine(findings: Findings) -> MachinePlan | None:
    """The plan's row of the machine that trained; None where the record does not name it, or the plan has it not."""
    trained_on = findings.train.machine if findings.train else None
    machines = findings.plan.machines if findings.plan else ()
    return next((machine for machine in machines if machine.name == trained_on), None)


def spent(findings: Findings) -> Spent | None:
    """None where it is not known which machine of the plan trained, or the plan has no price of it."""
    machine, train = trained_machine(findings), findings.train
    if machine is None or machine.price is None or train is None:
        return None
    price = Price(
        machine=machine.name,
        usd_per_hour=machine.price.usd_per_hour,
        basis=f"{machine.price.basis}, {machine.price.date}",
    )
    there = train.origin.machine
    stages = {
        stage: price.usd(stage_s(record))
        for stage, record in findings.records().items()
        if record.origin.machine.is_computer_of(there)
    }
    tokens, training = trained_tokens(train), stages["train"]
    return Spent(
        price=price,
        stages=stages,
        training=training,
        per_million_trained_tokens=training * 1e6 / tokens if tokens and math.isfinite(training) else None,
        served=fastest_cell(findings.bench) if findings.bench and served_where_trained(findings.bench, train) else None,
    )
