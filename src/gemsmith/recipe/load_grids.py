"""The grids of load tests that have a name: which loads a server is put under, and how many requests measure each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

BURST = math.inf
"""The rate of requests that are all sent at once."""
AT_ONCE = 10_000.0
"""Requests a second that are as good as a burst: no server has answered one before the last of some dozens is sent."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One cell's load: tokens in and out, requests a second, and how many at most are under way at once."""

    input_tokens: int
    output_tokens: int
    request_rate: float
    max_concurrency: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests arrive at a rate of their own, so that a server can fall behind."""
        return self.request_rate < AT_ONCE and self.max_concurrency is None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Loads, and how many requests measure one: at least `fewest` and `arrivals_s` of arrivals, at most `most`.

    `exact`: loads of which so many are sent instead, with no warm-up.
    """

    loads: tuple[Load, ...]
    fewest: int
    most: int
    arrivals_s: float
    exact: Mapping[Load, int] = field(default_factory=dict)


def _loads(lengths: tuple[tuple[int, int], ...], rates: tuple[float, ...]) -> tuple[Load, ...]:
    return tuple(
        Load(input_tokens=tokens, output_tokens=answer, request_rate=rate)
        for (tokens, answer), rate in product(lengths, rates)
    )


# arXiv 2605.25645, whose servers held 16,384 tokens. It sent 64 prompts once, at 10,000 a second, and 30 in all others.
_SENT_ONCE = Load(input_tokens=128, output_tokens=256, request_rate=AT_ONCE)
_SWEPT = _loads(
    ((512, 256), (1024, 512), (4096, 512), (8192, 512), (15_360, 512)), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, BURST)
)
GRIDS = {
    "paper": Grid(
        loads=(
            _SENT_ONCE,
            # The same in a steady state.
            Load(input_tokens=128, output_tokens=256, request_rate=BURST, max_concurrency=64),
            *_SWEPT,
        ),
        # Two requests are beyond p99 of 200, and five beyond that of 500; more only lengthen a cell that has fallen
        # behind, whose TTFT grows with their number.
        fewest=200,
        most=500,
        arrivals_s=30.0,
        exact={_SENT_ONCE: 64},
    ),
    "paper-30": Grid(
        loads=(_SENT_ONCE, *_SWEPT),
        fewest=200,
        most=500,
        arrivals_s=30.0,
        exact={**dict.fromkeys(_SWEPT, 30), _SENT_ONCE: 64},
    ),
    # For a CPU: two minutes. The p99 of 40 requests is the slowest of them.
    "short": Grid(loads=_loads(((64, 32), (256, 32)), (2.0, 8.0, BURST)), fewest=40, most=100, arrivals_s=10.0),
}


def describe_grids() -> str:
    """The names and what they are for, in words for a recipe's key."""
    return (
        "`paper` is that of arXiv 2605.25645: 128 tokens in and 256 out, 64 prompts sent once and 64 always at once, "
        "and 512 to 15,360 in at 1 to 64 requests a second and in a burst; `paper-30` sends what that sent, 30 prompts "
        "in a load; `short` is for a CPU"
    )
