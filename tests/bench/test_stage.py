import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemsmith.bench.stage import bench
from gemsmith.errors import EngineError, MachineError
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.serve.stage import Servers

SWEEP = {"input_tokens": [16, 32], "output_tokens": 16, "request_rates": [2, 8, 32.5], "prompts": 12}


def test_bench_records_every_cell_and_keeps_the_clients_files(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result] * 6)
    run = exported_run({"bench": SWEEP})
    with Servers(run) as servers:
        record = bench(run, servers)
    assert record == read_record(run, BenchRecord) and len(record.cells) == 6
    assert not record.prefix_caching and record.command[:3] == ("vllm", "bench", "serve")
    kept = {file.name for file in (run.logs / "bench").iterdir()}
    assert {"client.log", "asked.jsonl", "01-16in-2rps.json", "06-32in-32.5rps.json"} <= kept
    assert "cells" not in kept  # which only a sweep that was stopped leaves
    assert [(cell.completed, cell.warmup) for cell in record.cells] == [(12, 2), (12, 4), (12, 16)] * 2
    assert record.endpoint["weights"] and record.endpoint["model"] == "demo" and record.grid == "own"


def test_streams_that_ended_early_are_counted_and_told(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any], cut_result: dict[str, Any]
) -> None:
    fake_vllm(results=[result, cut_result])
    run = exported_run({"bench": SWEEP | {"input_tokens": [16], "request_rates": [2, 8]}})
    with Servers(run) as servers:
        record = bench(run, servers)
    assert [(cell.completed, cell.cut, cell.warmup_failures) for cell in record.cells] == [
        (12, 0, {}),
        (9, 3, {"wrong length": 1}),
    ]
    assert record.warnings[0].startswith("3 of 24 requests of the load test were not answered whole (3 wrong length); ")


def test_a_server_that_answers_no_request_is_an_error(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result | {"errors": ["http 400: Bad Request"] * 12}])
    run = exported_run({"bench": SWEEP})
    with (
        Servers(run) as servers,
        pytest.raises(
            EngineError, match=r"cell 1 .*none of 12 requests was .*: 12 http 400(.|\n)*Error 0: Bad Request"
        ),
    ):
        bench(run, servers)
    assert not run.record_file("bench").exists()


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_with_the_rest(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    run = exported_run({"bench": SWEEP})
    fake_vllm(results=[result] * 4)
    with Servers(run) as servers, pytest.raises(EngineError, match=r"cell 5 "):
        bench(run, servers)
    fake_vllm(results=[result] * 2)
    with Servers(run) as servers:
        record = bench(run, servers)
    assert len(record.cells) == 6
    assert any("4 of 6 cells were measured by an earlier start" in notice for notice in record.warnings)
    handed = (run.logs / "bench" / "asked.jsonl").read_text().splitlines()
    assert len(handed) == 2


def test_a_client_that_fails_is_an_error_with_its_last_lines(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result])
    run = exported_run({"bench": SWEEP})
    with (
        Servers(run) as servers,
        pytest.raises(EngineError, match=r"failed \(exit code 1\)(.|\n)*Initial test run failed"),
    ):
        bench(run, servers)


@pytest.mark.parametrize("saved", ["[]", "null", '"x"', "{}", '{"completed": 4}', '{"duration": NaN}'])
def test_a_damaged_result_is_an_error_that_names_the_cell_and_the_file(
    saved: str, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run], result: dict[str, Any]
) -> None:
    fake_vllm(results=[result, saved])
    run = exported_run({"bench": SWEEP})
    with (
        Servers(run) as servers,
        pytest.raises(EngineError, match=r"cell 2 .*: 02-16in-8rps\.json is no detailed result"),
    ):
        bench(run, servers)
    assert not run.record_file("bench").exists()


def test_a_result_that_is_never_whole_is_an_error_once_the_client_has_ended(
    fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(results=['{"completed": 4'], end=True)
    run = exported_run({"bench": SWEEP})
    with Servers(run) as servers, pytest.raises(EngineError, match=r"cell 1 .*bench client failed \(exit code 0\)"):
        bench(run, servers)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_command_while_a_cell_runs(
    number: int, code: int, fake_vllm: Callable[..., Path], exported_run: Callable[..., Run]
) -> None:
    fake_vllm(results=[], stall=True)
    run = exported_run({"data": {"max_length": 512}, "bench": SWEEP})
    command = [sys.executable, "-m", "gemsmith", "bench", str(run.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while not (run.logs / "bench" / "client.log").exists():
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(60) == code


def test_a_client_that_fails_on_a_full_disk_is_one_line(
    fake_vllm: Callable[..., Path],
    exported_run: Callable[..., Run],
    result: dict[str, Any],
    small_disk: Callable[[Path, str], Path],
) -> None:
    fake_vllm(results=[result | {"filler": "x" * 100_000}])
    run = exported_run({"bench": SWEEP | {"input_tokens": [16], "request_rates": [2]}})
    small_disk(run.logs, "64k")
    with (
        Servers(run) as servers,
        pytest.raises(MachineError, match=r"^no space left on the disk \(.*bench\); free some and run the same.*$"),
    ):
        bench(run, servers)
    assert not run.record_file("bench").exists()
