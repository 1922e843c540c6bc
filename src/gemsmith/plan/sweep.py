"""One recipe planned over values of its keys: what fits where, how fast, and what a million tokens cost."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsmith.arch import VARIANTS
from gemsmith.errors import InputError
from gemsmith.plan.stage import plan_only
from gemsmith.runs.plan_records import MachinePlan
from gemsmith.runs.records import Range
from gemsmith.runs.resolve import resolve_file

MOST = 200
"""Plans of one sweep: some seconds."""


@dataclass(frozen=True, kw_only=True)
class SweptPlan:
    """A machine under one choice of the values; estimated."""

    values: tuple[str, ...]
    machine: MachinePlan
    tokens_per_s: Range
    """Positions of full rows, low and high."""
    usd_per_million: Range | None
    """Of those positions, at the price on demand; None where it does not fit or has no price."""


def read_axis(text: str) -> tuple[str, list[str]]:
    """A key and its values: KEY=A,B, KEY=4096..131072 by doubling, or model=all.

    >>> read_axis("data.max_length=4096..16384")
    ('data.max_length', ['4096', '8192', '16384'])
    """
    key, mark, given = text.partition("=")
    key, given = key.strip(), given.strip()
    low, dots, high = given.partition("..")
    if key == "model" and given == "all":
        return key, [name for name in VARIANTS if not name.startswith("tiny-")]
    if dots and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high):
        doublings = itertools.takewhile(
            lambda value: value <= int(high), (int(low) << each for each in itertools.count())
        )
        return key, list(map(str, doublings))
    if not mark or not key or dots or not given:
        raise InputError(f"--sweep {text}: must be KEY=A,B, KEY=LOW..HIGH, which doubles LOW up to HIGH, or model=all")
    return key, [value.strip() for value in given.split(",")]


def sweep(
    source: Path, axes: Sequence[tuple[str, Sequence[str]]], overrides: Sequence[str] = (), machine: str | None = None
) -> Iterator[SweptPlan]:
    """The recipe's plan for each combination of the values, machine by machine. Raises RecipeError as a plan does."""
    if (count := math.prod(len(values) for _, values in axes)) > MOST:
        raise InputError(f"--sweep: {count} combinations; at most {MOST} are planned at once")
    for values in itertools.product(*(values for _, values in axes)):
        choice = dict(zip((key for key, _ in axes), values, strict=True))
        chosen = [f"{key}={value}" for key, value in choice.items()]
        if (variant := VARIANTS.get(choice.get("model", ""))) and variant.hub_ids:
            # The recipe's own is another model's.
            chosen.append(f"checkpoint={variant.hub_ids[0]}")
        record = plan_only(resolve_file(source, [*overrides, *chosen])[0], machine)
        for each in record.machines:
            low_s, high_s = each.step_s
            usd = None
            if each.fits and each.price is not None:
                second = each.price.usd_per_hour / 3600 * 1e6 / record.tokens_per_step
                usd = (second * low_s, second * high_s)
            rates = (record.tokens_per_step / high_s, record.tokens_per_step / low_s)
            yield SweptPlan(values=values, machine=each, tokens_per_s=rates, usd_per_million=usd)
