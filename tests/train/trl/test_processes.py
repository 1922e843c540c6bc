"""Two processes on CPU, weights split by FSDP2 over gloo, against one."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from gemsmith.errors import EngineError, InputError, MachineError, Preempted, RecipeError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe import Mesh
from gemsmith.run import Run
from gemsmith.sizing.limits import trl_mesh
from gemsmith.train.stage import train
from gemsmith.train.trl import group as trl_group
from gemsmith.train.trl import launch as trl_launch
from gemsmith.train.trl import worker as trl_worker
from gemsmith.train.trl.launch import wanted_processes

KEYS = {"lora": {"dropout": 0.0}, "optimizer": {"epsilon": 1e-3}}  # Adam divides by it where a gradient is all but 0
TRAIN = {"backend": "trl", "rows_per_step": 4, "optimizer_steps": None, "micro_batches": 2}
# Of the four rows of the last step only the first is no padding: the second process has nothing.
DATA = {"train": {"task": "verilog", "rows": 13}, "packing": False}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def sigterm_once(file):
    """Sends this process SIGTERM as soon as the file is there."""

    def wait():
        deadline_s = time.monotonic() + 300
        while not file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def test_two_processes_train_stop_and_go_on_like_one(prepare, tmp_path, capfd):
    """One call starts both and hands SIGTERM on to both; the next one goes on where they stopped."""
    alone = prepare(tmp_path / "alone", data=DATA, train=TRAIN, **KEYS)
    together = prepare(tmp_path / "together", data=DATA, train=TRAIN | {"mesh": {"fsdp": 2}}, **KEYS)
    one = train(alone)
    sigterm_once(together.logs / "train_steps.jsonl")
    with pytest.raises(Preempted):
        train(together)
    err = capfd.readouterr().err
    assert "torchrun --nproc-per-node 2 -m gemsmith train" in err
    stopped = max(int(path.name) for path in together.checkpoints.iterdir())
    assert stopped < 4 and f"step {stopped} is saved" in err
    two = train(together)
    assert two.mesh == {"replica": 1, "fsdp": 2, "sequence": 1, "tp": 1} and two.resumed_at == (stopped,)
    assert [step.loss for step in two.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-6)
    assert [step.grad_norm for step in two.steps] == pytest.approx([step.grad_norm for step in one.steps], rel=1e-5)
    assert [step.real_tokens for step in two.steps] == [step.real_tokens for step in one.steps]
    expected, found = (read_run_adapter(run, 4).modules for run in (alone, together))
    for name in expected:
        for side in ("a", "b"):  # between processes sums are taken in another order
            assert np.abs(getattr(found[name], side) - getattr(expected[name], side)).max() <= 1e-6, (name, side)
    assert len(list(together.tensorboard.iterdir())) == 2  # one for each start of the first process


ENDS = """
import json, os, signal, sys, time
recipe = json.load(sys.stdin)
assert recipe["train"]["mesh"]["fsdp"] == 2 and os.environ["WORLD_SIZE"] == "2" and sys.argv[2:] == ["--fresh"]
if os.environ["RANK"] == "1":
    print("error: its own reason", file=sys.stderr)
    sys.exit({code})
time.sleep({others_s})
os.kill(os.getpid(), signal.SIGTERM) if {code} == 143 else sys.exit(1)
"""


@pytest.mark.parametrize(
    ("code", "others_s", "kind", "expected"),
    [
        (2, 0, InputError, "process 1 of 2 ended with 2; its reason is above"),
        (1, 0, EngineError, "process 0 of 2 ended with 1"),
        (143, 0, Preempted, "stopped by SIGTERM; continue with"),
        (130, 0, KeyboardInterrupt, None),
        (2, 600, InputError, "process 1 of 2 ended with 2"),  # the other waits for it for ever
    ],
)
def test_what_a_process_ended_with_is_what_the_command_ends_with(
    small_recipe, tmp_path, monkeypatch, code, others_s, kind, expected
):
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", ENDS.format(code=code, others_s=others_s)))
    monkeypatch.setattr(trl_launch, "_PATIENCE_S", 0.2)
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))
    with pytest.raises(kind, match=expected):
        trl_launch.launch(run, 2, fresh=True)


SAVES = """
import os, sys, time
sys.stdin.read()
if os.environ["RANK"] == "0":
    time.sleep(1)
    open(os.path.join(sys.argv[1], "saved"), "w").close()
sys.exit(143)
"""


def test_the_process_that_writes_the_checkpoint_has_all_the_time_it_needs(small_recipe, tmp_path, monkeypatch):
    """After SIGTERM the others have ended long before."""
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", SAVES))
    monkeypatch.setattr(trl_launch, "_PATIENCE_S", 0.1)
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))
    with pytest.raises(Preempted, match="stopped by SIGTERM; continue with"):
        trl_launch.launch(run, 2, fresh=False)
    assert (tmp_path / "saved").exists()


def test_a_process_says_why_it_failed_once(prepare, tmp_path, monkeypatch, capsys):
    run = prepare(tmp_path / "run", train=TRAIN, optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    for rank, expected in (("0", "error: training stopped: step 2 has loss nan"), ("1", "")):
        monkeypatch.setattr(sys, "argv", ["worker", str(run.path)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(run.recipe.model_dump_json()))
        with monkeypatch.context() as patch:
            patch.setenv("RANK", rank)
            patch.delenv("WORLD_SIZE", raising=False)
            assert trl_worker.main() == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert "".join(lines).startswith(expected) and bool(lines) == bool(expected)


@pytest.mark.parametrize(
    ("error", "code"), [(MachineError("out of memory"), 2), (RuntimeError("CUDA error"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_process_that_fails_on_a_gpu_does_not_wait_for_the_others(monkeypatch, error, code):
    """NCCL's communicators end together, and the others may be in a collective that this process will not come to."""
    left, ended = [], []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, stand_in in {
        "init_process_group": lambda *_, **__: None,
        "get_rank": lambda: 1,
        "get_world_size": lambda: 2,
        "destroy_process_group": lambda: ended.append(True),
    }.items():
        monkeypatch.setattr(torch.distributed, name, stand_in)
    monkeypatch.setattr(trl_group.atexit, "register", lambda *call: left.append(call))
    monkeypatch.setattr(trl_group.os, "_exit", left.append)
    with pytest.raises(type(error)), trl_group.joined(2):
        raise error
    assert not ended
    ((leave, found),) = left
    leave(found)
    assert found == left[1] == code
    with trl_group.joined(2):
        pass
    assert ended


@pytest.mark.parametrize(
    ("gpus", "rows", "micro", "expected"),
    [(0, 8, 1, 1), (1, 8, 1, 1), (8, 8, 1, 8), (8, 8, 2, 4), (8, 6, 1, 6), (4, 5, 1, 1)],
)
def test_as_many_gpus_take_part_as_share_the_rows_of_a_step(small_recipe, gpus, rows, micro, expected):
    assert wanted_processes(small_recipe(train={"rows_per_step": rows, "micro_batches": micro}), gpus) == expected


def test_a_mesh_decides_how_many_processes_there_are(small_recipe):
    recipe = small_recipe(train={"rows_per_step": 8, "mesh": {"replica": 2, "fsdp": 2}})
    assert wanted_processes(recipe, 4) == wanted_processes(recipe, 0) == 4
    assert trl_mesh(recipe, 4) == Mesh(replica=2, fsdp=2)
    assert trl_mesh(small_recipe(train={"rows_per_step": 8}), 8) == Mesh(fsdp=8)
    with pytest.raises(RecipeError, match="this machine has 2 GPUs"):
        wanted_processes(recipe, 2)
    with pytest.raises(RecipeError, match="replica 2 × fsdp 2 is not the number of processes, 8"):
        trl_mesh(recipe, 8)


LAUNCHER = """
import os, subprocess, sys, time
from gemsmith.train.trl.launch import LAUNCHER
code = (
    "import time; from gemsmith.train.trl import worker; worker._end_with_launcher(); print(flush=True); "
    "time.sleep(300)"
)
environment = os.environ | {LAUNCHER: str(os.getpid() + int(sys.argv[1]))}
worker = subprocess.Popen([sys.executable, "-c", code], env=environment)
print(worker.pid, flush=True)
print(worker.wait(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not hear of its parent's death")
def test_a_process_ends_with_the_one_that_started_it_also_where_that_is_killed():
    """It must not go on to save: with its launcher, the lock of the run directory is gone."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, "0"], stdout=subprocess.PIPE, text=True) as launcher:
        worker = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "\n"
        launcher.kill()
        try:
            assert launcher.communicate(timeout=60)[0] == "", "the worker closes it too, by its end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, "1"], stdout=subprocess.PIPE, text=True) as another:
        assert another.stdout.read().split()[1:] == ["1"]
