"""Two processes with four devices each, against one with eight."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from gemsmith.errors import MachineError, RunError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import read_record
from gemsmith.train.jax import distributed as hosts
from gemsmith.train.stage import train

HOST = """
import os, signal, sys
from gemsmith import cli
from gemsmith.data.batches import Batches
batch, stop_at = Batches.batch, int(sys.argv.pop())
def stopped(self, step, rows=None):
    if step == stop_at:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    print("READ", step, *(rows or ["all"]))
    return batch(self, step, rows)
Batches.batch = stopped
for _ in range(int(sys.argv.pop())):
    try:
        cli.main(sys.argv[1:])
    except SystemExit as end:
        print("READ", "exit", end.code)
    stop_at = 0
"""
KEYS = {
    "train": {"max_steps": 4, "global_batch_size": 8},
    "lora": {"targets": ["q", "k", "down"]},
    "data": {"max_length": 128},
    "optimizer": {"epsilon": 1e-3},  # Adam divides by it where a gradient is all but 0, and rounding would decide
}


def start(run, *options, devices, times, stop_at=0, signal="SIGTERM"):
    """`gemsmith train`, so many times in one process; before step `stop_at` of the first it gets the signal."""
    environment = os.environ | {
        "SIGNAL": signal,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is most of the time
    arguments = ["train", str(run.path), *options, times, stop_at]
    command = [sys.executable, "-W", "ignore", "-c", HOST, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_two_hosts_train_stop_and_go_on_like_one(prepare, tmp_path):
    """Of two hosts, the second is told to stop; both do, after the same step."""
    alone, together = (prepare(tmp_path / name, **KEYS) for name in ("alone", "together"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", 2, "--process-id")
    started = [
        start(alone, devices=8, times=1),
        *(start(together, *group, host, devices=4, times=2, stop_at=2 * host) for host in (0, 1)),
    ]
    (_, err), first, second = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], (err, first, second)
    for rows, (out, err) in (("0 1 2 3", first), ("4 5 6 7", second)):
        read = [line.removeprefix("READ ") for line in out.splitlines() if line.startswith("READ")]
        assert read == [f"1 {rows}", f"2 {rows}", "exit 143", f"3 {rows}", f"4 {rows}", "exit 0"], err
        assert "step 2 is saved" in err
    assert "step 4/4" in first[1] and "step 4/4" not in second[1]
    one, two = (read_record(run, TrainRecord) for run in (alone, together))
    assert two.hosts == 2 and two.resumed_at == (2,) and one.hosts == 1
    assert [step.loss for step in two.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    assert [step.real_tokens for step in two.steps] == [step.real_tokens for step in one.steps]
    expected, found = (read_run_adapter(run, 4).modules for run in (alone, together))
    for name in expected:
        for side in ("a", "b"):  # measured: 4e-7, since between processes sums are taken in another order
            assert np.abs(getattr(found[name], side) - getattr(expected[name], side)).max() <= 1e-6, (name, side)
    assert len(list(together.tensorboard.iterdir())) == 2  # one for each start of the first host


@pytest.mark.slow
def test_two_hosts_answer_like_one(prepare, tmp_path):
    """Three prompts over eight devices: the second host has rows of padding alone."""
    keys = KEYS | {
        "data": KEYS["data"] | {"eval": {"task": "verilog", "rows": 5, "split": "held-out"}},
        "train": KEYS["train"] | {"max_steps": 1, "eval_steps": 1, "sample_answers": 3},
    }
    alone, together = (prepare(tmp_path / name, **keys) for name in ("alone", "together"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", 2, "--process-id")
    started = [start(alone, devices=8, times=1), *(start(together, *group, n, devices=4, times=1) for n in (0, 1))]
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], told
    assert told[1][1].count("train    answered  ") == 3 and "answered" not in told[2][1]
    one, two = (read_record(run, TrainRecord).evaluations[0].answers for run in (alone, together))
    assert one == two and len(one) == 3


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_host_that_is_killed_or_suspended_ends_the_other(prepare, tmp_path, signal):
    """JAX ends that one, and its own words say why. The saved steps are whole: training goes on from the last."""
    run = prepare(tmp_path / "run", train=KEYS["train"] | {"save_steps": 1}, lora=KEYS["lora"], data=KEYS["data"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = ("--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", 2, "--process-id")
    first, second = (start(run, *group, host, devices=4, times=1, stop_at=4 * host, signal=signal) for host in (0, 1))
    try:
        _, err = first.communicate(timeout=300)
    finally:
        second.kill()
        second.communicate()
        first.kill()
    assert first.returncode not in (0, 1, 2) and "Task 1 heartbeat timeout" in err
    again = start(run, devices=8, times=1)
    assert "READ exit 0" in again.communicate(timeout=300)[0]
    assert read_record(run, TrainRecord).resumed_at[0] >= 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:80"},
            "JAX_NUM_PROCESSES: is missing; several hosts need .* --process-id",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS: is missing"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:80", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "JAX_PROCESS_ID: 2 of 2 was given",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "h", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "JAX_COORDINATOR_ADDRESS: 'h' was given",
        ),
    ],
)
def test_variables_that_name_no_group_of_hosts_are_refused(monkeypatch, given, expected):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=expected):
        hosts.start_hosts()


def join(monkeypatch, address, host):
    for name, value in {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(host),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "_PATIENCE_S", 0.3)
    hosts.start_hosts()


def test_a_first_host_that_is_not_there_is_one_line(monkeypatch):
    with pytest.raises(
        MachineError, match=r"host 1 of 2 does not reach the first at localhost:9 \(.*\); start that one too"
    ):
        join(monkeypatch, "localhost:9", 1)


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            MachineError, match=rf"JAX_COORDINATOR_ADDRESS: port {port} cannot be opened .*; name a free one"
        ):
            join(monkeypatch, f"localhost:{port}", 0)


def test_hosts_of_a_tpu_slice_find_each_other(monkeypatch):
    begun = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: begun.append((given, options)))
    for count in (1, 4):
        monkeypatch.setattr(hosts, "count_tpu_hosts", lambda count=count: count)
        hosts.start_hosts()
    assert begun == [((), {"heartbeat_timeout_seconds": 30})]


def test_hosts_that_were_given_different_things_are_told(prepared_run, monkeypatch):
    run = prepared_run()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    answers = iter([[0, 0, 0], [0, 0, 1]])
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda digest: np.array([digest ^ other for other in next(answers)])
    )
    with pytest.raises(RunError, match="host 2 of 3 has different rows from host 0; use the same rows on all hosts"):
        hosts.check_hosts(run)


def test_a_folder_for_checkpoints_that_not_all_hosts_see_is_refused(prepared_run, monkeypatch):
    run = prepared_run()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda _: None)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda value: value)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda value: np.array([value, value if value.ndim else False])
    )
    with pytest.raises(
        RunError, match=r"checkpoints: host 1 does not see what host 0 writes there; set train.checkpoint_folder"
    ):
        hosts.check_hosts(run)
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to initialize 'tpu': not found\nmore"), "Unable .* found"),
        (AssertionError(), "its plugin is not"),
    ],
)
def test_an_accelerator_that_is_not_there_is_one_line(prepared_run, monkeypatch, error, reason):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(
        MachineError, match=rf"^no accelerator: JAX_PLATFORMS is .* \({reason}.*\); unset it to train on what there is$"
    ):
        train(prepared_run())
