"""What a server's /metrics say of it while a cell runs: sampled beside it, summarized for its record."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gemsmith.runs.bench_records import ServerLoad
from gemsmith.serve.server import TRUTH, read_cache_config
from gemsmith.serve.settings import client_options

_TIMEOUT_S = 2.0
# vLLM's names; those of one server's engines are added up, but for the share of the cache.
_FIELDS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "running": ("vllm:num_requests_running", sum),
    "waiting": ("vllm:num_requests_waiting", sum),
    "kv_use": ("vllm:kv_cache_usage_perc", max),
    "preemptions": ("vllm:num_preemptions_total", sum),
}
Sample = dict[str, float]  # one look at a server, by _FIELDS, without what it does not tell


@dataclass
class Samples:
    found: list[Sample] = field(default_factory=list)
    problem: str = ""


def read_sample(text: str) -> Sample | None:
    """What a page in Prometheus' format says, None where it has none of vLLM's numbers.

    >>> read_sample('vllm:num_requests_running{engine="0"} 3.0')
    {'running': 3.0}
    """
    values: dict[str, list[float]] = {}
    with contextlib.suppress(ValueError):  # of a page that is not in Prometheus' format
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            if math.isfinite(sample.value):
                values.setdefault(sample.name, []).append(sample.value)
    return {field: join(values[name]) for field, (name, join) in _FIELDS.items() if name in values} or None


def read_prefix_caching(text: str) -> bool | None:
    """Whether prefix caching is on, as vLLM's /metrics tell; None where they do not."""
    return TRUTH.get(read_cache_config(text).get("enable_prefix_caching", ""))


def open_metrics(url: str, headers: Mapping[str, str]) -> httpx.Client:
    """A client for a server's /metrics: one for all samples, since to make one takes longer than to ask."""
    return httpx.Client(base_url=url, headers=dict(headers), timeout=_TIMEOUT_S, **client_options(url))


def fetch_metrics(client: httpx.Client) -> str | httpx.HTTPError:
    """The text of /metrics, or why there is none."""
    try:
        response = client.get("/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        return error
    return response.text


@contextlib.contextmanager
def sampling(url: str, headers: Mapping[str, str], *, every_s: float = 1.0) -> Iterator[Samples]:
    """Samples that grow, in a thread of its own, until the block ends: one at its beginning and end, others between."""
    samples, ended = Samples(), threading.Event()

    def watch() -> None:
        with open_metrics(url, headers) as client:
            _look(client, samples)
            while not ended.wait(every_s):
                _look(client, samples)
            _look(client, samples)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join(_TIMEOUT_S)


def _look(client: httpx.Client, samples: Samples) -> None:
    """Adds one sample, or notes why there is none."""
    text = fetch_metrics(client)
    if isinstance(text, str) and (sample := read_sample(text)) is not None:
        samples.found.append(sample)
    elif isinstance(text, str):
        samples.problem = "has none of vLLM's numbers"
    elif isinstance(text, httpx.HTTPStatusError):
        samples.problem = f"is answered with http {text.response.status_code}"
    else:
        samples.problem = f"is not answered ({type(text).__name__})"


def summarize(samples: Sequence[Sample]) -> ServerLoad | None:
    """Means and highest values between the first and the last sample that saw a request; None of no samples."""
    if not samples:
        return None
    counted = [sample["preemptions"] for sample in samples if "preemptions" in sample]
    busy = [place for place, sample in enumerate(samples) if sample.get("running") or sample.get("waiting")]
    samples = samples[busy[0] : busy[-1] + 1] if busy else samples
    ends: dict[str, float] = {}
    for name in ("running", "waiting", "kv_use"):
        if values := [sample[name] for sample in samples if name in sample]:
            ends |= {f"{name}_mean": round(sum(values) / len(values), 4), f"{name}_max": round(max(values), 4)}
    return ServerLoad(samples=len(samples), **ends, preemptions=round(counted[-1] - counted[0]) if counted else None)
