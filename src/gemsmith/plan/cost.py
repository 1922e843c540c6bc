"""Hours and dollars of a training on a machine: its start, its steps, and what spot adds."""

from dataclasses import dataclass

from gemsmith.hardware.catalog import Machine, Price, billed_hours
from gemsmith.hardware.model.step_time import StepTime
from gemsmith.recipe.schema import Train
from gemsmith.runs.plan_records import PlanPrice
from gemsmith.runs.records import Range

LOAD_BYTES_PER_S = (1e9, 0.2e9)
"""Of the checkpoint, from a bucket or a disk to the chips, at best and at worst; assumed."""
COMPILE_S = {"tunix": (180.0, 480.0), "trl": (5.0, 60.0), "cpu": (8.0, 14.0)}
"""tunix: the first step of the 31B on v5p-8, 3 to 8 minutes (arXiv 2605.25645, read 2026-11-23); XLA takes one core 103
to 430 s (docs/log/compile-and-xla.md). trl: assumed; cpu: the first step of tiny models (docs/log/cpu.md)."""
PREEMPTION_HOURS = 6.0  # a machine on spot is taken away once in so many hours, at worst; at best never. Assumed


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What MachinePlan has under these names; usd_spot is None also where a taken machine would lose all it did."""

    startup_s: dict[str, Range]
    evaluations_s: Range
    hours: Range
    usd: Range | None
    usd_spot: Range | None
    usd_per_million_tokens: Range | None


def cost_of(
    time: StepTime,
    machine: Machine,
    train: Train,
    *,
    steps: int,
    tokens: float | None,
    checkpoint_bytes: float,
    evaluated: Range = (0, 0),
) -> Cost:
    """What `steps` steps cost, `tokens` real tokens each, and evaluations that take as long as so many steps more."""
    startup = startup_s(machine, train.backend, checkpoint_bytes)
    start_s = (sum(low for low, _ in startup.values()), sum(high for _, high in startup.values()))
    evaluations_s = (evaluated[0] * time.low_s, evaluated[1] * time.high_s)
    low_s, high_s = (start_s[0] + steps * time.low_s, start_s[1] + steps * time.high_s)
    hours = rounded_range(((low_s + evaluations_s[0]) / 3600, (high_s + evaluations_s[1]) / 3600))
    price = on_demand(machine)
    usd = None if price is None else _dollars(price, hours)
    scale = 1 / (steps * tokens / 1e6) if steps and tokens else None
    spot, usd_spot = cheapest_spot(machine), None
    lost_hours = (start_s[1] + train.save_steps * time.high_s / 2) / 3600
    if spot is not None and lost_hours < PREEMPTION_HOURS:
        # Of every PREEMPTION_HOURS that are paid for, at worst, what was lost is worked again.
        taken = PREEMPTION_HOURS / (PREEMPTION_HOURS - lost_hours)
        usd_spot = _dollars(spot, (hours[0], hours[1] * taken), spot=True)
    return Cost(
        startup_s={name: rounded_range(seconds) for name, seconds in startup.items()},
        evaluations_s=rounded_range(evaluations_s),
        hours=hours,
        usd=usd,
        usd_spot=usd_spot,
        usd_per_million_tokens=None if usd is None or not scale else rounded_range((usd[0] * scale, usd[1] * scale)),
    )


def startup_s(machine: Machine, backend: str, checkpoint_bytes: float) -> dict[str, Range]:
    """Seconds before the first step, by what takes them; every host reads the whole checkpoint."""
    return {
        "load": (checkpoint_bytes / LOAD_BYTES_PER_S[0], checkpoint_bytes / LOAD_BYTES_PER_S[1]),
        "compile": COMPILE_S["cpu" if machine.chip.kind == "cpu" else backend],
    }


def on_demand(machine: Machine) -> Price | None:
    """The price that plans use: the first row's."""
    price = machine.prices[0] if machine.prices else None
    return None if price is None or price.usd_per_hour is None else price


def cheapest_spot(machine: Machine) -> Price | None:
    """The lowest spot price, whichever region has it."""
    rows = [price for price in machine.prices if price.usd_per_hour_spot]
    return min(rows, key=lambda price: price.usd_per_hour_spot or 0, default=None)


def plan_price(price: Price | None, *, spot: bool = False) -> PlanPrice | None:
    """The row of the catalog as a plan's record keeps it; None where it has no such price."""
    if price is None or (rate := price.rate(spot=spot)) is None:
        return None
    basis = f"{price.provider} {price.region}, {price.source}{'' if price.checked else ', not checked'}"
    return PlanPrice(usd_per_hour=rate, basis=basis, date=price.date)


def rounded(value: float) -> float:
    """Four digits: a formula knows no more."""
    return float(f"{value:.4g}")


def rounded_range(values: Range) -> Range:
    return rounded(values[0]), rounded(values[1])


def _dollars(price: Price, hours: Range, *, spot: bool = False) -> Range:
    rate = price.rate(spot=spot)
    assert rate is not None
    return rounded_range((rate * billed_hours(price, hours[0]), rate * billed_hours(price, hours[1])))
