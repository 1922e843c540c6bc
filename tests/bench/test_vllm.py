"""The whole load test against the real vLLM, and against a client that shares nothing with it; `make test-vllm`."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gemsmith.bench.cell import Count, LoadSpec, read_cell
from gemsmith.bench.driver import measure, running_client
from gemsmith.bench.metrics import sampling, summarize
from gemsmith.bench.requests import make_prompts
from gemsmith.errors import MachineError
from gemsmith.recipe.serving import Load
from gemsmith.serve.client.endpoint import endpoint_of
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import ServeSettings, VllmEnvironment, find_vllm

pytestmark = pytest.mark.vllm
TOKENS, ANSWER, RATE, REQUESTS = 256, 32, 1.0, 100


@pytest.fixture(scope="module")
def engine() -> VllmEnvironment:
    try:
        return find_vllm()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(
    engine: VllmEnvironment, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = ServeSettings(max_model_len=640, dtype="float32")
    log = tmp_path_factory.mktemp("vllm") / "log"
    with running_server(tiny_checkpoint("tiny-31b"), name="m", settings=settings, log=log) as running:
        yield running


async def stream(client: httpx.AsyncClient, prompt: str) -> tuple[float, float]:
    """TTFT and TPOT of one request, in seconds."""
    body = {"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
    begin_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        times = [
            time.perf_counter()
            async for line in response.aiter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        ]
    return times[0] - begin_s, (times[-1] - times[0]) / (ANSWER - 1)


async def ask_independently(url: str, prompts: list[str], *, seed: int) -> list[tuple[float, float]]:
    """TTFTs and TPOTs of requests whose distances are exponential, as they are in a Poisson process."""
    source = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(stream(client, prompt)))
            await asyncio.sleep(source.expovariate(RATE))
        return await asyncio.gather(*tasks)


def test_medians_are_those_of_an_independent_client(server: Server, engine: VllmEnvironment, tmp_path: Path) -> None:
    """Both ask at once, so that both meet the same server."""
    load = Load(input_tokens=TOKENS, output_tokens=ANSWER, request_rate=RATE)
    ask = LoadSpec(number=1, load=load, count=Count(warmup=2, measured=REQUESTS), seed=1, timeout_s=60)
    prompts = make_prompts(server.folder, tokens=TOKENS, prompts=REQUESTS + 2, seed=1001)
    with running_client(engine.python, endpoint_of(server, weights_sha256=""), tmp_path) as client:
        measure(client, LoadSpec(number=0, load=load, count=Count(warmup=0, measured=2), seed=0, timeout_s=60))
        with ThreadPoolExecutor(1) as pool, sampling(server.url, {}) as samples:
            asked = pool.submit(asyncio.run, ask_independently(server.url, prompts, seed=1))
            result = measure(client, ask)
            theirs = medians_ms(asked.result()[2:])
    cell = read_cell(ask, result)
    assert (cell.completed, cell.failures, cell.real_input_tokens) == (REQUESTS, {}, TOKENS)
    times = list(zip(result["ttfts"], result["latencies"], strict=True))[2:]
    ours = medians_ms([(ttft_s, (latency_s - ttft_s) / (ANSWER - 1)) for ttft_s, latency_s in times])
    assert cell.ttft_ms.p50 == pytest.approx(ours[0], abs=0.01)
    seen = summarize(samples.found)
    assert seen is not None and (seen.running_max or 0) >= 1 and seen.preemptions == 0
    print(f"TTFT, TPOT p50: {ours} ms, and {theirs} ms to the independent client")
    assert ours == pytest.approx(theirs, rel=0.15)


def medians_ms(times: list[tuple[float, float]]) -> list[float]:
    return [round(1000 * statistics.median(column), 2) for column in zip(*times, strict=True)]
