"""Training runs that are stopped, by whom or what ever, and resume: nothing changes and nothing is lost."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.sft.checkpoint_manager import CheckpointManager

from gemsmith.checkpoints.steps import checkpoint_steps, checksum, read_step_metadata
from gemsmith.data.batches import Batches
from gemsmith.errors import CheckpointError, EngineError, MachineError, Terminated
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.load import build_recipe, with_values
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, find_run, is_up_to_date, open_run, read_record
from gemsmith.train import loop as session
from gemsmith.train.jax import backend as tunix
from gemsmith.train.jax.compile import Compiled
from gemsmith.train.stage import train


@pytest.mark.slow
def test_control_c_leaves_the_last_complete_checkpoint_to_continue_from(
    whole, prepared_run, monkeypatch, interrupt, read_events, same_numbers, saved_bytes
):
    run = prepared_run()
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert not is_up_to_date(run, "train")
    # What a kill in the middle of a save leaves behind:
    half = run.checkpoints / "5.orbax-checkpoint-tmp-1"
    half.mkdir()
    (half / "model_params").mkdir()
    record = train(run)
    assert not half.exists()
    assert record.resumed_at == (4,)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    assert read_events(run)["train/loss"].keys() == {1, 2, 3, 4, 5, 6}


@pytest.mark.slow
def test_control_c_in_the_middle_of_a_save_waits_for_it(prepared_run, monkeypatch):
    save, ended = CheckpointManager.save, []

    def interrupted(self, step, *args, **options):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        ended.append((step, save(self, step, *args, **options)))
        return ended[-1][1]

    monkeypatch.setattr(CheckpointManager, "save", interrupted)
    run = prepared_run()
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert ended[-1] == (4, True)
    assert checkpoint_steps(run.checkpoints)[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_saves_the_step_under_way(
    whole, prepared_run, monkeypatch, interrupt, same_numbers, saved_bytes, number, kind, capfd
):
    run = prepared_run()
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


@pytest.mark.slow
def test_sigterm_while_orbax_restores_is_a_stop_and_no_damage(trained):
    def stop(*_):
        raise Terminated("told")

    run, _ = trained
    read_run_adapter(run)
    begin_s = time.monotonic()
    read_run_adapter(run)
    takes_s, tries, ends = time.monotonic() - begin_s, 12, []
    signal.signal(signal.SIGTERM, stop)
    for number in range(tries):
        try:
            threading.Timer(number / tries * takes_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
            read_run_adapter(run)
            time.sleep(60)
        except (Terminated, CheckpointError) as error:
            ends.append(type(error))
    assert ends == [Terminated] * tries


KILLED = """
import sys, time
from pathlib import Path
from gemsmith.data.batches import Batches
from gemsmith.data.batches import rows_sha256
from gemsmith.data.packing import ARRAYS
from gemsmith.runs.run import Run, find_run
from gemsmith.train.stage import train
batch = Batches.batch
def slowly(self, step, rows):
    time.sleep(600 if step > 4 else 0)
    return batch(self, step, rows)
Batches.batch = slowly
path = Path(sys.argv[1])
train(Run(path=path, recipe=find_run(path)))
"""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bytes_of_one_that_never_stopped(
    whole, prepared_run, read_steps, same_numbers, saved_bytes
):
    run = prepared_run()
    with (run.path / "stderr").open("w") as stderr:
        child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, str(run.path)], stderr=stderr)
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


def test_a_finished_run_whose_record_is_lost_writes_it_again_without_training(trained, monkeypatch):
    run, record = trained
    run.record_file("train").unlink()
    monkeypatch.setattr(Batches, "batch", None)
    assert train(run).steps == record.steps


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_and_is_not_saved(prepared_run, read_steps):
    run = prepared_run(optimizer={"warmup_steps": 0}, train={"save_steps": 1, "max_steps": 6})
    run = replace(run, recipe=with_values(run.recipe, [("optimizer.learning_rate", 1e30)]))
    with pytest.raises(EngineError, match=r"step 2 has loss nan .* the last checkpoint is .*checkpoints/1;"):
        train(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["1"]
    assert [step.step for step in read_steps(run)] == [1]


def poison(monkeypatch, *, at):
    """Makes every weight of the base NaN in one step."""
    make_step = tunix.make_step

    def poisoned(*args, **options):
        step = make_step(*args, **options)

        def update(trained, moments, frozen, inputs):
            bad = inputs["step"] == at
            frozen = jax.tree.map(
                lambda leaf: jnp.where(bad, jnp.nan, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, frozen
            )
            return step.update(trained, moments, frozen, inputs)

        return replace(step, update=jax.jit(update, donate_argnums=(0, 1)))

    monkeypatch.setattr(tunix, "make_step", poisoned)


@pytest.mark.slow
def test_a_step_that_is_no_number_is_skipped_where_the_recipe_says_so(
    prepare, tmp_path, monkeypatch, interrupt, saved_bytes
):
    poison(monkeypatch, at=3)
    keys = {"save_steps": 1, "on_nonfinite": "skip", "save_total_limit": 6}
    run = prepare(tmp_path / "run", train=keys)
    record = train(run)
    assert record.skipped == (3,) and record.spikes == ()
    assert [np.isnan(step.loss) for step in record.steps] == [False, False, True, False, False, False]
    assert saved_bytes(run, 3) == saved_bytes(run, 2)
    assert saved_bytes(run, 4) != saved_bytes(run, 3)
    assert is_up_to_date(run, "train")
    stopped = prepare(tmp_path / "stopped", train=keys)
    with monkeypatch.context() as patch:
        interrupt(patch, at=4, by=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    again = train(stopped)
    assert again.skipped == (3,) and again.resumed_at == (3,)
    assert saved_bytes(stopped, 6) == saved_bytes(run, 6)


@pytest.mark.slow
def test_a_spike_is_told_or_skipped_or_ends_the_run_as_the_recipe_says(
    whole, prepare, tmp_path, monkeypatch, saved_bytes
):
    monkeypatch.setattr(session.loss_checks, "spike_limit", lambda losses, step, factor: 1.0 if step == 4 else np.inf)
    run = prepare(tmp_path / "report")
    assert train(run).spikes == (4,)
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    run = prepare(tmp_path / "skip", train={"on_spike": "skip", "save_steps": 1, "save_total_limit": 6})
    record = train(run)
    assert record.skipped == record.spikes == (4,)
    assert saved_bytes(run, 4) == saved_bytes(run, 3) != saved_bytes(run, 5)
    run = prepare(tmp_path / "stop", train={"on_spike": "stop"})
    with pytest.raises(EngineError, match=r"step 4 has loss .*train.on_spike is stop.*checkpoints/2; lower"):
        train(run)
    # What it stopped at may now be left out; any other key would make another run of it.
    skipping = open_run(run.path, replace_key(run.recipe, "train.on_spike=skip"))
    assert train(skipping).skipped == (4,)
    assert saved_bytes(skipping, 6) == saved_bytes(tmp_path_run(tmp_path / "skip"), 6)


def replace_key(recipe, override):
    return build_recipe(recipe.model_dump(mode="json"), [override])


def tmp_path_run(path):
    return Run(path=path, recipe=find_run(path))


def test_training_again_that_cannot_begin_loses_nothing(trained, gemsmith, snapshot):
    run, _ = trained
    before = snapshot(run.path)
    code, _, err = gemsmith(
        "train", run.path, "--force", "--set", "train.mesh={fsdp: 2, tp: 2}", "--set", "optimizer.learning_rate=0.1"
    )
    assert code == 2 and "train.mesh" in err
    assert snapshot(run.path) == before
    assert is_up_to_date(run, "train")


def test_training_again_whose_first_step_finds_no_memory_loses_nothing(trained, gemsmith, monkeypatch, snapshot):
    run, _ = trained
    before = snapshot(run.path)

    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tunix, "compile_program", lambda *_: Compiled(update=fail, seconds=1.0, from_cache=False))
        code, _, err = gemsmith("train", run.path, "--force", "--set", "optimizer.learning_rate=0.1")
    assert code == 2 and "out of memory" in err
    assert snapshot(run.path) == before


@pytest.mark.slow
def test_training_again_starts_from_nothing_with_the_new_recipe(trained, gemsmith, read_events):
    run, record = trained
    code, _, err = gemsmith("train", run.path, "--force", "--set", "train.save_steps=5", "--set", "lora.rank=2")
    assert code == 0, err
    again = read_record(run, TrainRecord)
    assert again.resumed_at == () and again.trained_parameters * 2 == record.trained_parameters
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["1", "5", "6"]
    assert find_run(run.path).lora.rank == 2
    assert read_events(run)["train/loss"].keys() == {1, 2, 3, 4, 5, 6}


@pytest.mark.slow
def test_a_lost_log_is_written_again_from_the_checkpoint(
    whole, prepared_run, monkeypatch, interrupt, read_steps, same_numbers
):
    run = prepared_run()
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    shutil.rmtree(run.logs)
    record = train(run)
    assert same_numbers(record, whole[1])
    assert tuple(read_steps(run)) == record.steps


@pytest.mark.slow
def test_a_full_disk_is_one_line(prepared_run, small_disk):
    run = prepared_run(lora={"rank": 32})
    small_disk(run.checkpoints, "300k")
    with pytest.raises(MachineError, match="no space left on device") as error:
        train(run)
    assert "\n" not in str(error.value)


SHARDED = """
import sys
from pathlib import Path
import jax
from gemsmith.data.batches import Batches
from gemsmith.data.batches import rows_sha256
from gemsmith.data.packing import ARRAYS
from gemsmith.runs.run import Run, find_run
from gemsmith.train.jax import backend as tunix
from gemsmith.train.stage import train
path = Path(sys.argv[1])
run = Run(path=path, recipe=find_run(path))
batch = Batches.batch
def interrupted(self, step, rows):
    if step == 4:
        raise KeyboardInterrupt
    return batch(self, step, rows)
Batches.batch = interrupted
try:
    train(run)
except KeyboardInterrupt:
    pass
Batches.batch = batch
backends = []
class Backend(tunix.TunixBackend):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        backends.append(self)
tunix.TunixBackend = Backend
record = train(run)
assert record.resumed_at == (2,) and record.mesh == {"replica": 1, "fsdp": 2, "sequence": 1, "tp": 2}, record.mesh
backend, = backends
leaves = jax.tree.leaves((backend.trained, backend.moments))
whole = [leaf for leaf in leaves if leaf.ndim and leaf.sharding.is_fully_replicated]
assert not whole, [leaf.shape for leaf in whole]
"""


@pytest.mark.slow
def test_four_devices_train_like_one_and_continue_with_their_shardings(whole, prepared_run, read_arrays, read_steps):
    """Dropout included: its masks do not depend on the mesh."""
    run = prepared_run(train={"mesh": {"fsdp": 2, "tp": 2}})
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED, str(run.path)], check=True, env=environment, timeout=600
    )
    steps = read_steps(run)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in whole[1].steps], rel=1e-5)
    saved = read_step_metadata(run.checkpoints / "6")["checksums"]["model_params"]
    assert saved == {
        name: checksum(array) for name, array in read_arrays(run.checkpoints / "6" / "model_params").items()
    }
    for name, array in read_arrays(run.checkpoints / "6" / "model_params").items():
        expected = read_arrays(whole[0].checkpoints / "6" / "model_params")[name]
        assert np.linalg.norm(array - expected) < 1e-3 * np.linalg.norm(expected), name
