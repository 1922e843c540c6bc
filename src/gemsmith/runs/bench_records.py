"""What the stage bench writes into the run directory; see gemsmith.runs.records."""

from typing import ClassVar

from pydantic import ConfigDict, Field

from gemsmith.runs.records import Part, Record, ServerFacts


class Percentiles(Part):
    mean: float
    p50: float
    p90: float
    p99: float


class ServerLoad(Part):
    """What the server's /metrics said of it during a cell, sampled once a second."""

    samples: int
    running_mean: float | None = None  # requests in the batch; None, here and below, where the server does not tell
    running_max: float | None = None
    waiting_mean: float | None = None  # requests that wait for room in the batch
    waiting_max: float | None = None
    kv_use_mean: float | None = None  # share of the KV cache in use, of 1
    kv_use_max: float | None = None
    preemptions: int | None = None  # requests put out of the batch for lack of KV cache


class DeviceLoad(Part):
    """What an accelerator of the server's machine did during a cell, sampled once a second: by NVML, or by libtpu."""

    name: str
    samples: int
    memory_bytes_max: int  # in use, whoever uses it
    busy_mean: float  # share of the time in which it computed, of 1
    busy_max: float
    power_w_mean: float | None = None  # None of TPUs, which do not tell


class Requests(Part):
    """The completed requests of a cell, as they were sent, a place of each column; each got all its output tokens."""

    prompts_sha256: str | None = None
    """Of the prompts' texts, warm-up's included: where two cells have the same, a place is the same prompt in both."""
    start_ms: tuple[float, ...]  # after the first one's start
    ttft_ms: tuple[float, ...]
    latency_ms: tuple[float, ...]  # to the last token
    input_tokens: tuple[int, ...]  # as the server counted them

    def tpot_ms(self, output_tokens: int) -> tuple[float, ...]:
        """Time per output token after the first, with so many output tokens each."""
        return tuple(
            (latency - ttft) / max(1, output_tokens - 1)
            for latency, ttft in zip(self.latency_ms, self.ttft_ms, strict=True)
        )


class BenchCell(Part):
    # JSON has no infinity; as text it comes back as the number that it was.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    input_tokens: int  # asked for; the real mean is beside it
    output_tokens: int
    request_rate: float  # infinite: all requests at once, or as many as max_concurrency lets
    completed: int  # requests answered with all output tokens; every number below is of these
    failed: int
    cut: int = 0  # requests whose stream ended before all output tokens
    real_input_tokens: float
    real_output_tokens: float
    duration_s: float  # from the first request's start to the last one's end
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles  # whole requests
    output_tokens_per_s: float
    requests_per_s: float
    max_concurrency: int | None = None
    warmup: int = 0  # requests before the measured ones, which are in no number but the next
    warmup_failures: dict[str, int] = Field(default_factory=dict)
    failures: dict[str, int] = Field(default_factory=dict)
    """Why requests, those that failed and those cut, are not completed: cause, such as `http 429` -> count."""
    goodput: float | None = None  # share of all measured requests that were completed within the SLO; None without one
    good_requests_per_s: float | None = None
    probe: bool = False  # of the search for the rate of saturation, not of the grid
    server: ServerLoad | None = None  # None where the server has no metrics
    devices: tuple[DeviceLoad, ...] | None = None  # None: `no_devices` says why
    no_devices: str | None = None
    requests: Requests | None = None  # None where none was completed


class BenchImages(Part):
    """What the requests of a load test with images hold; numbers are means of a request."""

    rows: int  # of data.eval, which requests go through in turn; in a cell none comes twice before all have come
    distinct: int  # images in them
    images_per_request: float
    soft_tokens: float
    text_tokens: float  # all others of the prompt, those of the chat template among them
    sha256: str  # of the rows' texts and images
    encoder_cache: bool | None
    """Whether the server may have kept what it made of an image for the next request with it; None: not known."""


class Slo(Part):
    """What makes a request good."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Saturation(Part):
    """The rate at which goodput falls under 95 %, between the two that were measured next to it."""

    input_tokens: int
    output_tokens: int
    held_at: float | None  # the highest rate that was measured below it; None: the lowest of all did not hold
    exceeded_at: float | None  # the lowest rate at which goodput was under 95 %; None: at none


class BenchRecord(Record):
    stage: ClassVar[str] = "bench"
    cells: tuple[BenchCell, ...]
    prefix_caching: bool | None  # None: the server does not tell
    command: tuple[str, ...]
    grid: str = "own"
    endpoint: dict[str, str] = Field(default_factory=dict)
    """What was measured: URL, model, and on what else the numbers depend."""
    server: ServerFacts | None = None  # None of servers that Gemsmith did not start
    slo: Slo | None = None
    saturations: tuple[Saturation, ...] = ()  # for each length of a grid with rates; empty without an SLO
    images: BenchImages | None = None  # None where prompts are random text
