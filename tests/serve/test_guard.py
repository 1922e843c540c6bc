"""Nothing of a server outlives the process that started it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# What a user's process does: serves, says so, and waits.
SERVING = """
import sys, time
from pathlib import Path
from gemsmith.system import process
from gemsmith.serve.settings import ServeSettings
from gemsmith.serve.server import running_server
process.GRACE_S = 0.5
with running_server(Path(sys.argv[1]), name="m", settings=ServeSettings(), log=Path(sys.argv[2])):
    print("up", flush=True)
    time.sleep(600)
"""


def stop(ours: subprocess.Popen, number: signal.Signals) -> None:
    """Sends the signal and waits for the end, which must come by itself."""
    ours.send_signal(number)
    try:
        ours.wait(60)
    finally:
        ours.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_ours_however_it_is_stopped(
    number: signal.Signals,
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    wait_until_gone: Callable[..., list[int]],
    is_running: Callable[[int], bool],
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids))
    ours = subprocess.Popen(
        [sys.executable, "-c", SERVING, str(model), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with ours:
        assert ours.stdout is not None and ours.stdout.readline() == b"up\n"
        started = json.loads(pids.read_text())
        assert all(map(is_running, started))
        stop(ours, number)
    assert not wait_until_gone(started)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_being_stopped_while_vllm_starts_does_not_wait_as_long_as_for_one_that_serves(
    number: signal.Signals,
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    wait_until_gone: Callable[..., list[int]],
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids), hang=True)  # its children do not hear SIGTERM, as vLLM does not while it loads
    patient = SERVING.replace(
        "process.GRACE_S = 0.5",
        "process.GRACE_S = 600; import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))",
    )
    with subprocess.Popen(
        [sys.executable, "-c", patient, str(model), str(tmp_path / "log")], stderr=subprocess.DEVNULL
    ) as ours:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.05)
        started = json.loads(pids.read_text())
        stop(ours, number)
    assert not wait_until_gone(started)
