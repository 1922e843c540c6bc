"""Whole training runs on CPU: what they record, and that stopping and continuing changes nothing."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from gemsmith.data import Batches
from gemsmith.errors import EngineError, MachineError, Preempted, RecipeError, RunError
from gemsmith.run import Run, is_complete
from gemsmith.train import tunix
from gemsmith.train.log import read_steps
from gemsmith.train.stage import train


@pytest.fixture(scope="module")
def whole(prepare, tmp_path_factory):
    """A run of six steps that nothing stopped, and its record. Tests must not change it."""
    run = prepare(tmp_path_factory.mktemp("whole") / "run")
    return run, train(run)


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of it."""
    shutil.copytree(whole[0].path, tmp_path / "copy")
    return Run(path=tmp_path / "copy", recipe=whole[0].recipe), whole[1]


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What a plain PyTreeCheckpointer finds in a folder of Orbax, with no model: "layers/0/mlp/up_proj/kernel_lora_a/value" -> array."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), checkpointer.metadata(folder).item_metadata.tree)
    leaves = jax.tree_util.tree_flatten_with_path(checkpointer.restore(folder, restore_args=as_numpy))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def saved_bytes(run: Run, step: int) -> dict[str, bytes]:
    """Everything that a checkpoint holds."""
    items = ("model_params", "optimizer_state")
    return {f"{item}/{name}": array.tobytes() for item in items for name, array in read_arrays(run.checkpoints / str(step) / item).items()}


def test_a_run_records_every_step_and_counts_its_adapters(whole):
    run, record = whole
    assert is_complete(run, "train")
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[0].learning_rate == 0 and record.steps[2].learning_rate == 1e-2
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    assert record.adapted == {"q": 2, "k": 2, "v": 1, "o": 2, "gate": 2, "up": 2, "down": 2}
    assert record.last_checkpoint == "checkpoints/6"
    assert record.trained_parameters == sum(array.size for array in read_arrays(run.checkpoints / "6" / "model_params").values())
    assert record.peak_memory_bytes > 1e8 and record.real_tokens_per_s > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    events = read_events(run)
    assert events["train/loss"] == {step.step: pytest.approx(step.loss) for step in record.steps}
    assert set(events) == {"train/loss", "train/grad_norm", "train/learning_rate", "train/real_tokens_per_s"}


def test_a_checkpoint_is_read_with_no_model(whole):
    run, _ = whole
    arrays = read_arrays(run.checkpoints / "6" / "model_params")
    a, b = (arrays[f"layers/1/self_attn/k_proj/kernel_lora_{matrix}/value"] for matrix in "ab")
    assert a.shape == (32, 4) and b.shape == (4, 32)
    assert a.dtype == b.dtype == np.float32
    assert len(arrays) == 2 * 13


def test_a_step_compiles_once(prepared_run, monkeypatch):
    sizes, make_step = [], tunix.make_step

    def keep(*args, **options):
        step = make_step(*args, **options)
        sizes.append(step.update._cache_size)
        return step

    monkeypatch.setattr(tunix, "make_step", keep)
    run = prepared_run(train={"steps": 4, "keep_checkpoints": 1})
    interrupt(monkeypatch, at=4, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    monkeypatch.setattr(tunix, "make_step", keep)
    train(run)
    assert [size() for size in sizes] == [1, 1]


def interrupt(monkeypatch, *, at, by):
    """Lets the batch of step `at` raise an error or send a signal."""
    batch = Batches.batch

    def interrupted(self, step):
        if step == at:
            if isinstance(by, signal.Signals):
                os.kill(os.getpid(), by)
            else:
                raise by
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", interrupted)


def test_control_c_leaves_the_last_complete_checkpoint_to_continue_from(whole, prepared_run, monkeypatch):
    run = prepared_run()
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert not is_complete(run, "train")
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


def test_sigterm_saves_the_step_under_way(whole, prepared_run, monkeypatch):
    run = prepared_run()
    interrupt(monkeypatch, at=3, by=signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="step 3 is saved") as stopped:
        train(run)
    assert stopped.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    record = train(run)
    assert record.resumed_at == (3,)
    assert same_numbers(record, whole[1])
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)


KILLED = """
import sys, time
from pathlib import Path
from gemsmith.data import Batches
from gemsmith.run import Run, find_run
from gemsmith.train.stage import train
batch = Batches.batch
def slowly(self, step):
    time.sleep(0.2 if step > 2 else 0)
    return batch(self, step)
Batches.batch = slowly
path = Path(sys.argv[1])
train(Run(path=path, recipe=find_run(path)))
"""


def test_a_killed_run_ends_with_the_bytes_of_one_that_never_stopped(whole, prepared_run):
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


def same_numbers(record, other):
    numbers = ("step", "loss", "grad_norm", "learning_rate", "real_tokens")
    return all([getattr(step, name) for step in record.steps] == [getattr(step, name) for step in other.steps] for name in numbers)


def test_a_finished_run_whose_record_is_lost_writes_it_again_without_training(trained, monkeypatch):
    run, record = trained
    run.record_file("train").unlink()
    monkeypatch.setattr(Batches, "batch", None)
    assert train(run).steps == record.steps


def test_a_loss_that_is_no_number_stops_and_is_not_saved(prepared_run):
    run = prepared_run(optimizer={"learning_rate": 1e30, "warmup_steps": 0}, train={"checkpoint_every": 1, "steps": 6})
    with pytest.raises(EngineError, match=r"step 2 has loss nan .* the last checkpoint is .*checkpoints/1;"):
        train(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["1"]
    assert [step.step for step in read_steps(run)] == [1]


def test_a_damaged_checkpoint_is_named(trained):
    run, _ = trained
    for file in (run.checkpoints / "6" / "model_params").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    run.record_file("train").unlink()
    with pytest.raises(RunError, match=r"checkpoints/6: cannot be restored .* delete it") as error:
        train(run)
    assert "\n" not in str(error.value)


def test_a_lost_log_is_named(trained):
    run, _ = trained
    (run.logs / "train_steps.jsonl").unlink()
    with pytest.raises(RunError, match=r"lacks steps before 6, .* delete checkpoints/"):
        train(run)


def test_a_full_disk_is_one_line(prepared_run, tmp_path):
    run = prepared_run(lora={"rank": 32})
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(run.checkpoints)]
    run.checkpoints.mkdir()
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        with pytest.raises(MachineError, match="no space left on device") as error:
            train(run)
        assert "\n" not in str(error.value)
    finally:
        subprocess.run(["umount", "--lazy", str(run.checkpoints)], check=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DATA_LOSS: Error writing: No space left on device [tensorstore]", "no space left on device while writing under"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nmore", "lower train.rows_per_step or data.max_length"),
    ],
)
def test_what_the_libraries_raise_for_want_of_room_is_one_line(prepared_run, monkeypatch, text, expected):
    monkeypatch.setattr(tunix, "adapted_model", lambda *_: (_ for _ in ()).throw(ValueError(text)))
    with pytest.raises(MachineError, match=expected) as error:
        train(prepared_run())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"backend": "trl"}, "train.backend: 'trl' was given, .* 'tunix' only"),
        ({"mesh": {"fsdp": 2, "tp": 2}}, r"train.mesh: fsdp 2 × tp 2 needs 4 devices, this machine has 1 \(cpu\); set their product to 1"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_key(prepared_run, keys, expected):
    with pytest.raises(RecipeError, match=expected):
        train(prepared_run(train=keys))


def test_rows_that_do_not_divide_over_the_devices_are_refused(prepared_run, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None] * 4)
    with pytest.raises(RecipeError, match=r"train.rows_per_step: 2 rows do not divide over fsdp 4; set a multiple of 4"):
        tunix.make_mesh(prepared_run().recipe)


SHARDED = """
import sys
from pathlib import Path
import jax
from gemsmith.data import Batches
from gemsmith.run import Run, find_run
from gemsmith.train import tunix
from gemsmith.train.stage import train
path = Path(sys.argv[1])
run = Run(path=path, recipe=find_run(path))
batch = Batches.batch
def interrupted(self, step):
    if step == 4:
        raise KeyboardInterrupt
    return batch(self, step)
Batches.batch = interrupted
try:
    train(run)
except KeyboardInterrupt:
    pass
Batches.batch = batch
sessions = []
class Session(tunix._Session):
    def __init__(self, *args):
        super().__init__(*args)
        sessions.append(self)
tunix._Session = Session
record = train(run)
assert record.resumed_at == (2,) and record.mesh == {"fsdp": 2, "tp": 2}
session, = sessions
leaves = jax.tree.leaves((session.trained, session.moments))
whole = [leaf for leaf in leaves if leaf.ndim and leaf.sharding.is_fully_replicated]
assert len(whole) == 3, [leaf.shape for leaf in whole]  # B of the one global kv head, which tp cannot split, and its moments
assert session.step.update._cache_size() == 1
"""


def test_four_devices_train_like_one_and_continue_with_their_shardings(whole, prepared_run):
    """Dropout included: its masks do not depend on the mesh."""
    run = prepared_run(train={"mesh": {"fsdp": 2, "tp": 2}})
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", SHARDED, str(run.path)], check=True, env=environment, timeout=600)
    steps = read_steps(run)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in whole[1].steps], rel=1e-5)
    for name, array in read_arrays(run.checkpoints / "6" / "model_params").items():
        expected = read_arrays(whole[0].checkpoints / "6" / "model_params")[name]
        assert np.linalg.norm(array - expected) < 1e-3 * np.linalg.norm(expected), name


def read_events(run) -> dict[str, dict[int, float]]:
    """TensorBoard's scalars, tag -> step -> value, as TensorBoard shows them: a session's start purges steps from there on."""
    events: dict[str, dict[int, float]] = {}
    for file in sorted(Path(run.tensorboard).iterdir(), key=lambda path: path.stat().st_mtime):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (size,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            if event.session_log.status == event.session_log.START:
                events = {tag: {step: value for step, value in steps.items() if step < event.step} for tag, steps in events.items()}
            for value in event.summary.value:
                assert event.step not in events.setdefault(value.tag, {}), "an event appears twice"
                events[value.tag][event.step] = value.simple_value
    return events
