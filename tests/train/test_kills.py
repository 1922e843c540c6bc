"""Training killed again and again, at random moments and in the middle of saves, ends with the adapter, or the weights,
of one that nothing stopped."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from gemsmith.export.adapters import read_run_adapter, read_run_weights
from gemsmith.recipe.schema import Lora
from gemsmith.train.stage import train

# Imports once, and for each line that it reads starts a training in a process of its own, whose number it prints, and
# then its end.
TRAININGS = """
import importlib, os, sys, time
from pathlib import Path
from gemsmith.data.batches import Batches
from gemsmith.runs.run import Run, find_run
path, module, function = Path(sys.argv[1]), *sys.argv[2:]
backend, batch = importlib.import_module(module), Batches.batch
def slowly(self, step, *rows):
    time.sleep(600 if step > most else 0.05)
    return batch(self, step, *rows)
Batches.batch = slowly
rename = os.rename
def wait_and_rename(path, *others):
    time.sleep(0.1 if str(path).endswith(".partial") else 0)  # TRL's saves are over in a millisecond
    rename(path, *others)
os.rename = wait_and_rename
for line in sys.stdin:
    most = int(line)
    child = os.fork()
    if not child:
        getattr(backend, function)(Run(path=path, recipe=find_run(path)))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
BACKENDS = {
    "tunix": ("gemsmith.train.jax.backend", "train_with_tunix"),
    "trl": ("gemsmith.train.torch.backend", "train_with_trl"),
}
METHODS = {"lora": {"targets": ["q", "down"]}, "full": Lora().model_dump(mode="json")}
MOMENTS = ("in a save", "after a save", "anywhere")


def checkpoint_steps(run):
    return [int(path.name) for path in run.checkpoints.glob("*") if path.name.isdigit()]


def half_saved(run):
    return [*run.checkpoints.glob("*.orbax-checkpoint-tmp*"), *run.checkpoints.glob(".*.partial")]


def trained_bytes(run, step):
    """{name: what training made of it}."""
    if run.recipe.train.method == "full":
        return {name: weight.tobytes() for name, weight in read_run_weights(run, step).items()}
    modules = read_run_adapter(run, step).modules
    return {name: (pair.a.tobytes(), pair.b.tobytes()) for name, pair in modules.items()}


def wait_for(moment, run, chance):
    """Returns at such a moment, or after half a minute."""
    before, deadline_s = max(checkpoint_steps(run), default=0), time.monotonic() + 30
    if moment == "anywhere":
        time.sleep(chance.uniform(0, 4))
        return
    while time.monotonic() < deadline_s:
        if max(checkpoint_steps(run), default=0) > before and (moment == "after a save" or half_saved(run)):
            break
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01 if moment == "in a save" else 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_at_random_ends_with_the_bytes_of_one_that_was_not(
    prepare, tmp_path, monkeypatch, method, backend
):
    kills, threads = 9, torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    keys = {"method": method, "backend": backend, "max_steps": 6 * kills, "save_steps": 1}
    whole, killed = (prepare(tmp_path / name, train=keys, lora=METHODS[method]) for name in ("whole", "killed"))
    expected, chance, halves, ends = train(whole), random.Random(kills), 0, []
    command = [sys.executable, "-W", "ignore", "-c", TRAININGS, str(killed.path), *BACKENDS[backend]]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (tmp_path / "stderr").open("w") as stderr, subprocess.Popen(command, stderr=stderr, **streams) as trainings:
        for number in range(kills):
            trainings.stdin.write(f"{max(checkpoint_steps(killed), default=0) + 5}\n")  # and there it waits
            trainings.stdin.flush()
            child = int(trainings.stdout.readline())
            wait_for(MOMENTS[number % 3], killed, chance)
            os.kill(child, signal.SIGKILL)
            ends.append(int(trainings.stdout.readline()))
            halves += bool(half_saved(killed))
    assert ends == [-9] * kills, (tmp_path / "stderr").read_text()[-2000:]
    assert halves, "no kill fell into a save"
    assert max(checkpoint_steps(killed)) < 6 * kills
    record = train(killed)
    assert record.resumed_at and not half_saved(killed)
    assert [step.loss for step in record.steps] == [step.loss for step in expected.steps]
    found, wanted = (trained_bytes(run, 6 * kills) for run in (killed, whole))
    assert found == wanted and len(wanted) >= 4
