"""The grids of load tests that have a name: which loads a server is put under, and how many requests measure each."""

import math
from dataclasses import dataclass
from itertools import product

BURST = math.inf
"""The rate of requests that are all sent at once."""


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
        return self.request_rate < BURST and self.max_concurrency is None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Loads, and how many requests measure one: at least `fewest` and `arrivals_s` of arrivals, at most `most`."""

    loads: tuple[Load, ...]
    fewest: int
    most: int
    arrivals_s: float


def _loads(lengths: tuple[tuple[int, int], ...], rates: tuple[float, ...]) -> tuple[Load, ...]:
    return tuple(
        Load(input_tokens=tokens, output_tokens=answer, request_rate=rate)
        for (tokens, answer), rate in product(lengths, rates)
    )


_PAPER_LENGTHS = ((512, 256), (1024, 512), (4096, 512), (8192, 512), (15_360, 512))
GRIDS = {
    # arXiv 2605.25645, whose servers held 16,384 tokens.
    "paper": Grid(
        loads=(
            Load(input_tokens=128, output_tokens=256, request_rate=BURST, max_concurrency=64),
            *_loads(_PAPER_LENGTHS, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, BURST)),
        ),
        # Two requests are beyond p99 of 200, and five beyond that of 500; more only lengthen a cell that has fallen
        # behind, whose TTFT grows with their number.
        fewest=200,
        most=500,
        arrivals_s=30.0,
    ),
    # For a CPU: two minutes. The p99 of 40 requests is the slowest of them.
    "short": Grid(loads=_loads(((64, 32), (256, 32)), (2.0, 8.0, BURST)), fewest=40, most=100, arrivals_s=10.0),
}


def describe_grids() -> str:
    """The names and what they are for, in words for a recipe's key."""
    return (
        "`paper` is that of arXiv 2605.25645: 128 tokens in and 256 out with 64 requests at once, and 512 to 15,360 in "
        "at 1 to 64 requests a second and in a burst; `short` is for a CPU"
    )
