"""Training runs that are stopped, by whom or what ever, and resume: nothing changes and nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from gemsmith.data.batches import Batches
from gemsmith.errors import EngineError, MachineError, Terminated
from gemsmith.recipe.load import build_recipe, with_values
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import find_run, is_up_to_date, open_run, read_record
from gemsmith.train import loop as session
from gemsmith.train.stage import train
from gemsmith.train.torch.trainer import TrlTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # upstream's, at import


BACKEND = {"backend": "trl"}


def interrupt(monkeypatch, *, at, by):
    """Lets the batch of step `at` raise an error or send a signal."""
    batch = Batches.batch

    def interrupted(self, step):
        if step == at:
            if isinstance(by, signal.Signals):
                signal.raise_signal(by)
            else:
                raise by
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", interrupted)


@pytest.mark.slow
def test_control_c_leaves_the_last_complete_checkpoint_to_continue_from(
    whole, prepared_run, monkeypatch, read_steps, same_numbers, saved_bytes
):
    run = prepared_run(train=BACKEND)
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert not is_up_to_date(run, "train")
    (run.checkpoints / ".5.partial").mkdir()  # what a kill in the middle of a save leaves behind
    record = train(run)
    assert record.resumed_at == (4,)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    assert [step.step for step in read_steps(run)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_the_step_under_way(
    whole, prepared_run, monkeypatch, same_numbers, saved_bytes, number, kind, capfd
):
    run = prepared_run(train=BACKEND)
    interrupt(monkeypatch, at=3, by=number)
    before = signal.getsignal(number)
    with pytest.raises(kind, match="step 3 is saved; continue with: gemsmith train"):
        train(run)
    assert signal.getsignal(number) == before
    monkeypatch.undo()
    record = train(run)
    assert record.resumed_at == (3,)
    assert "train  resuming from step 3 of 6" in capfd.readouterr().err.splitlines()
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


KILLED = """
import sys, time
from pathlib import Path
from gemsmith.data.batches import Batches
from gemsmith.runs.records import TrainStep
from gemsmith.runs.run import Run, find_run
from gemsmith.train.stage import train
batch = Batches.batch
def slowly(self, step):
    time.sleep(600 if step > 4 else 0)
    return batch(self, step)
Batches.batch = slowly
path = Path(sys.argv[1])
train(Run(path=path, recipe=find_run(path)))
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bytes_of_one_that_never_stopped(
    whole, prepared_run, read_steps, same_numbers, saved_bytes
):
    run = prepared_run(train=BACKEND)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with (run.path / "stderr").open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", KILLED, str(run.path)], stderr=stderr, env=environment
        )
        deadline_s = time.monotonic() + 300
        while not (run.checkpoints / "2").exists() and child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        child.kill()
        assert child.wait() == -signal.SIGKILL, (run.path / "stderr").read_text()
    assert 2 <= len(read_steps(run)) < 6
    record = train(run)
    assert record.resumed_at[0] in (2, 4)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_and_is_not_saved(prepared_run, read_steps):
    run = prepared_run(optimizer={"warmup_steps": 0}, train=BACKEND | {"save_steps": 1})
    run = replace(run, recipe=with_values(run.recipe, [("optimizer.learning_rate", 1e30)]))
    with pytest.raises(EngineError, match=r"step 2 has loss nan .* the last checkpoint is .*checkpoints/1;"):
        train(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["1"]
    assert [step.step for step in read_steps(run)] == [1]


@pytest.mark.slow
def test_a_step_that_is_no_number_is_skipped_where_the_recipe_says_so(prepare, tmp_path, monkeypatch, saved_bytes):
    compute_loss = TrlTrainer.compute_loss

    def poisoned(self, model, inputs, **options):
        return compute_loss(self, model, inputs, **options) * (np.nan if self.done + self.state.global_step == 2 else 1)

    monkeypatch.setattr(TrlTrainer, "compute_loss", poisoned)
    keys = BACKEND | {"save_steps": 1, "on_nonfinite": "skip", "save_total_limit": 6}
    run = prepare(tmp_path / "run", train=keys)
    record = train(run)
    assert record.skipped == (3,) and record.spikes == ()
    assert saved_bytes(run, 3) == saved_bytes(run, 2)
    assert saved_bytes(run, 4) != saved_bytes(run, 3)
    stopped = prepare(tmp_path / "stopped", train=keys)
    with monkeypatch.context() as patch:
        interrupt(patch, at=4, by=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    assert train(stopped).skipped == (3,)
    assert saved_bytes(stopped, 6) == saved_bytes(run, 6)


@pytest.mark.slow
def test_a_spike_is_told_or_skipped_or_ends_the_run_as_the_recipe_says(
    whole, prepare, tmp_path, monkeypatch, saved_bytes
):
    monkeypatch.setattr(session.loss_checks, "spike_limit", lambda losses, step, factor: 1.0 if step == 4 else np.inf)
    run = prepare(tmp_path / "report", train=BACKEND)
    assert train(run).spikes == (4,)
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    run = prepare(tmp_path / "skip", train=BACKEND | {"on_spike": "skip", "save_steps": 1, "save_total_limit": 6})
    record = train(run)
    assert record.skipped == record.spikes == (4,)
    assert saved_bytes(run, 4) == saved_bytes(run, 3) != saved_bytes(run, 5)
    run = prepare(tmp_path / "stop", train=BACKEND | {"on_spike": "stop"})
    with pytest.raises(EngineError, match=r"step 4 has loss .*train.on_spike is stop.*checkpoints/2; lower"):
        train(run)
    skipping = open_run(run.path, build_recipe(run.recipe.model_dump(mode="json"), ["train.on_spike=skip"]))
    assert train(skipping).skipped == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8k", "300k"])  # there is room for nothing, and for the adapter without the moments
def test_a_full_disk_is_one_line(prepared_run, small_disk, size):
    run = prepared_run(train=BACKEND, lora={"rank": 32})
    small_disk(run.checkpoints, size)
    with pytest.raises(MachineError, match="no space left on device") as error:
        train(run)
    assert "\n" not in str(error.value)
    assert not list(run.checkpoints.iterdir())


def test_training_again_that_cannot_begin_loses_nothing(trained, gemsmith, monkeypatch, snapshot):
    run, _ = trained
    before = snapshot(run.path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrlTrainer, "training_step", full)
    code, _, err = gemsmith("train", run.path, "--force", "--set", "optimizer.learning_rate=0.1")
    assert code == 2 and "no space left on device" in err
    assert snapshot(run.path) == before
    assert is_up_to_date(run, "train")


@pytest.mark.slow
def test_training_again_starts_from_nothing_with_the_new_recipe(trained, gemsmith):
    run, record = trained
    code, _, err = gemsmith("train", run.path, "--force", "--set", "train.save_steps=5", "--set", "lora.rank=2")
    assert code == 0, err
    again = read_record(run, TrainRecord)
    assert again.resumed_at == () and again.trained_parameters * 2 == record.trained_parameters
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["5", "6"]
    assert find_run(run.path).lora.rank == 2


def test_a_finished_run_whose_record_is_lost_writes_it_again_without_training(trained, monkeypatch):
    run, record = trained
    run.record_file("train").unlink()
    monkeypatch.setattr(Batches, "batch", None)
    assert train(run).steps == record.steps
