"""Dollars: measured time at the price that the plan's record has for the machine, so they are estimated."""

import math
from dataclasses import dataclass

from gemsmith.analysis.sides import Rate, Side, Way, plan_rates, served_where_trained
from gemsmith.analysis.summary import RunRecords, fastest_cell, stage_s, trained_tokens
from gemsmith.runs.bench_records import BenchCell
from gemsmith.runs.records import Part


@dataclass(frozen=True, kw_only=True)
class ActualCost:
    """Dollars of the stages that ran on the machine that trained."""

    price: Rate
    stages: dict[str, float]
    training: float
    per_million_trained_tokens: float | None  # `training` over all real tokens of its steps
    served: BenchCell | None  # the cell with the most output tokens/s, where the server ran on that machine

    @property
    def total(self) -> float:
        return sum(self.stages.values())


def actual_cost(findings: RunRecords) -> ActualCost | None:
    """None where it is not known which machine of the plan trained, or the plan has no price of it."""
    train, bench = findings.train, findings.bench
    price = plan_rates(findings.plan, train.machine).get("on demand") if train else None
    if price is None or train is None:
        return None
    stages = {
        stage: price.usd(stage_s(record))
        for stage, record in findings.records().items()
        if record.provenance.machine.is_computer_of(train.provenance.machine)
    }
    tokens, training = trained_tokens(train), stages["train"]
    return ActualCost(
        price=price,
        stages=stages,
        training=training,
        per_million_trained_tokens=training * 1e6 / tokens if tokens and math.isfinite(training) else None,
        served=fastest_cell(bench.cells) if bench and served_where_trained(bench, train) else None,
    )


def why_no_cost(findings: RunRecords) -> str:
    if findings.plan is None:
        return "no plan record, which has the prices"
    if findings.train is None:
        return "no train record"
    if findings.train.machine:
        return f"the plan has no price of {findings.train.machine}"
    return "which of the plan’s machines trained is not told"


class Curve(Part):
    """The dollars of two sides against hours of serving: trained + rate × hours for each."""

    way: Way
    trained_usd: tuple[float, float]
    usd_per_hour: tuple[float, float]
    machines: tuple[str, str]
    break_even_hours: float | None  # where the two cost the same; None: at no time after the start

    def usd(self, hours: float) -> tuple[float, float]:
        (first, other), (rate, rate_other) = self.trained_usd, self.usd_per_hour
        return first + rate * hours, other + rate_other * hours

    def say(self, first: str, other: str) -> str:
        """Which is cheaper, and from when on."""
        names = (first, other)
        start, end = (None if one == two else int(two < one) for one, two in (self.trained_usd, self.usd_per_hour))
        if (even := self.break_even_hours) is not None and start is not None and end is not None:
            return f"{names[start]} is cheaper up to {even:.3g} h of serving, {names[end]} from then on."
        cheaper = start if start is not None else end
        if cheaper is None:
            return "Both cost the same at any time."
        (trained, trained_other), (rate, rate_other), towards = self.trained_usd, self.usd_per_hour, ""
        if trained and rate:
            towards = f"; {other} / {first} goes from {trained_other / trained:.3g} to {rate_other / rate:.3g}"
        return f"{names[cheaper]} is cheaper at any time{towards}."


def cost_curve(first: Side, other: Side, way: Way) -> Curve | None:
    """The curve; None where a side's hours or prices are not recorded, or neither pays anything."""
    trained = first.train_usd(way), other.train_usd(way)
    rates = first.serve_rates.get(way), other.serve_rates.get(way)
    if trained[0] is None or trained[1] is None or rates[0] is None or rates[1] is None:
        return None
    hourly = rates[0].usd_per_hour, rates[1].usd_per_hour
    if not any((*trained, *hourly)):
        return None
    ours, theirs = (
        f"trained on {side.train_rates[way].machine} at {side.train_rates[way].usd_per_hour:.2f} USD/h, "
        f"served on {rate.machine} at {rate.usd_per_hour:.2f} USD/h"
        for side, rate in ((first, rates[0]), (other, rates[1]))
    )
    return Curve(
        way=way,
        trained_usd=(trained[0], trained[1]),
        usd_per_hour=hourly,
        machines=(ours, theirs),
        break_even_hours=break_even(trained[0], trained[1], *hourly),
    )


def break_even(trained: float, trained_other: float, rate: float, rate_other: float) -> float | None:
    """The hours of serving after which both cost the same; None where that is never.

    >>> break_even(56.11, 119.23, 25.92, 22.12), break_even(56.11, 119.23, 21.52, 22.12)
    (16.61052631578947, None)
    """
    if rate == rate_other:
        return None
    hours = (trained_other - trained) / (rate - rate_other)
    return hours if hours > 0 else None
