"""The cells of a sweep: as they are asked for, and as vLLM's bench client measured them."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from gemsmith.errors import EngineError
from gemsmith.recipe.serving import AT_ONCE, BURST, Bench, Grid, Load
from gemsmith.runs.bench_records import BenchCell, DeviceLoad, Percentiles, Requests, Slo
from gemsmith.system.format import counts, rate

# What a token of an answer is taken to last: the published TPOTs of a 31B lie between 13 and 45 ms.
TOKEN_S = 0.03
# vLLM's default for requests in a batch: a server that has that many is as full as it gets.
FULL = 256
FEWEST_WARMUP = 2
# A closed loop starts with all its requests reading their prompts at once; by then they are apart.
WAVES = 4
# The client ends every request in time, and is given up itself where no token has come for this much longer; it may be
# waiting for its next request, whose distance is random: none in 10^8 is more than 20 times the mean.
IDLE_TIMEOUT_S, GAPS = 60.0, 20
# Causes, as client.py names them, of answers that ended before, or after, all their tokens had come.
CUTS = ("cut stream", "wrong length")
_COLUMNS = ("input_lens", "output_lens", "start_times", "ttfts", "latencies", "itls", "errors")


@dataclass(frozen=True, kw_only=True)
class Count:
    """Requests of a cell: the first `warmup` of them are in none of its numbers."""

    warmup: int
    measured: int


def count_requests(load: Load, grid: Grid, *, prompts: int | None = None) -> Count:
    """The requests of a cell: as many as the grid says; `prompts`, where given, are the measured ones.

    A server is in its steady state once the first requests end while others arrive, one request's lifetime after the
    start, output_tokens * TOKEN_S. So the arrivals of one lifetime are warm-up, and those of the next two, or of
    grid.arrivals_s where that is longer, are measured: at least grid.fewest, since percentiles need them, at most
    grid.most. With a limit of requests under way, the first wave is warm-up and four are measured. All of a burst is.

    >>> from gemsmith.recipe.serving import GRIDS
    >>> count_requests(Load(input_tokens=512, output_tokens=256, request_rate=8.0), GRIDS["paper"])
    Count(warmup=62, measured=240)
    """
    if exact := grid.exact.get(load):
        return Count(warmup=0, measured=exact)
    if load.max_concurrency is not None:
        wanted, warmup = WAVES * load.max_concurrency, load.max_concurrency
    elif load.request_rate == BURST:
        wanted, warmup = grid.most, 0
    else:
        lifetime_s = load.output_tokens * TOKEN_S
        wanted = math.ceil(load.request_rate * max(grid.arrivals_s, 2 * lifetime_s))
        warmup = min(max(math.ceil(load.request_rate * lifetime_s), FEWEST_WARMUP), FULL)
    return Count(warmup=warmup, measured=prompts or min(max(wanted, grid.fewest), grid.most))


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """One cell of the sweep, as asked for."""

    number: int
    load: Load
    count: Count
    seed: int
    timeout_s: int = 600
    probe: bool = False

    def __str__(self) -> str:
        return f"{'probe' if self.probe else 'cell'} {self.number} ({describe_load(self.load)})"

    @property
    def requests(self) -> int:
        """All that are sent."""
        return self.count.warmup + self.count.measured

    @property
    def idle_timeout_s(self) -> float:
        """For how long it is believable that no token comes."""
        return self.timeout_s + IDLE_TIMEOUT_S + GAPS / self.load.request_rate

    @property
    def name(self) -> str:
        """Begins the names of its files."""
        load = self.load
        arrivals = "burst" if load.request_rate == BURST else f"{load.request_rate:g}rps"
        limit = "" if load.max_concurrency is None else f"-{load.max_concurrency}atonce"
        return f"{self.number:02d}-{load.input_tokens}in-{arrivals}{limit}"

    @property
    def result_file(self) -> str:
        return f"{self.name}.json"


class _Request(NamedTuple):
    """One, in the order of _COLUMNS."""

    input_tokens: int
    output_tokens: int
    start_s: float
    ttft_s: float
    latency_s: float
    itls_s: Sequence[float]
    error: str

    @property
    def tpot_s(self) -> float:
        return (self.latency_s - self.ttft_s) / max(1, self.output_tokens - 1)

    def find_cause(self, ask: LoadSpec) -> str | None:
        """Why it has not got all the tokens that it asked for; None where it has."""
        if self.error:
            return self.error.partition(":")[0]
        return None if self.output_tokens == ask.load.output_tokens else "wrong length"

    def meets(self, slo: Slo) -> bool:
        limits = ((slo.ttft_ms, self.ttft_s), (slo.tpot_ms, self.tpot_s))
        return all(limit_ms is None or 1000 * taken_s <= limit_ms for limit_ms, taken_s in limits)


def plan_cells(bench_: Bench, seed: int) -> list[LoadSpec]:
    """The cells in order: each pair of lengths from its lowest rate on, so that what cannot be met is known at once."""
    loads = bench_.plan.loads
    pairs = list(dict.fromkeys((load.input_tokens, load.output_tokens) for load in loads))
    ordered = sorted(loads, key=lambda load: (pairs.index((load.input_tokens, load.output_tokens)), load.request_rate))
    return [make_ask(bench_, load, seed, number=number) for number, load in enumerate(ordered, start=1)]


def make_ask(bench_: Bench, load: Load, seed: int, *, number: int, probe: bool = False) -> LoadSpec:
    """A cell of that load. Its own seed follows from the load, so that it is the same cell in another place."""
    prompts = bench_.prompts if bench_.grid == "own" else None
    text = json.dumps([seed, asdict(load)])
    return LoadSpec(
        number=number,
        load=load,
        count=count_requests(load, bench_.plan, prompts=prompts),
        seed=int(hashlib.sha256(text.encode()).hexdigest()[:8], 16),
        timeout_s=bench_.timeout_s,
        probe=probe,
    )


def describe_load(load: Load) -> str:
    return f"{load.input_tokens} tokens in, {rate(load.request_rate, load.max_concurrency)}"


def read_cell(ask: LoadSpec, result: Any, slo: Slo | None = None) -> BenchCell:
    """The cell that a detailed result of `vllm bench serve` tells, from measured requests that got all their tokens.

    Token counts are the server's. The others are counted by cause. Raises EngineError where the result is damaged.
    """
    place = f"bench: {ask}: {ask.result_file}"
    try:
        requests = list(_read_requests(result))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{place} is no detailed result of vllm bench serve ({reason})") from None
    if len(requests) != ask.requests:
        raise EngineError(f"{place} contradicts itself: {len(requests)} requests told of, {ask.requests} asked for")
    warmup, measured = requests[: ask.count.warmup], requests[ask.count.warmup :]
    whole = [request for request in measured if request.find_cause(ask) is None]
    failures, in_warmup = (
        dict(Counter(cause for request in part if (cause := request.find_cause(ask)))) for part in (measured, warmup)
    )
    cut = sum(failures.get(cause, 0) for cause in CUTS)
    begin_s = min((request.start_s for request in whole), default=0.0)
    # From the first start to the last end.
    duration_s = max(max((request.start_s + request.latency_s for request in whole), default=0.0) - begin_s, 1e-6)
    good = sum(slo is not None and request.meets(slo) for request in whole)
    return BenchCell(
        **asdict(ask.load),
        completed=len(whole),
        failed=len(measured) - len(whole) - cut,
        cut=cut,
        failures=failures,
        warmup=len(warmup),
        warmup_failures=in_warmup,
        real_input_tokens=round(sum(request.input_tokens for request in whole) / max(1, len(whole)), 2),
        real_output_tokens=float(ask.load.output_tokens),
        duration_s=round(duration_s, 3),
        ttft_ms=_percentiles([request.ttft_s for request in whole]),
        tpot_ms=_percentiles([request.tpot_s for request in whole]),
        itl_ms=_percentiles([itl_s for request in whole for itl_s in request.itls_s]),
        e2e_ms=_percentiles([request.latency_s for request in whole]),
        output_tokens_per_s=round(len(whole) * ask.load.output_tokens / duration_s, 2),
        requests_per_s=round(len(whole) / duration_s, 3),
        goodput=None if slo is None else round(good / len(measured), 4),
        good_requests_per_s=None if slo is None else round(good / duration_s, 3),
        probe=ask.probe,
        **_summarize_devices(result.get("devices", ())),
        requests=_one_by_one(whole, begin_s, result.get("prompts_sha256")) if whole else None,
    )


def asked_of(cell: BenchCell) -> int:
    return cell.completed + cell.failed + cell.cut


def notices_of(cells: Sequence[BenchCell]) -> Iterator[str]:
    """What must be known before the numbers: how many requests are in none of them, and why."""
    if failures := sum((Counter(cell.failures) for cell in cells), Counter()):
        asked = sum(asked_of(cell) for cell in cells)
        yield (
            f"{failures.total()} of {asked} requests of the load test were not answered whole "
            f"({counts(failures)}); no latency and no rate counts them."
        )
    if warmup := sum((Counter(cell.warmup_failures) for cell in cells), Counter()):
        yield f"{warmup.total()} requests of warm-up failed, too ({counts(warmup)})."
    behind = []
    for cell in cells:
        if cell.request_rate >= AT_ONCE or cell.max_concurrency is not None or not cell.completed:
            continue
        # They are answered over the time in which they come and that of one more request.
        expected_s = asked_of(cell) / cell.request_rate + cell.e2e_ms.p50 / 1000
        if cell.duration_s > expected_s / 0.9:
            behind.append(cell)
    if behind:
        yield (
            f"In {len(behind)} of {len(cells)} cells fewer than 90 % of the requests asked for a second were answered: "
            "the server fell behind, and TTFT there grows with the number of requests."
        )


def _read_requests(result: Mapping[str, Any]) -> Iterator[_Request]:
    """Raises KeyError, TypeError or ValueError where the result is not one."""
    for values in zip(*(result[name] for name in _COLUMNS), strict=True):
        request = _Request(*values)
        numbers = (*request[:5], *request.itls_s)
        if not all(0 <= number < math.inf for number in numbers) or not isinstance(request.error, str):
            raise ValueError("a time or a number of tokens that is none")
        yield request


def _one_by_one(whole: Sequence[_Request], begin_s: float, prompts_sha256: str | None) -> Requests:
    """To a microsecond."""
    columns_s = zip(*((request.start_s - begin_s, request.ttft_s, request.latency_s) for request in whole), strict=True)
    start, ttft, latency = (tuple(round(1000 * value_s, 3) for value_s in column_s) for column_s in columns_s)
    lengths, sha256 = tuple(request.input_tokens for request in whole), prompts_sha256
    return Requests(prompts_sha256=sha256, start_ms=start, ttft_ms=ttft, latency_ms=latency, input_tokens=lengths)


def _summarize_devices(lines: Sequence[Any]) -> dict[str, Any]:
    """Fields of a cell: what each device did, or why that is not known."""
    if not (looks := [line for line in lines if isinstance(line, list)]):
        return {"no_devices": next((line for line in lines if isinstance(line, str)), "the cell ended before a look")}
    devices = []
    for each in zip(*looks, strict=True):
        busy, power_w = [look["busy"] for look in each], [look["power_w"] for look in each if "power_w" in look]
        devices.append(
            DeviceLoad(
                name=each[0]["name"],
                samples=len(each),
                memory_bytes_max=max(look["memory_bytes"] for look in each),
                busy_mean=round(sum(busy) / len(busy), 4),
                busy_max=max(busy),
                power_w_mean=round(sum(power_w) / len(power_w), 1) if power_w else None,
            )
        )
    return {"devices": tuple(devices)}


def _percentiles(values_s: Sequence[float]) -> Percentiles:
    """In ms; as vLLM's client computes them, 0 where there is no value, such as the ITL of answers of one token."""
    values_ms = 1000 * np.asarray(values_s or [0.0])
    p50, p90, p99 = (round(float(value), 3) for value in np.percentile(values_ms, (50, 90, 99)))
    return Percentiles(mean=round(float(values_ms.mean()), 3), p50=p50, p90=p90, p99=p99)
