import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemsmith.bench.cell import Count, LoadSpec
from gemsmith.bench.driver import ASKED, DEVICES, client_arguments, failure_lines, measure, running_client
from gemsmith.errors import EngineError
from gemsmith.recipe.serving import BURST, Load
from gemsmith.serve.client.endpoint import Endpoint
from gemsmith.serve.vllm_issues import ON_CPU


def make_ask(number: int = 1, *, rate: float = 20.0, at_once: int | None = None, warmup: int = 0) -> LoadSpec:
    load = Load(input_tokens=16, output_tokens=16, request_rate=rate, max_concurrency=at_once)
    return LoadSpec(number=number, load=load, count=Count(warmup=warmup, measured=12), seed=1, timeout_s=5)


@pytest.fixture
def endpoint(tiny_checkpoint: Callable[..., Path]) -> Endpoint:
    return Endpoint(url="http://127.0.0.1:9", model="m", tokenizer=tiny_checkpoint("tiny-31b"))


def test_one_client_is_handed_cell_after_cell(
    fake_vllm: Callable[..., Path], endpoint: Endpoint, result: dict[str, Any], tmp_path: Path
) -> None:
    python = fake_vllm(results=[result, result], beats=2)
    heard: list[int] = []
    prompts = set()
    with running_client(python, endpoint, tmp_path) as client:
        for number in (1, 2):
            found = measure(client, make_ask(number, warmup=3), heard=heard.append)
            assert len(found["ttfts"]) == 15
            prompts.add(found["prompts_sha256"])
        assert client.process.poll() is None
    handed = [json.loads(line) for line in (tmp_path / ASKED).read_text().splitlines()]
    assert [line["timeout_s"] for line in handed] == [5, 5] and heard
    assert len(prompts) == 1  # of the same load and seed
    assert {file.name for file in tmp_path.glob("0*")} == {"01-16in-20rps.json", "02-16in-20rps.json"}


def test_a_cell_has_the_looks_at_devices_since_it_began(
    fake_vllm: Callable[..., Path], endpoint: Endpoint, result: dict[str, Any], tmp_path: Path
) -> None:
    file, look = tmp_path / DEVICES, [{"name": "gpu", "memory_bytes": 1, "busy": 0.5}]
    with running_client(fake_vllm(results=[result] * 3, beats=3), endpoint, tmp_path) as client:
        file.write_text('"no GPU"\n')
        assert measure(client, make_ask(1))["devices"] == ["no GPU"]
        ended = []

        def looks(_count: int) -> None:
            if not ended:
                file.write_text(f'"no GPU"\n{json.dumps(look)}\n[{{"half')
            ended.append(True)

        assert measure(client, make_ask(2), heard=looks)["devices"] == [look]
        elsewhere = replace(client, endpoint=replace(endpoint, url="http://10.0.0.1:8000"))
        assert measure(elsewhere, make_ask(3))["devices"] == ["the server is on another machine"]


def test_the_client_may_import_torchvision_beside_a_pytorch_for_cpus(
    fake_vllm: Callable[..., Path], endpoint: Endpoint, tmp_path: Path
) -> None:
    """vLLM imports it where it is, whether or not a cell has images."""
    with running_client(fake_vllm(), endpoint, tmp_path) as client:
        file = Path(f"/proc/{client.process.pid}/environ")
        while not (found := file.read_bytes()):  # the kernel shows none while the program is being replaced
            time.sleep(0.01)
        environment = found.split(b"\0")
    assert f"PYTHONPATH={ON_CPU}".encode() in environment


def test_a_burst_and_a_limit_are_what_vllms_client_is_told(endpoint: Endpoint, tmp_path: Path) -> None:
    def told(ask: LoadSpec) -> dict[str, str]:
        words = client_arguments(endpoint, ask, tmp_path)
        return dict(itertools.pairwise(words))

    burst, closed, rate = (
        told(make_ask(rate=BURST)),
        told(make_ask(rate=BURST, at_once=8, warmup=8)),
        told(make_ask(warmup=3)),
    )
    assert (burst["--request-rate"], burst["--num-warmups"], burst["--num-prompts"]) == ("inf", "2", "12")
    assert (closed["--max-concurrency"], closed["--num-warmups"], closed["--num-prompts"]) == ("8", "0", "20")
    assert (rate["--request-rate"], rate["--num-warmups"], rate["--num-prompts"]) == ("20.0", "0", "15")
    assert "--max-concurrency" not in rate
    assert rate["--ready-check-timeout-sec"] == "0"  # which would ask again and again without a word


def test_a_server_that_has_ended_is_told_while_its_cell_runs(
    fake_vllm: Callable[..., Path], endpoint: Endpoint, tmp_path: Path
) -> None:
    def check() -> None:
        raise EngineError("vLLM died")

    dead = Endpoint(url=endpoint.url, model="m", tokenizer=endpoint.tokenizer, check=check)
    python = fake_vllm(results=[], stall=True)
    with running_client(python, dead, tmp_path) as client, pytest.raises(EngineError, match=r"^vLLM died$"):
        measure(client, make_ask())


@pytest.mark.slow
def test_a_client_that_does_not_end_its_requests_is_given_up(
    fake_vllm: Callable[..., Path], endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gemsmith.bench.cell.IDLE_TIMEOUT_S", -5.0
    )  # and 5 s of timeout, and 20 / 20 s between requests
    python = fake_vllm(results=[], stall=True)
    with (
        running_client(python, endpoint, tmp_path) as client,
        pytest.raises(
            EngineError, match=r"cell 1 .*: no token has come for 1 s, and vLLM's bench client has not ended"
        ),
    ):
        measure(client, make_ask())


def test_the_clients_own_lines_say_why_requests_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\nError 0: http 500: no\nError 1: timeout: 5 s\nb\n")
    assert failure_lines(log) == "Error 0: http 500: no\nError 1: timeout: 5 s"
    log.write_text("a\nb\n")
    assert failure_lines(log) == "a\nb"
