"""Two processes with four devices each, against one with eight."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from gemsmith.errors import EngineError, MachineError, RunError, Terminated
from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, find_run, read_record
from gemsmith.train.jax import distributed as hosts
from gemsmith.train.stage import train
from support.made import made_once, shared_folder

HOST = """
import ctypes, os, signal, sys, time
from gemsmith import cli
from gemsmith.data.batches import Batches
from gemsmith.train.jax import backend, distributed
from support.fault_points import arm
batch, stop_at, event = Batches.batch, int(sys.argv.pop()), os.environ["EVENT"]
if event in ("sleep", "PyDLL"):
    distributed.LONGEST_STEP_S, distributed._LOOK_S = 8, 0.5
if event == "alone":
    distributed._PATIENCE_S = 3
if event == "late":
    distributed.LONGEST_STEP_S, distributed._LOOK_S, compile_program = 20, 0.5, backend.compile_program
    def late(*given):
        time.sleep(30 if stop_at else 0)
        return compile_program(*given)
    backend.compile_program = late
def stopped(self, step, rows=None):
    if step == stop_at and event == "sleep":
        time.sleep(600)
    elif step == stop_at and event == "PyDLL":
        ctypes.PyDLL(None).sleep(600)  # no other thread of Python gets to run
    elif step == stop_at:
        os.kill(os.getpid(), getattr(signal, event))
    print("READ", step, *(rows or ["all"]))
    return batch(self, step, rows)
Batches.batch = stopped
for fault in filter(None, os.environ["FAULT"].split(",")):
    arm(fault)
cli.main(sys.argv[1:])
"""
KEYS = {
    "train": {"max_steps": 4, "global_batch_size": 8},
    "lora": {"targets": ["q", "k", "down"]},
    "data": {"max_length": 128},
    "optimizer": {"epsilon": 1e-3},  # Adam divides by it where a gradient is all but 0, and rounding would decide
}


def start(run, *options, devices, stop_at=0, event="SIGTERM", fault=""):
    """`gemsmith train`; before step `stop_at` it gets the signal, or hangs; `fault`: see support/fault_points.py."""
    environment = os.environ | {
        "EVENT": event,
        "FAULT": fault,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_NUM_CPU_DEVICES": str(devices),  # by XLA_FLAGS, a process more would ask XLA about them
        "JAX_PLATFORMS": "cpu",
    }
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is most of the time
    arguments = ["train", str(run.path), *options, stop_at]
    command = [sys.executable, "-W", "ignore", "-c", HOST, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def group_of(processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", processes, "--process-id"


@pytest.fixture(scope="module")
def alone(prepare, tmp_path_factory):
    """A run that one process with eight devices trained, once for all tests."""

    def make(folder):
        process = start(prepare(folder, **KEYS), devices=8)
        err = process.communicate(timeout=300)[1]
        assert process.returncode == 0, err

    folder = made_once(shared_folder(tmp_path_factory) / "trained" / "by-eight-devices", make)
    return Run(path=folder, recipe=find_run(folder))


TUNIX = "gemsmith.train.jax.backend"
FINALIZE = "orbax.checkpoint._src.path.atomicity:AtomicRenameTemporaryPath.finalize"
# What happens to one of two hosts, and what both end with and say.
ALONE = (
    (0, f"TERM 1 {TUNIX}:load_model", [143, 1], ["note: stopped by SIGTERM;", "error: training: host 0 of 2 is lost:"]),
    (1, f"TERM 1 {TUNIX}:compile_program", [143, 143], ["note: stopped by SIGTERM: no step is saved yet"] * 2),
    (0, f"ENOSPC 1 {FINALIZE}", [2, 1], ["error: no space left on device", "error: training: host 0 of 2 is lost:"]),
)


@pytest.mark.slow
def test_what_happens_to_one_of_two_hosts_ends_both_with_a_line_of_each(prepare, tmp_path):
    run = prepare(tmp_path / "run", **KEYS)
    for struck, fault, codes, lines in ALONE:
        group = group_of(2)
        begun = [start(run, *group, host, devices=4, fault=fault if host == struck else "") for host in (0, 1)]
        told = [process.communicate(timeout=300)[1] for process in begun]
        said = [[line for line in err.splitlines() if not line.startswith("train")] for err in told]
        assert [process.returncode for process in begun] == codes, (fault, told)
        assert all(len(own) == 1 and own[0].startswith(line) for own, line in zip(said, lines, strict=True)), (
            fault,
            told,
        )


@pytest.mark.slow
def test_two_hosts_train_stop_and_go_on_like_one(prepare, tmp_path, alone):
    """Of two hosts, the second is told to stop; both do, after the same step. It is told once more as training ends.

    A damaged step is set aside by the first before the second has looked for its new name.
    """
    together, group = prepare(tmp_path / "together", **KEYS), group_of(2)
    begun = [start(together, *group, host, devices=4, stop_at=2 * host) for host in (0, 1)]
    stopped = [process.communicate(timeout=300) for process in begun]
    shutil.copytree(together.checkpoints / "2", together.checkpoints / "3")
    (together.checkpoints / "3" / "_CHECKPOINT_METADATA").unlink()
    late = ("", "TERM 1 gemsmith.train.loop:TrainSession.record,SLOW 3000 gemsmith.checkpoints.steps:set_aside")
    again = [start(together, *group, host, devices=4, fault=late[host]) for host in (0, 1)]
    ended = [process.communicate(timeout=300) for process in again]
    assert [process.returncode for process in (*begun, *again)] == [143, 143, 0, 143], (stopped, ended)
    for rows, before, after in zip(("0 1 2 3", "4 5 6 7"), stopped, ended, strict=False):
        read = [[line for line in out.splitlines() if line.startswith("READ")] for out, _ in (before, after)]
        assert read == [[f"READ {step} {rows}" for step in steps] for steps in ((1, 2), (3, 4))], (before, after)
        assert "step 2 is saved" in before[1]
    assert "step 4/4" in ended[0][1] and "step 4/4" not in ended[1][1]
    one, two = (read_record(run, TrainRecord) for run in (alone, together))
    assert two.hosts == 2 and two.resumed_at == (2,) and one.hosts == 1
    assert [step.loss for step in two.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    assert [step.real_tokens for step in two.steps] == [step.real_tokens for step in one.steps]
    expected, found = (read_run_adapter(run, 4).modules for run in (alone, together))
    for name in expected:
        for side in ("a", "b"):  # measured: 4e-7, since between processes sums are taken in another order
            assert np.abs(getattr(found[name], side) - getattr(expected[name], side)).max() <= 1e-6, (name, side)
    assert len(list(together.tensorboard.iterdir())) == 2  # one for each start of the first host
    assert "/3: is damaged (its _CHECKPOINT_METADATA is missing); it is kept as 3.damaged" in ended[0][1]
    assert (together.checkpoints / "3.damaged").is_dir()


@pytest.mark.slow
def test_two_hosts_answer_like_one(prepare, tmp_path):
    """Three prompts over eight devices: the second host, late and slow to compile, has rows of padding alone."""
    keys = KEYS | {
        "data": KEYS["data"] | {"eval": {"task": "verilog", "rows": 5, "split": "held-out"}},
        "train": KEYS["train"] | {"max_steps": 1, "eval_steps": 1, "sample_answers": 3},
    }
    alone, together = (prepare(tmp_path / name, **keys) for name in ("alone", "together"))
    group = group_of(2)
    started = [start(alone, devices=8), start(together, *group, 0, devices=4, event="late")]
    time.sleep(10)
    started.append(start(together, *group, 1, devices=4, event="late", stop_at=-1))
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], told
    assert told[1][1].count("train    answered  ") == 3 and "answered" not in told[2][1]
    one, two = (read_record(run, TrainRecord).evaluations[0].answers for run in (alone, together))
    assert one == two and len(one) == 3


HANGS = ("sleep", "PyDLL")


def lose(run, event, *, lost, hosts=2):
    """What the others of so many hosts end with, and say beside what they do."""
    group, devices = group_of(hosts), 8 // hosts
    all_ = [start(run, *group, host, devices=devices, stop_at=4 * (host == lost), event=event) for host in range(hosts)]
    others = [process for process in all_ if process is not all_[lost]]
    try:
        ended = [process.communicate(timeout=150)[1] for process in others]
        if event in HANGS:  # it does not stay either
            ended.append(all_[lost].communicate(timeout=90)[1])
    finally:
        for process in all_:
            process.kill()
        all_[lost].communicate()
    return {process.returncode for process in others}, [
        line for err in ended for line in err.splitlines() if not line.startswith("train")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("event", "lost"), [("SIGKILL", 0), ("SIGSTOP", 0), ("SIGSTOP", 1)])
def test_a_host_that_is_killed_or_suspended_ends_the_others_with_one_line(prepare, tmp_path, event, lost):
    codes, said = lose(prepare(tmp_path / "run", **KEYS), event, lost=lost)
    assert codes == {1} and len(said) == 1, said
    assert said[0].startswith(f"error: training: host {lost} of 2 is lost: it was killed or suspended, has failed,")


@pytest.mark.slow
@pytest.mark.parametrize(("event", "lost"), [("sleep", 1), ("PyDLL", 0), ("PyDLL", 1)])
def test_a_host_that_hangs_ends_the_other_with_one_line(prepare, tmp_path, event, lost):
    codes, said = lose(prepare(tmp_path / "run", **KEYS), event, lost=lost)
    assert codes == {1} and len(said) == 2, said
    # Its 8 s, or ten times what a step took.
    told = (
        rf"error: training: host {lost} of 2 (hangs, without a step for (0\.\d+) minutes; all hosts end, and|is lost:)"
    )
    found = re.match(told, said[0])
    assert found and float(found[2] or 0.133) >= 0.133, said


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["7 120", "6 121", "7 119"], "host 1 of 3 hangs"),
        (["6 120", "6 2"], "host 1 of 2 hangs"),  # in C, with Python's lock
        (["5 121", "6 120", "7 120", "5 121"], "host 0 and 3 of 4 hangs"),
        (["6 120", "6 121"], "the hosts hang"),
    ],
)
def test_the_host_that_has_come_least_far_or_looks_no_more_is_the_one_that_hangs(said, expected):
    assert hosts.who_hangs([(f"gemsmith/progress/{host}", each) for host, each in enumerate(said)], 120) == expected


@pytest.mark.slow
def test_a_first_host_that_waits_for_another_in_vain_ends_with_one_line(prepare, tmp_path):
    process = start(prepare(tmp_path / "run", **KEYS), *group_of(2), 0, devices=4, event="alone")
    err = process.communicate(timeout=300)[1]
    said = [line for line in err.splitlines() if not line.startswith("train")]
    assert process.returncode == 1, err
    assert said == ["error: training: not all 2 hosts have come; start each with the same command"]


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "left"), [(2, 1), (4, 2)])
def test_where_a_host_was_lost_fewer_go_on_with_the_losses_of_one(prepare, tmp_path, alone, hosts, left):
    run = prepare(tmp_path / "run", **KEYS | {"train": KEYS["train"] | {"save_steps": 1}})
    codes, said = lose(run, "SIGKILL", lost=hosts - 1, hosts=hosts)
    told = f"error: training: host {hosts - 1} of {hosts} is lost: it was"
    assert codes == {1} and len(said) == hosts - 1 and all(line.startswith(told) for line in said), said
    group = group_of(left)
    again = [start(run, *((*group, n) if left > 1 else ()), devices=8 // left) for n in range(left)]
    for process in again:
        err = process.communicate(timeout=300)[1]
        assert process.returncode == 0, err
    one, two = (read_record(each, TrainRecord) for each in (alone, run))
    assert two.resumed_at[0] >= 1 and two.hosts == left and one.resumed_at == ()
    assert [step.loss for step in two.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)


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
    with pytest.raises(MachineError, match=expected), hosts.joined_hosts():
        pass


def join(monkeypatch, address, host):
    for name, value in {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(host),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "_PATIENCE_S", 0.3)
    with hosts.joined_hosts():
        pass


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


def test_hosts_of_a_tpu_slice_find_each_other_and_part(monkeypatch):
    begun = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: begun.append((given, options)))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: begun.append("parted"))
    monkeypatch.setattr(hosts, "_have_lost_hosts_said", lambda _: os.dup(2))
    for count in (1, 4):
        monkeypatch.setattr(hosts, "count_tpu_hosts", lambda count=count: count)
        with hosts.joined_hosts():
            begun.append("trains")
    assert begun == [
        "trains",
        ((), {"heartbeat_timeout_seconds": 30, "initialization_timeout": 300}),
        "trains",
        "parted",
    ]


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (RunError("other rows"), [2]),
        (KeyboardInterrupt(), [130]),
        (ZeroDivisionError(), [1]),
        (jax.errors.JaxRuntimeError("INTERNAL: of its own"), [1]),
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED"), ["waits", 1]),
        (Terminated("told"), ["parts"]),
        (Terminated("told before all have compiled"), [143]),
    ],
)
def test_a_host_that_fails_does_not_wait_for_the_others_and_one_that_is_told_to_stop_does(monkeypatch, error, then):
    seen = []
    monkeypatch.setattr(hosts, "_progress", SimpleNamespace(count=int(then != [143]), longest_s=1.0))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: seen.append("parts"))
    monkeypatch.setattr(hosts, "count_tpu_hosts", lambda: 2)
    monkeypatch.setattr(hosts, "_have_lost_hosts_said", lambda _: 0)
    monkeypatch.setattr(hosts.time, "sleep", lambda _: seen.append("waits"))
    monkeypatch.setattr(hosts.atexit, "register", lambda _, code: seen.append(code))
    lost = then[0] == "waits"
    expected = pytest.raises(EngineError if lost else type(error), match="another host is lost" if lost else None)
    with expected, hosts.joined_hosts():
        raise error
    assert seen == then


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
