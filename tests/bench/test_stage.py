import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.bench.stage import Ask, bench, plan_cells, read_cell
from gemsmith.errors import EngineError, RecipeError
from gemsmith.recipe import Recipe, build_recipe
from gemsmith.run import Run, read_record
from gemsmith.serve.stage import Servers

GOLDEN = Path(__file__).parent / "golden" / "vllm_bench_serve_0.32.json"
SWEEP = {"input_tokens": [16, 32], "output_tokens": 8, "request_rates": [2, 8, 32.5], "prompts": 4}


@pytest.fixture
def result() -> dict[str, Any]:
    """What `vllm bench serve` saved: 16 prompts of 512 tokens at 2 requests a second, against a tiny model."""
    return json.loads(GOLDEN.read_text())


def make_recipe(**bench_: Any) -> Recipe:
    return build_recipe({"checkpoint": "/c", "seed": 3, "data": {"train": "x"}, "serve": {"max_model_len": 640}, "bench": SWEEP | bench_})


def test_the_sweep_is_every_length_at_every_rate_with_a_seed_of_its_own() -> None:
    asks = plan_cells(make_recipe())
    assert [(ask.input_tokens, ask.request_rate) for ask in asks] == [(16, 2), (16, 8), (16, 32.5), (32, 2), (32, 8), (32, 32.5)]
    assert len({ask.seed for ask in asks}) == len({ask.result_file for ask in asks}) == 6
    assert plan_cells(make_recipe()) == asks


def test_a_length_that_the_server_would_refuse_is_refused_before_it_starts() -> None:
    assert plan_cells(make_recipe(input_tokens=[600], output_tokens=40))
    with pytest.raises(RecipeError, match=r"bench.input_tokens: 601 and bench.output_tokens: 40 make 641 tokens.*serve.max_model_len: 640"):
        plan_cells(make_recipe(input_tokens=[16, 601], output_tokens=40))


def test_a_cell_holds_what_the_client_saved(result: dict[str, Any]) -> None:
    cell = read_cell(Ask(number=4, input_tokens=512, output_tokens=32, request_rate=2.0, prompts=16, seed=4), result)
    assert (cell.completed, cell.failed, cell.input_tokens, cell.output_tokens, cell.request_rate) == (16, 0, 512, 32, 2.0)
    assert cell.real_input_tokens == pytest.approx(result["total_input_tokens"] / 16, abs=0.01)
    assert cell.real_output_tokens == 32
    for metric in ("ttft", "tpot", "itl"):
        found = getattr(cell, f"{metric}_ms")
        assert [found.mean, found.p50, found.p90, found.p99] == pytest.approx(
            [result[f"{name}_{metric}_ms"] for name in ("mean", "p50", "p90", "p99")], abs=0.001
        )
        assert found.p50 == pytest.approx(result[f"median_{metric}_ms"], abs=0.001)
        assert found.p50 <= found.p90 <= found.p99
    assert cell.output_tokens_per_s == pytest.approx(result["output_throughput"], abs=0.01)
    assert cell.output_tokens_per_s == pytest.approx(512 / cell.duration_s, rel=0.001)


def test_bench_records_every_cell_and_keeps_the_clients_files(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result] * 6)
    run = exported_run({"bench": SWEEP})
    with Servers(run) as servers:
        record = bench(run, servers)
    assert record == read_record(run, "bench") and len(record.cells) == 6
    assert not record.prefix_caching and record.command[:3] == ("vllm", "bench", "serve")
    kept = {file.name for file in (run.logs / "bench").iterdir()}
    assert {"client.log", "cells.json", "01-16in-2rps.json", "06-32in-32.5rps-prompts.jsonl"} <= kept


def test_failed_requests_are_counted(fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]) -> None:
    fake_vllm(results=[result | {"completed": 15, "failed": 1}])
    run = exported_run({"bench": SWEEP | {"input_tokens": [16], "request_rates": [2]}})
    with Servers(run) as servers:
        assert bench(run, servers).cells[0].failed == 1


def test_a_cell_without_a_completed_request_is_an_error(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result, result | {"completed": 0, "failed": 4}])
    run = exported_run({"bench": SWEEP})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"none of 4 requests of 16 tokens at 8 requests/s(.|\n)*Bad Request"):
        bench(run, servers)
    assert not run.record_file("bench").exists()


def test_a_client_that_fails_is_an_error_with_its_last_lines(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result])
    run = exported_run({"bench": SWEEP})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"failed \(exit code 1\)(.|\n)*Initial test run failed"):
        bench(run, servers)
