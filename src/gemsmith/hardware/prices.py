"""What a price of the catalogue comes to, and how far it can be trusted."""

import math
import re
from calendar import monthrange
from datetime import date

from gemsmith.hardware.catalogue import Price

OLD_DAYS = 90
"""A price read longer ago than this is marked wherever it is used."""
_DAYS = re.compile(r"(20\d\d)(?:-(\d\d)(?:-(\d\d))?)?")


def billed_hours(price: Price, hours: float) -> float:
    """The hours that are paid for: rounded up to what the seller bills.

    >>> round(billed_hours(Price(provider="p", region="r", source="s", date="2026", billed_s=60), 0.51), 4)
    0.5167
    """
    # Rounded first: 2 hours in seconds may come out as 7200.000000001.
    return math.ceil(round(3600 * hours / price.billed_s, 6)) * price.billed_s / 3600


def doubts_of(price: Price, today: date) -> tuple[str, ...]:
    """What to say of a price: that nobody checked it, that it is old or may be; empty where there is no doubt."""
    doubts = [] if price.checked else ["not checked"]
    span = _span(price.date)
    if span is None:
        doubts.append("of an unknown date")
    elif (today - span[1]).days > OLD_DAYS:
        doubts.append(f"older than {OLD_DAYS} days")
    elif (today - span[0]).days > OLD_DAYS:
        doubts.append(f"perhaps older than {OLD_DAYS} days")
    return tuple(doubts)


def _span(text: str) -> tuple[date, date] | None:
    """The first and the last day that a date may mean: a year alone is all of it, of several dates the last counts.

    >>> _span("2026-03 to 2026-05")
    (datetime.date(2026, 5, 1), datetime.date(2026, 5, 31))
    """
    found = _DAYS.findall(text)
    if not found:
        return None
    year, month, day = (int(part) if part else None for part in found[-1])
    assert year is not None
    try:
        last = date(year, month or 12, day or monthrange(year, month or 12)[1])
    except ValueError:  # such as a 13th month
        return None
    return date(year, month or 1, day or 1), last
