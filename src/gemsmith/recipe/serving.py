"""A recipe's keys of the server and its load test, and the grids of loads that have a name."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Literal

from pydantic import Field

from gemsmith.recipe.section import AsServed, AtOnce, Listed, OfPlan, RowCount, Says, Section, TokenCount

Seconds = Annotated[int, Field(gt=0, le=86_400)]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]
BURST = math.inf  # the rate of requests that are all sent at once
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
    """Loads, and how many requests measure one: at least `fewest` and `arrivals_s` of arrivals, at most `most`."""

    loads: tuple[Load, ...]
    fewest: int
    most: int
    arrivals_s: float
    exact: Mapping[Load, int] = field(default_factory=dict)  # loads of which so many are sent instead, with no warm-up


def _loads(lengths: Iterable[tuple[int, int]], rates: Iterable[float], at_once: int | None = None) -> tuple[Load, ...]:
    return tuple(
        Load(input_tokens=tokens, output_tokens=answer, request_rate=rate, max_concurrency=at_once)
        for (tokens, answer), rate in product(lengths, rates)
    )


# arXiv 2605.25645, whose servers held 16,384 tokens. It sent 64 prompts once, at 10,000 a second, and 30 in all others.
_SENT_ONCE = Load(input_tokens=128, output_tokens=256, request_rate=AT_ONCE)
_SWEPT = _loads(
    ((512, 256), (1024, 512), (4096, 512), (8192, 512), (15_360, 512)), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, BURST)
)
# The same in a steady state.
_STEADY = replace(_SENT_ONCE, request_rate=BURST, max_concurrency=64)
# Two requests are beyond p99 of 200, and five beyond that of 500; more only lengthen a cell that has fallen behind,
# whose TTFT grows with their number.
_PAPER = Grid(loads=(_SENT_ONCE, _STEADY, *_SWEPT), fewest=200, most=500, arrivals_s=30.0, exact={_SENT_ONCE: 64})
GRIDS = {
    "paper": _PAPER,
    "paper-30": replace(_PAPER, loads=(_SENT_ONCE, *_SWEPT), exact={**dict.fromkeys(_SWEPT, 30), _SENT_ONCE: 64}),
    # For a CPU: two minutes. The p99 of 40 requests is the slowest of them.
    "short": Grid(loads=_loads(((64, 32), (256, 32)), (2.0, 8.0, BURST)), fewest=40, most=100, arrivals_s=10.0),
}


class Serve(Section):
    stages = "serve"

    host: str = Field("127.0.0.1", description="The address that vLLM listens on.")
    port: Annotated[int, Field(gt=0, lt=65_536)] | None = Field(None, description="Default: a free one.")
    max_model_len: AsServed[TokenCount | None] = Field(None, description="Tokens; default: what bench and eval need.")
    dtype: AsServed[Literal["auto", "bfloat16", "float32"]] = Field(
        "auto", description="As served; `auto`: as the weights are."
    )
    python: str | None = Field(
        None, description="The Python of the environment that holds vLLM; default: .venv-serve next to Gemsmith's own."
    )
    start_timeout_s: Seconds = Field(900, description="Seconds that vLLM may take to be up.")
    weights: Annotated[Literal["auto", "merged", "adapter"], Says("serve bench eval")] = Field(
        "auto",
        description="`adapter`: base and tuned model are two names of one server, base + LoRA; `merged` and `auto`: "
        "each has a server of its own, since vLLM may load a Gemma 4 adapter and ignore it "
        "(https://github.com/vllm-project/vllm/issues/41754).",
    )
    images: AsServed[bool] = Field(False, description="Take images in prompts also where no row of the run has one.")
    kv_cache_dtype: AsServed[Literal["auto", "fp8"]] = Field(
        "auto", description="Of keys and values; `auto` is the weights'."
    )
    container_image: Annotated[str | None, Says("plan serve")] = Field(
        None, description="The Docker image of gemsmith serve --machine; default: vLLM's own for the machine's kind."
    )
    arguments: AsServed[Listed[str]] = Field((), description="Further arguments to vLLM's server.")


class Bench(Section):
    stages = "bench"

    grid: OfPlan[Literal["own", "paper", "paper-30", "short"]] = Field(
        "own",
        description="What is measured: `paper` is that of arXiv 2605.25645: 128 tokens in and 256 out, 64 prompts sent "
        "once and 64 always at once, and 512 to 15,360 in at 1 to 64 requests a second and in a burst; `paper-30` "
        "sends what that sent, 30 prompts in a load; `short` is for a CPU; `own` is what the next six keys say, others "
        "read none.",
    )
    input_tokens: OfPlan[Listed[TokenCount]] = Field(
        (512, 4096),
        min_length=1,
        description="Lengths of prompts in tokens; each with each of request_rates is a cell.",
    )
    output_tokens: OfPlan[TokenCount] = Field(256, description="Tokens that every request asks for.")
    request_rates: Listed[Annotated[float, Field(ge=0.001, le=AT_ONCE)] | Literal["burst"]] = Field(
        (1.0, 4.0, 16.0), min_length=1, description="Requests a second; `burst`: all at once."
    )
    max_concurrency: OfPlan[AtOnce | None] = Field(
        None, description="Requests under way at once, where others wait at the client; null: no limit."
    )
    images: OfPlan[bool] = Field(False, description="Requests are rows of data.eval with images, not random text.")
    prompts: RowCount | None = Field(
        128,
        description="Requests that a cell measures, without those of its warm-up; null: as many as its rate and length "
        "need.",
    )
    slo_ttft_ms: Milliseconds | None = Field(
        None,
        description="The longest TTFT of a good request. With an SLO the rate is searched at which the server "
        "saturates: under 95 % of its requests are good.",
    )
    slo_tpot_ms: Milliseconds | None = Field(None, description="The longest TPOT of a good request.")
    timeout_s: Seconds = Field(600, description="A request without a whole answer by then is counted as a timeout.")

    @property
    def plan(self) -> Grid:
        """The loads to measure; those of the own grid need as many requests as the paper's."""
        if self.grid != "own":
            return GRIDS[self.grid]
        lengths = [(tokens, self.output_tokens) for tokens in self.input_tokens]
        rates = [BURST if rate == "burst" else rate for rate in self.request_rates]
        return replace(GRIDS["paper"], loads=_loads(lengths, rates, self.max_concurrency), exact={})
