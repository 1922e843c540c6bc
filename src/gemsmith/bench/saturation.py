"""The rate at which a server saturates, by search: which rate to try next, and what the tried ones say."""

import math
from collections.abc import Mapping

from gemsmith.bench_records import Saturation

ENOUGH = 0.95
"""The goodput under which a rate is too much."""
NEAR = 1.1
"""The search ends where the two rates around saturation are no further apart than this."""
HIGHEST_RATE = 1024.0
"""Requests a second; one client does not make more."""


def next_rate(tried: Mapping[float, float]) -> float | None:
    """The rate to measure next, from rate -> goodput so far; None where nothing is left to find.

    Bisected by ratio between the highest rate that held and the lowest that did not; doubled where all have held. Where
    the lowest did not hold, nothing is searched: the SLO is beyond the server.

    >>> next_rate({1.0: 1.0, 4.0: 0.5}), next_rate({1.0: 1.0, 4.0: 0.99}), next_rate({1.0: 0.2})
    (2.0, 8.0, None)
    """
    held, exceeded = bracket(tried)
    if held is None:
        return None
    if exceeded is None:
        return 2 * held if 2 * held <= HIGHEST_RATE else None
    if exceeded / held <= NEAR:
        return None
    return float(f"{math.sqrt(held * exceeded):.3g}")


def bracket(tried: Mapping[float, float]) -> tuple[float | None, float | None]:
    """The highest rate that held below the lowest that did not, and that one."""
    exceeded = min((rate for rate, goodput in tried.items() if goodput < ENOUGH), default=None)
    held = max((rate for rate in tried if exceeded is None or rate < exceeded), default=None)
    return held, exceeded


def read_saturation(tried: Mapping[float, float], *, input_tokens: int, output_tokens: int) -> Saturation:
    held, exceeded = bracket(tried)
    return Saturation(input_tokens=input_tokens, output_tokens=output_tokens, held_at=held, exceeded_at=exceeded)


def describe_saturation(found: Saturation) -> str:
    """One sentence without its full stop."""
    lengths = f"with {found.input_tokens} tokens in and {found.output_tokens} out"
    if found.held_at is None:
        return f"the SLO cannot be met {lengths}: at {found.exceeded_at:g} requests/s, the lowest rate, it is not"
    if found.exceeded_at is None:
        return f"the server does not saturate {lengths} at {found.held_at:g} requests/s, the highest rate tried"
    return f"the server saturates {lengths} between {found.held_at:g} and {found.exceeded_at:g} requests/s"
