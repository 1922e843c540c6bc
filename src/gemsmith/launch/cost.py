"""What a launch costs, and the most that it can cost."""

import math

from gemsmith.errors import InputError
from gemsmith.hardware import Machine, Price
from gemsmith.launch.provider import LaunchCost, WithReason
from gemsmith.runs.plan_records import MachinePlan

BEFORE_AND_AFTER_S = 2 * 3600
"""For the weights to arrive, compilation, export and verify; assumed, for the largest model."""
SLACK = 1.5
"""On the plan's upper estimate."""
GCP = "gcp"


def estimate_cost(
    machine: Machine,
    plan: MachinePlan,
    *,
    steps: int | None,
    region: str,
    spot: bool,
    timeout_hours: float | None,
    attempts: int,
) -> LaunchCost:
    """The bill of a launch. Raises InputError where the price, or how long it takes, is not known."""
    price = find_price(machine, region, spot=spot)
    rate = price_of_hour(price, spot=spot)
    assert rate is not None
    checked = "" if price.checked else ", not checked"
    return LaunchCost(
        usd_per_hour=rate,
        price=f"{price.source}, {price.date}{checked}",
        hours=plan.hours if steps is not None else None,
        timeout_s=_timeout(plan, steps=steps, given=timeout_hours),
        attempts=attempts,
    )


def is_googles(machine: Machine) -> bool:
    """Whether Google rents it: the catalog has no price of it, or not only those of others."""
    return not machine.prices or any(price.provider == GCP for price in machine.prices)


def find_price(machine: Machine, region: str, *, spot: bool) -> Price:
    """The machine's price in a region, or in all of its area (us). Raises InputError with those that have one."""
    kind = "spot" if spot else "on-demand"
    there = {
        price.region: price for price in machine.prices if price.provider == GCP and price_of_hour(price, spot=spot)
    }
    area = region.partition("-")[0]
    if found := there.get(region) or there.get(area):
        return found
    if not there:
        raise InputError(
            f"--machine {machine.name}: the catalog has no {kind} price of it at Google, so its greatest bill is not "
            "known; add one in hardware.catalog"
        )
    has = ", ".join(f"{name} ({price_of_hour(price, spot=spot):.2f} USD/h)" for name, price in there.items())
    if not region:
        raise InputError(f"--region: is missing; the catalog's {kind} price of {machine.name} is of {has}; name one")
    raise InputError(
        f"--region {region}: the catalog has no {kind} price of {machine.name} there; it has {has}; choose one, "
        "or add the region in hardware.catalog"
    )


def default_region(machine: Machine, *, spot: bool) -> str | None:
    """The cheapest region that the catalog has a price for; None where it knows prices of whole areas alone."""
    known = (price for price in machine.prices if price.provider == GCP and "-" in price.region)
    priced = [price for price in known if price_of_hour(price, spot=spot)]
    return min(priced, key=lambda price: price_of_hour(price, spot=spot) or 0).region if priced else None


def price_of_hour(price: Price, *, spot: bool) -> float | None:
    return price.usd_per_hour_spot if spot else price.usd_per_hour


def _timeout(plan: MachinePlan, *, steps: int | None, given: float | None) -> WithReason:
    if given is not None:
        return WithReason(math.ceil(given * 3600), f"--timeout-hours {given:g}")
    if steps is None or plan.hours is None:
        raise InputError(
            "--timeout-hours: is missing, and the plan cannot tell how many steps there are before the rows are read; "
            "give the hours after which an attempt is to be ended, or train.max_steps"
        )
    hours = plan.hours[1]
    seconds = math.ceil((SLACK * hours * 3600 + BEFORE_AND_AFTER_S) / 600) * 600
    return WithReason(
        seconds,
        f"{SLACK:g} x the {hours:.3g} h that the plan gives at most, and {BEFORE_AND_AFTER_S // 3600} h for weights, "
        "compilation, export and verify; --timeout-hours sets another",
    )
