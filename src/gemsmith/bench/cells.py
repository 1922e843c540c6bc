"""The cells of the sweep: as they are asked for, and as vLLM's bench client measured them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemsmith.errors import EngineError
from gemsmith.recipe import Recipe
from gemsmith.records import BenchCell, Percentiles

# A cell is given up where no token has come for this long, and for each token of a prompt, which the server may just be
# reading; and the client may be waiting for its next request, whose distance is random: none in 10^8 is more than 20
# times the mean.
QUIET_S, PROMPT_TOKEN_S, GAPS = 120.0, 0.1, 20


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One cell of the sweep, as asked for."""

    number: int
    input_tokens: int
    output_tokens: int
    request_rate: float
    prompts: int
    seed: int

    def __str__(self) -> str:
        return f"cell {self.number} ({self.input_tokens} tokens in at {self.request_rate:g} requests/s)"

    @property
    def result_file(self) -> str:
        return f"{self._stem}.json"

    @property
    def prompts_file(self) -> str:
        return f"{self._stem}-prompts.jsonl"

    @property
    def quiet_s(self) -> float:
        """For how long it is believable that no token comes."""
        return QUIET_S + PROMPT_TOKEN_S * self.input_tokens + GAPS / self.request_rate

    @property
    def _stem(self) -> str:
        return f"{self.number:02d}-{self.input_tokens}in-{self.request_rate:g}rps"


@dataclass(frozen=True, kw_only=True)
class _Request:
    input_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float
    itls_s: Sequence[float]


def plan_cells(recipe: Recipe) -> list[Ask]:
    """The cells in order, each with a seed of its own."""
    bench_ = recipe.bench
    pairs = itertools.product(bench_.input_tokens, bench_.request_rates)
    return [
        Ask(
            number=number,
            input_tokens=input_tokens,
            output_tokens=bench_.output_tokens,
            request_rate=rate,
            prompts=bench_.prompts,
            seed=recipe.seed * 1000 + number,
        )
        for number, (input_tokens, rate) in enumerate(pairs, start=1)
    ]


def read_cell(ask: Ask, result: Any) -> BenchCell:
    """The cell that a detailed result of `vllm bench serve` tells, from the requests alone that got all tokens that
    they asked for.

    Token counts are those the server reported. To vLLM's client a stream that ends early is a completed request, and
    the times of a short answer make the cell look fast; here it is `cut`. Raises EngineError where no request is whole,
    or the result is damaged.
    """
    try:
        requests = list(_read_requests(result))
        completed, failed, duration_s = int(result["completed"]), int(result["failed"]), float(result["duration"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"bench: {ask}: {ask.result_file} is no detailed result of vllm bench serve ({_reason(error)})"
        ) from None
    whole = [request for request in requests if request.output_tokens == ask.output_tokens]
    cut = completed - len(whole)
    if not completed + failed == len(requests) == ask.prompts or min(cut, failed) < 0 or not 0 < duration_s < math.inf:
        raise EngineError(
            f"bench: {ask}: {ask.result_file} contradicts itself: {completed} requests completed, {failed} failed, "
            f"{len(requests)} told "
            f"of, {ask.prompts} asked for, in {duration_s} s"
        )
    if not whole:
        raise EngineError(
            f"bench: {ask}: none of {ask.prompts} requests was completed: {failed} failed, {cut} ended early"
        )
    return BenchCell(
        input_tokens=ask.input_tokens,
        output_tokens=ask.output_tokens,
        request_rate=ask.request_rate,
        completed=len(whole),
        failed=failed,
        cut=cut,
        real_input_tokens=round(sum(request.input_tokens for request in whole) / len(whole), 2),
        real_output_tokens=float(ask.output_tokens),
        duration_s=round(duration_s, 3),
        ttft_ms=_percentiles([request.ttft_s for request in whole]),
        tpot_ms=_percentiles(
            [(request.latency_s - request.ttft_s) / max(1, ask.output_tokens - 1) for request in whole]
        ),
        itl_ms=_percentiles([itl_s for request in whole for itl_s in request.itls_s]),
        output_tokens_per_s=round(len(whole) * ask.output_tokens / duration_s, 2),
        requests_per_s=round(len(whole) / duration_s, 3),
    )


def notices_of(cells: Sequence[BenchCell]) -> tuple[str, ...]:
    """What must be known before the numbers: how many streams ended early."""
    cut = sum(cell.cut for cell in cells)
    asked = sum(cell.completed + cell.failed + cell.cut for cell in cells)
    if not cut:
        return ()
    return (
        f"{cut} of {asked} requests of the load test ended before all their tokens had come; no latency and no rate "
        "counts them.",
    )


def _read_requests(result: Mapping[str, Any]) -> Iterator[_Request]:
    """Raises KeyError, TypeError or ValueError where the result is not one."""
    columns = [result[name] for name in ("input_lens", "output_lens", "ttfts", "latencies", "itls")]
    for input_tokens, output_tokens, ttft_s, latency_s, itls_s in zip(*columns, strict=True):
        if not all(0 <= number < math.inf for number in (input_tokens, output_tokens, ttft_s, latency_s, *itls_s)):
            raise ValueError("a time or a number of tokens that is none")
        yield _Request(
            input_tokens=input_tokens, output_tokens=output_tokens, ttft_s=ttft_s, latency_s=latency_s, itls_s=itls_s
        )


def _reason(error: Exception) -> str:
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)


def _percentiles(values_s: Sequence[float]) -> Percentiles:
    """In ms; as vLLM's client computes them, 0 where there is no value, such as the ITL of answers of one token."""
    values_ms = 1000 * np.asarray(values_s or [0.0])
    p50, p90, p99 = (round(float(value), 3) for value in np.percentile(values_ms, (50, 90, 99)))
    return Percentiles(mean=round(float(values_ms.mean()), 3), p50=p50, p90=p90, p99=p99)
