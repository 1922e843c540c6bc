"""Trainings that are killed or suspended at named places: the same command ends with the bytes of one that was not."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, find_run, read_record
from support.fault_points import commands, state, wait_until

pytestmark = pytest.mark.slow
STEPS, LOOP, TUNIX, TRL = (
    "gemsmith.checkpoints.steps",
    "gemsmith.train.loop",
    "gemsmith.train.jax",
    "gemsmith.train.torch",
)
PLACES = {
    "tunix": (
        f"1 {TUNIX}.backend:compile_program",
        f"1 {STEPS}:add_checksum",
        f"3 {STEPS}:add_checksum",  # Orbax writes in the background: a step is surely there at the third
        f"1 {TUNIX}.checkpoints:_restore",
        f"2 {LOOP}:TrainSession.finish",
        f"1 {LOOP}:write_record",  # all steps are saved
    ),
    "trl": (
        f"1 {TRL}.model:adapted_model",
        f"2 {TRL}.checkpoints:PeftCheckpoints.save",
        f"5 {TRL}.checkpoints:fsync_path",  # all files of another step are written, and it has no name yet
        f"1 {TRL}.checkpoints:PeftCheckpoints.read",
        f"2 {LOOP}:TrainSession.finish",
        f"1 {LOOP}:write_record",
    ),
}
WRITES = {
    "tunix": (f"1 {STEPS}:add_checksum", f"2 {STEPS}:add_checksum"),
    "trl": (
        f"2 {TRL}.checkpoints:write_tensors",
        f"1 {TRL}.checkpoints:write_peft_adapter",
        f"3 {TRL}.checkpoints:fsync_path",
        "1 pathlib:Path.rename",
    ),
}
EVERYWHERE = ("1 os:fsync", f"4 {LOOP}:TrainSession.finish", f"1 {LOOP}:write_record")
KEYS = {"lora": {"targets": ["q", "down"]}}


def weights(run):
    pairs = read_run_adapter(run, 6).modules
    return {name: (pair.a.tobytes(), pair.b.tobytes()) for name, pair in pairs.items()}


@pytest.fixture(scope="module", params=["tunix", "trl"])
def undisturbed(request, prepare, tmp_path_factory):
    """The backend, a run of six steps that nothing stops, and the folder of one that has not begun."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = prepare(folder / "whole", **KEYS, train={"backend": request.param})
    shutil.copytree(whole.path, folder / "prepared")
    with commands(folder, f"{TUNIX}.backend" if request.param == "tunix" else f"{TRL}.backend") as gemsmith:
        code, err = gemsmith.run("train", whole.path)  # as the others do: not among what tests before have set
    assert code == 0, err
    return request.param, whole, folder / "prepared"


@pytest.fixture
def both(undisturbed, tmp_path):
    """The same, with a run in the test's own folder."""
    backend, whole, prepared = undisturbed
    shutil.copytree(prepared, tmp_path / "run")
    return backend, whole, Run(path=tmp_path / "run", recipe=find_run(tmp_path / "run"))


def test_killed_at_a_named_place_the_same_command_ends_with_the_same_bytes(both, tmp_path, record_property):
    backend, whole, run = both
    with commands(tmp_path, f"{TUNIX}.backend" if backend == "tunix" else f"{TRL}.backend") as gemsmith:
        for place in PLACES[backend]:
            code, err = gemsmith.run("train", run.path, fault=f"KILL {place}")
            assert code == -signal.SIGKILL, f"{place}: {code}\n{err}"
        code, err = gemsmith.run("train", run.path)
    assert code == 0, err
    assert read_record(run, TrainRecord).resumed_at and weights(run) == weights(whole)
    record_property("tries", len(PLACES[backend]))


def test_a_disk_that_is_full_from_a_named_write_on_is_one_line_and_loses_nothing(both, tmp_path, record_property):
    backend, whole, run = both
    places = [*EVERYWHERE[:-1], *WRITES[backend], EVERYWHERE[-1]]
    with commands(tmp_path, f"{TUNIX}.backend" if backend == "tunix" else f"{TRL}.backend") as gemsmith:
        for place in places:
            code, err = gemsmith.run("train", run.path, fault=f"ENOSPC {place}")
            lines = [line for line in err.splitlines() if line.startswith("error: ")]
            assert code == 2 and len(lines) == 1 and "no space left" in lines[0], f"{place}: {code}\n{err}"
            assert "Traceback" not in err, f"{place}: {err}"
        code, err = gemsmith.run("train", run.path)
    assert code == 0, err
    assert weights(run) == weights(whole)
    record_property("tries", len(places))


def test_a_training_that_is_suspended_and_continued_ends_with_the_same_bytes(both, tmp_path):
    backend, whole, run = both
    with commands(tmp_path, f"{TUNIX}.backend" if backend == "tunix" else f"{TRL}.backend") as gemsmith:
        number = gemsmith.start("train", run.path, fault=f"STOP {PLACES[backend][1]}")
        wait_until(lambda: state(number) == "T", number)
        os.kill(number, signal.SIGCONT)
        code, err = gemsmith.wait()
    assert code == 0, err
    assert read_record(run, TrainRecord).resumed_at == () and weights(run) == weights(whole)


# `gemsmith train FOLDER`, which waits before step 4 until FOLDER/goes_on is there.
WAITING = """
import sys, time
from pathlib import Path
from gemsmith.cli import main
from gemsmith.data.batches import Batches
folder, batch = Path(sys.argv[1]), Batches.batch
def waiting(self, step, rows):
    while step == 4 and not (folder / "goes_on").exists():
        (folder / "waits").touch()
        time.sleep(0.05)
    return batch(self, step, rows)
Batches.batch = waiting
main(["train", str(folder)])
"""


@pytest.fixture
def on_a_terminal():
    """Starts a command on a terminal of its own; returns its process and the terminal, which a test closes."""
    begun = []

    def start(*command: str) -> tuple[subprocess.Popen[bytes], int]:
        ours, its = os.openpty()
        # The tests may run under nohup themselves.
        starter = ["env", "--default-signal=HUP", "setsid", "--ctty"]
        begun.append(subprocess.Popen([*starter, *command], stdin=its, stdout=its, stderr=its))
        os.close(its)
        return begun[-1], ours

    yield start
    for process in begun:
        process.kill()
        process.wait()


on_tunix = pytest.mark.parametrize("undisturbed", ["tunix"], indirect=True)


@on_tunix
def test_a_terminal_that_closes_ends_a_training_as_sigterm_does(both, on_a_terminal, gemsmith):
    _, whole, run = both
    process, terminal = on_a_terminal(sys.executable, "-W", "ignore", "-c", WAITING, str(run.path))
    wait_until((run.path / "waits").exists, process.pid)
    os.close(terminal)
    (run.path / "goes_on").touch()
    assert process.wait(timeout=120) == 143
    code, _, err = gemsmith("train", run.path)
    assert code == 0, err
    assert read_record(run, TrainRecord).resumed_at[0] >= 3 and weights(run) == weights(whole)


@on_tunix
def test_under_nohup_a_closed_terminal_ends_nothing(both, tmp_path, on_a_terminal):
    _, whole, run = both
    nohup = ["env", "-C", str(tmp_path), "nohup", sys.executable, "-W", "ignore", "-c", WAITING, str(run.path)]
    process, terminal = on_a_terminal(*nohup)
    wait_until((run.path / "waits").exists, process.pid)
    os.close(terminal)
    (run.path / "goes_on").touch()
    assert process.wait(timeout=120) == 0, (tmp_path / "nohup.out").read_text()
    assert read_record(run, TrainRecord).resumed_at == () and weights(run) == weights(whole)
