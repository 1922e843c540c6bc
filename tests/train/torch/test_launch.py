"""One command starts as many processes as take part, and ends as they end."""

import os
import signal
import sys
import threading
import time

import pytest

from gemsmith.errors import EngineError, InputError, RecipeError, Terminated
from gemsmith.hardware.model.limits import trl_mesh
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.run import Run
from gemsmith.train.torch import distributed as trl_launch
from gemsmith.train.torch.distributed import wanted_processes

pytestmark = pytest.mark.usefixtures("one_thread")


ENDS = """
import json, os, signal, sys, time
recipe = json.load(sys.stdin)
assert recipe["train"]["mesh"]["fsdp"] == 2 and os.environ["WORLD_SIZE"] == "2" and sys.argv[2:] == ["--restart"]
assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
if os.environ["RANK"] == "1":
    print("of a library\\nerror: its own reason")
    sys.exit({code})
time.sleep({others_s})
os.kill(os.getpid(), signal.SIGTERM) if {code} == 143 else sys.exit(1)
"""


@pytest.mark.parametrize(
    ("code", "others_s", "kind", "expected"),
    [
        (2, 0, InputError, r"process 1 of 2 ended with 2 \(its own reason\); continue with"),
        (1, 0, EngineError, "process 0 of 2 ended with 1; its reason is above"),
        (143, 0, Terminated, "stopped by SIGTERM: no step is saved yet; continue with: gemsmith train"),
        (130, 0, KeyboardInterrupt, "stopped by Ctrl-C: no step is saved yet; continue with: gemsmith train"),
        (2, 600, InputError, "process 1 of 2 ended with 2"),  # the other waits for it for ever
    ],
)
def test_what_a_process_ended_with_is_what_the_command_ends_with(
    small_recipe, tmp_path, monkeypatch, code, others_s, kind, expected
):
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", ENDS.format(code=code, others_s=others_s)))
    monkeypatch.setattr(trl_launch, "_PATIENCE_S", 0.2 if others_s else 60)
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))
    with pytest.raises(kind, match=expected):
        trl_launch.launch(run, 2, restart=True)


HIT = """
import os, signal, sys, time
sys.stdin.read()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.{name})
time.sleep({others_s})
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("name", "others_s", "expected"),
    [
        ("SIGKILL", 0.2, "process 1 of 2 was ended by SIGKILL, as where"),
        ("SIGKILL", 600, "process 1 of 2 was ended by SIGKILL, as where"),
        ("SIGABRT", 0.2, "process 1 of 2 was ended by SIGABRT; continue with"),
        ("SIGSTOP", 600, "process 1 of 2 is suspended, and the others wait for it; all were ended; continue with"),
    ],
)
def test_a_process_that_is_killed_or_suspended_ends_the_others_and_is_named(
    small_recipe, tmp_path, monkeypatch, name, others_s, expected
):
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", HIT.format(name=name, others_s=others_s)))
    monkeypatch.setattr(trl_launch, "_PATIENCE_S", 0.2 if others_s == 600 else 60)
    monkeypatch.setattr(trl_launch, "_SUSPENDED_S", 0.3)
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))
    with pytest.raises(EngineError, match=expected):
        trl_launch.launch(run, 2, restart=True)


DEAF = """
import sys, time
from datetime import timedelta
import torch
from gemsmith.train.torch import backend, distributed, worker
distributed._LONGEST_STEP = timedelta(seconds=1)
def train(run, restart):
    with distributed.joined(0) as group:
        group.bound_waits()
        time.sleep(600 * group.rank)
        group.total([1.0])
backend.train_with_trl = train
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_a_process_that_is_waited_for_in_vain_ends_the_others(small_recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", DEAF))
    monkeypatch.setattr(trl_launch, "_PATIENCE_S", 0.2)
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))
    with pytest.raises(EngineError, match="process 1 of 2 hangs, and the others have waited for it in vain; continue"):
        trl_launch.launch(run, 2, restart=True)
    assert "note: process 0 lost another" in capfd.readouterr().err


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
    with pytest.raises(Terminated, match="stopped by SIGTERM: no step is saved yet; continue with"):
        trl_launch.launch(run, 2, restart=False)
    assert (tmp_path / "saved").exists()


STOPPED = """
import os, signal, sys, time
sys.stdin.read()
run, rank = sys.argv[1], os.environ["RANK"]
def save(number, _):
    os.makedirs(os.path.join(run, "checkpoints", "7"), exist_ok=True)
    open(os.path.join(run, "checkpoints", "7", "training.json"), "w").close()
    if "{deaf}" != "deaf":
        sys.exit(143)
signal.signal(signal.SIGTERM, save)
open(os.path.join(run, "started" + rank), "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(("times", "deaf"), [(1, ""), (2, "deaf")])
def test_the_first_ctrl_c_lets_all_processes_save_and_the_second_ends_them(
    small_recipe, tmp_path, monkeypatch, times, deaf
):
    monkeypatch.setattr(trl_launch, "_WORKER", (sys.executable, "-c", STOPPED.format(deaf=deaf)))
    run = Run(path=tmp_path, recipe=small_recipe(train={"mesh": {"fsdp": 2}}))

    def press():
        for files in (("started0", "started1"), ("checkpoints/7/training.json",))[:times]:
            while not all((tmp_path / file).exists() for file in files):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C: step 7 is saved; continue with: gemsmith train"):
        trl_launch.launch(run, 2, restart=False)
    presses.join()


@pytest.mark.parametrize(
    ("gpus", "rows", "micro", "expected"),
    [(0, 8, 1, 1), (1, 8, 1, 1), (8, 8, 1, 8), (8, 8, 2, 4), (8, 6, 1, 6), (4, 5, 1, 1)],
)
def test_as_many_gpus_take_part_as_share_the_rows_of_a_step(small_recipe, gpus, rows, micro, expected):
    assert (
        wanted_processes(small_recipe(train={"global_batch_size": rows, "gradient_accumulation_steps": micro}), gpus)
        == expected
    )


def test_a_mesh_decides_how_many_processes_there_are(small_recipe):
    recipe = small_recipe(train={"global_batch_size": 8, "mesh": {"replica": 2, "fsdp": 2}})
    assert wanted_processes(recipe, 4) == wanted_processes(recipe, 0) == 4
    assert trl_mesh(recipe, 4) == Mesh(replica=2, fsdp=2)
    assert trl_mesh(small_recipe(train={"global_batch_size": 8}), 8) == Mesh(fsdp=8)
    with pytest.raises(RecipeError, match="this machine has 2 GPUs"):
        wanted_processes(recipe, 2)
    with pytest.raises(RecipeError, match="replica 2 × fsdp 2 is not the number of processes, 8"):
        trl_mesh(recipe, 8)
