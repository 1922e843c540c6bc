"""The real vLLM, from its own environment; `make test-vllm`. A start takes 20 to 30 s, so one server is shared."""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from gemsmith.bench.stage import bench
from gemsmith.errors import EngineError, MachineError
from gemsmith.evals.stage import evaluate
from gemsmith.runs.run import Run
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import ServeSettings, find_vllm
from gemsmith.serve.stage import Servers, serve

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def _needs_vllm() -> None:
    try:
        find_vllm()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(
    _needs_vllm: None, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = ServeSettings(max_model_len=640, dtype="float32")
    log = tmp_path_factory.mktemp("vllm") / "log"
    with running_server(tiny_checkpoint("tiny-31b"), name="m", settings=settings, log=log) as running:
        yield running


def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(server: Server) -> None:
    import torch
    from transformers import Gemma4ForConditionalGeneration

    prompt = [2, *np.random.default_rng(1).integers(110, 1000, 200).tolist()]
    asked = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 48,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    choice = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60, trust_env=False).json()["choices"][0]
    tokens = torch.tensor(choice["token_ids"])
    model = Gemma4ForConditionalGeneration.from_pretrained(server.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + choice["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens.tolist()
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
    # Measured: 6e-6.
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-4)


def test_a_bad_argument_of_the_users_shows_what_vllm_says_about_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    settings = ServeSettings(arguments=("--no-such-argument",))
    with (
        pytest.raises(EngineError, match=r"died at start(.|\n)*unrecognized arguments: --no-such-argument"),
        running_server(tiny_checkpoint("tiny-31b"), name="m", settings=settings, log=tmp_path / "log"),
    ):
        pass


def test_the_stages_run_on_the_real_engine(exported_run: Callable[..., Run]) -> None:
    sweep = {"input_tokens": [32], "output_tokens": 8, "request_rates": [8, 16], "prompts": 8}
    run = exported_run({"bench": sweep, "eval": {"scorer": "verilog-exact", "max_tokens": 16}})
    with Servers(run) as servers:
        assert serve(run, servers).start_s > 1
        cells = bench(run, servers).cells
        found = evaluate(run, servers)
    assert [(cell.completed, cell.failed, cell.real_output_tokens) for cell in cells] == [(8, 0, 8.0)] * 2
    # The server adds nothing to a prompt that was counted with the checkpoint's tokenizer.
    assert all(31 <= cell.real_input_tokens <= 32 for cell in cells)
    assert all(cell.ttft_ms.p50 > 0 and cell.tpot_ms.p50 > 0 and cell.itl_ms.p50 > 0 for cell in cells)
    assert found.base == found.tuned and found.tuned.n == 4, "the same weights answer the same"


def of_starts(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return [number for number in found if number != os.getpid()]


def command_of(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by their environment")
def test_starts_and_stops_leave_no_process_no_socket_and_no_file(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    """$VLLM_STARTS of them, each third killed in mid-serve."""
    times, mark = int(os.environ.get("VLLM_STARTS", "3")), f"GEMSMITH_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    shared = {*Path("/dev/shm").iterdir()}
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with tempfile.TemporaryDirectory(prefix="v") as scratch:  # a socket's path may have 107 bytes
        monkeypatch.setenv("TMPDIR", scratch)
        for number in range(times):
            settings = ServeSettings(max_model_len=640, dtype="float32")
            with running_server(tiny_checkpoint("tiny-31b"), name="m", settings=settings, log=tmp_path / "log") as one:
                port = int(one.url.rpartition(":")[2])
                assert len(of_starts(mark)) > 1
                if number % 3 == 2:
                    for process in of_starts(mark):
                        # Python's tracker stays: it alone knows the names of the semaphores that the killed leave.
                        if process != one.process.pid and b"resource_tracker" not in command_of(process):
                            os.kill(process, signal.SIGKILL)
            assert of_starts(mark) == [], number
            socket.create_server(("127.0.0.1", port)).close()
            assert {*Path("/dev/shm").iterdir()} <= shared, number
            assert [file.name for file in Path(scratch).iterdir()] == [], number
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    record_property("tries", times)
