"""How many requests measure a load, and how many before them only bring the server to its steady state."""

import math
from dataclasses import dataclass

from gemsmith.grids import BURST, Grid, Load

# What a token of an answer is taken to last: the published TPOTs of a 31B lie between 13 and 45 ms.
TOKEN_S = 0.03
# vLLM's default for requests in a batch: a server that has that many is as full as it gets.
FULL = 256
FEWEST_WARMUP = 2
# A closed loop starts with all its requests reading their prompts at once; by then they are apart.
WAVES = 4


@dataclass(frozen=True, kw_only=True)
class Count:
    """Requests of a cell: the first `warmup` of them are in none of its numbers."""

    warmup: int
    measured: int


def count_requests(load: Load, grid: Grid, *, prompts: int | None = None) -> Count:
    """The requests of a cell; `prompts`, where given, are the measured ones.

    A server is in its steady state once the first requests end while others arrive, which is one request's lifetime
    after the start, output_tokens * TOKEN_S. So the arrivals of one lifetime are warm-up, and those of the next two, or
    of grid.arrivals_s where that is longer, are measured: at least grid.fewest, since percentiles need them, at most
    grid.most. With a limit of requests under way, the first wave is warm-up and four are measured. A burst has no
    steady state: all of it is measured.

    >>> from gemsmith.grids import GRIDS
    >>> count_requests(Load(input_tokens=512, output_tokens=256, request_rate=8.0), GRIDS["paper"])
    Count(warmup=62, measured=240)
    """
    if load.max_concurrency is not None:
        wanted, warmup = WAVES * load.max_concurrency, load.max_concurrency
    elif load.request_rate == BURST:
        wanted, warmup = grid.most, 0
    else:
        lifetime_s = load.output_tokens * TOKEN_S
        wanted = math.ceil(load.request_rate * max(grid.arrivals_s, 2 * lifetime_s))
        warmup = min(max(math.ceil(load.request_rate * lifetime_s), FEWEST_WARMUP), FULL)
    return Count(warmup=warmup, measured=prompts or min(max(wanted, grid.fewest), grid.most))
