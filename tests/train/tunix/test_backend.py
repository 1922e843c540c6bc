"""Whole training runs on CPU: what they record, and that stopping and continuing changes nothing."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tunix.sft.checkpoint_manager import CheckpointManager

from gemsmith.checkpoint.checksums import checksum
from gemsmith.checkpoint.saved import read_step_metadata, saved_steps
from gemsmith.data import Batches
from gemsmith.data.batches import rows_sha256
from gemsmith.data.pack import ARRAYS
from gemsmith.errors import EngineError, MachineError, Preempted, RecipeError, RunError
from gemsmith.files import sha256_file
from gemsmith.recipe_file import build_recipe
from gemsmith.records import DataRecord, TrainRecord, TrainStep
from gemsmith.run import Run, find_run, is_complete, open_run, read_record, write_record
from gemsmith.train import session
from gemsmith.train.stage import train
from gemsmith.train.tunix import backend as tunix
from gemsmith.train.tunix.compiling import Compiled
from gemsmith.train.tunix.mesh import mesh_sizes
from gemsmith.zoo import find_variant


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
    """What a plain PyTreeCheckpointer finds in a folder of Orbax, with no model:
    "layers/0/mlp/up_proj/kernel_lora_a/value" -> array."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), checkpointer.metadata(folder).item_metadata.tree
    )
    leaves = jax.tree_util.tree_flatten_with_path(checkpointer.restore(folder, restore_args=as_numpy))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def read_steps(run: Run) -> list[TrainStep]:
    return [
        TrainStep.model_validate_json(line)
        for line in (run.logs / "train_steps.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]


def saved_bytes(run: Run, step: int) -> dict[str, bytes]:
    """Everything that a checkpoint holds."""
    items = ("model_params", "optimizer_state")
    return {
        f"{item}/{name}": array.tobytes()
        for item in items
        for name, array in read_arrays(run.checkpoints / str(step) / item).items()
    }


def test_a_run_records_every_step_and_counts_its_adapters(whole):
    run, record = whole
    assert is_complete(run, "train")
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[0].learning_rate == 0 and record.steps[2].learning_rate == 1e-2
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    assert record.adapted == {"q": 2, "k": 2, "v": 1, "o": 2, "gate": 2, "up": 2, "down": 2}
    assert record.attention == {"sliding_attention": "dense, head_dim 16", "full_attention": "dense, head_dim 32"}
    assert record.last_checkpoint == "checkpoints/6"
    assert record.trained_parameters == sum(
        array.size for array in read_arrays(run.checkpoints / "6" / "model_params").values()
    )
    assert record.peak_memory_bytes > 1e8 and record.real_tokens_per_s > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    events = read_events(run)
    assert events["train/loss"] == {step.step: pytest.approx(step.loss) for step in record.steps}
    assert set(events) == {"train/loss", "train/grad_norm", "train/learning_rate", "train/real_tokens_per_s"}


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_in_the_record(prepared_run):
    record = train(prepared_run(optimizer={"learning_rate": 1e-9}))
    assert (
        len(record.notices) == 1
        and "optimizer.learning_rate, 1e-09, is too low, or 6 steps are too few" in record.notices[0]
    )
    assert record.grave_notices == ()


def test_a_checkpoint_is_read_with_no_model(whole):
    run, _ = whole
    arrays = read_arrays(run.checkpoints / "6" / "model_params")
    a, b = (arrays[f"layers/1/self_attn/k_proj/kernel_lora_{matrix}/value"] for matrix in "ab")
    assert a.shape == (1, 32, 4) and b.shape == (1, 4, 32)  # a stack of one layer
    assert a.dtype == b.dtype == np.float32
    assert len(arrays) == 2 * 13


@pytest.mark.slow
def test_a_step_is_compiled_before_it_runs_and_never_again(prepared_run, monkeypatch, interrupt):
    sizes, make_step = [], tunix.make_step

    def keep(*args, **options):
        step = make_step(*args, **options)
        sizes.append(step.update._cache_size)
        return step

    monkeypatch.setattr(tunix, "make_step", keep)
    run = prepared_run(train={"optimizer_steps": 4, "keep_checkpoints": 1})
    interrupt(monkeypatch, at=4, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    monkeypatch.setattr(tunix, "make_step", keep)
    train(run)
    assert [size() for size in sizes] == [
        0,
        0,
    ]  # what runs is the compiled program, which refuses other shapes and shardings


@pytest.mark.slow
def test_control_c_leaves_the_last_complete_checkpoint_to_continue_from(whole, prepared_run, monkeypatch, interrupt):
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


@pytest.mark.slow
def test_control_c_in_the_middle_of_a_save_waits_for_it(prepared_run, monkeypatch):
    save, ended = CheckpointManager.save, []

    def interrupted(self, step, *args, **options):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        ended.append((step, save(self, step, *args, **options)))
        return ended[-1][1]

    monkeypatch.setattr(CheckpointManager, "save", interrupted)
    run = prepared_run()
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert ended[-1] == (4, True)
    assert saved_steps(run.checkpoints)[-1] == 4


@pytest.mark.slow
def test_sigterm_saves_the_step_under_way(whole, prepared_run, monkeypatch, interrupt):
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
from gemsmith.data.batches import rows_sha256
from gemsmith.data.pack import ARRAYS
from gemsmith.run import Run, find_run
from gemsmith.train.stage import train
batch = Batches.batch
def slowly(self, step, rows):
    time.sleep(0.2 if step > 2 else 0)
    return batch(self, step, rows)
Batches.batch = slowly
path = Path(sys.argv[1])
train(Run(path=path, recipe=find_run(path)))
"""


@pytest.mark.slow
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
    return all(
        [getattr(step, name) for step in record.steps] == [getattr(step, name) for step in other.steps]
        for name in numbers
    )


def test_a_finished_run_whose_record_is_lost_writes_it_again_without_training(trained, monkeypatch):
    run, record = trained
    run.record_file("train").unlink()
    monkeypatch.setattr(Batches, "batch", None)
    assert train(run).steps == record.steps


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_and_is_not_saved(prepared_run):
    run = prepared_run(
        optimizer={"learning_rate": 1e30, "warmup_steps": 0}, train={"checkpoint_every": 1, "optimizer_steps": 6}
    )
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
def test_a_step_that_is_no_number_is_skipped_where_the_recipe_says_so(prepare, tmp_path, monkeypatch, interrupt):
    poison(monkeypatch, at=3)
    keys = {"checkpoint_every": 1, "on_nonfinite": "skip", "keep_checkpoints": 6}
    run = prepare(tmp_path / "run", train=keys)
    record = train(run)
    assert record.skipped == (3,) and record.spikes == ()
    assert [np.isnan(step.loss) for step in record.steps] == [False, False, True, False, False, False]
    assert saved_bytes(run, 3) == saved_bytes(run, 2)
    assert saved_bytes(run, 4) != saved_bytes(run, 3)
    assert is_complete(run, "train")
    stopped = prepare(tmp_path / "stopped", train=keys)
    with monkeypatch.context() as patch:
        interrupt(patch, at=4, by=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    again = train(stopped)
    assert again.skipped == (3,) and again.resumed_at == (3,)
    assert saved_bytes(stopped, 6) == saved_bytes(run, 6)


@pytest.mark.slow
def test_a_spike_is_told_or_skipped_or_ends_the_run_as_the_recipe_says(whole, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "spike_limit", lambda losses, step, factor: 1.0 if step == 4 else np.inf)
    run = prepare(tmp_path / "report")
    assert train(run).spikes == (4,)
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    run = prepare(tmp_path / "skip", train={"on_spike": "skip", "checkpoint_every": 1, "keep_checkpoints": 6})
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


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
    }


def test_training_again_that_cannot_begin_loses_nothing(trained, gemsmith):
    run, _ = trained
    before = snapshot(run.path)
    code, _, err = gemsmith(
        "train", run.path, "--force", "--set", "train.mesh={fsdp: 2, tp: 2}", "--set", "optimizer.learning_rate=0.1"
    )
    assert code == 2 and "train.mesh" in err
    assert snapshot(run.path) == before
    assert is_complete(run, "train")


def test_training_again_whose_first_step_finds_no_memory_loses_nothing(trained, gemsmith, monkeypatch):
    run, _ = trained
    before = snapshot(run.path)

    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tunix, "compile_step", lambda *_: Compiled(update=fail, seconds=1.0, from_cache=False))
        code, _, err = gemsmith("train", run.path, "--force", "--set", "optimizer.learning_rate=0.1")
    assert code == 2 and "out of memory" in err
    assert snapshot(run.path) == before


@pytest.mark.slow
def test_training_again_starts_from_nothing_with_the_new_recipe(trained, gemsmith):
    run, record = trained
    code, _, err = gemsmith("train", run.path, "--force", "--set", "train.checkpoint_every=5", "--set", "lora.rank=2")
    assert code == 0, err
    again = read_record(run, TrainRecord)
    assert again.resumed_at == () and again.trained_parameters * 2 == record.trained_parameters
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["1", "5", "6"]
    assert find_run(run.path).lora.rank == 2
    assert read_events(run)["train/loss"].keys() == {1, 2, 3, 4, 5, 6}


@pytest.mark.slow
def test_checkpoints_may_be_kept_elsewhere_and_outlive_the_run_directory(
    whole, prepare, tmp_path, monkeypatch, interrupt
):
    keys = {"checkpoint_folder": str(tmp_path / "saved" / "here")}
    run = prepare(tmp_path / "run", train=keys)
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert saved_steps(run.checkpoints) == [1, 2, 4]  # Orbax saves the first step always
    shutil.rmtree(run.path)
    run = prepare(tmp_path / "run", train=keys)
    record = train(run)
    assert record.resumed_at == (4,) and same_numbers(record, whole[1])
    assert record.last_checkpoint == f"{tmp_path}/saved/here/6"
    assert saved_bytes(run, 6) == saved_bytes(whole[0], 6)
    assert not (run.path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lora": {"rank": 2}}, r"saved/6: was trained with another recipe: lora.rank was 4 and is 2; set it back"),
        (
            {"data": {"train": {"task": "verilog", "rows": 11}}},
            r"saved/6: was trained with another recipe: data.train.rows was 12",
        ),
    ],
)
def test_checkpoints_of_another_recipe_are_refused(whole, prepare, tmp_path, keys, expected):
    shutil.copytree(whole[0].checkpoints, tmp_path / "saved")
    run = prepare(tmp_path / "run", train={"checkpoint_folder": str(tmp_path / "saved")}, **keys)
    with pytest.raises(RunError, match=expected):
        train(run)


def test_checkpoints_of_other_rows_are_refused(whole, prepare, tmp_path):
    shutil.copytree(whole[0].checkpoints, tmp_path / "saved")
    run = prepare(tmp_path / "run", train={"checkpoint_folder": str(tmp_path / "saved")})
    np.save(run.data / "tokens.npy", np.load(run.data / "tokens.npy")[::-1])
    files = {name: sha256_file(run.data / f"{name}.npy") for name in ARRAYS}
    write_record(
        run,
        read_record(run, DataRecord).model_copy(update={"files": files, "rows_sha256": rows_sha256(files.values())}),
    )
    with pytest.raises(
        RunError,
        match=r"saved/6: was trained on other rows than .*; put those of data\.train back and run: gemsmith data",
    ):
        train(run)


def test_a_damaged_checkpoint_is_named(trained):
    run, _ = trained
    for file in (run.checkpoints / "6" / "model_params").rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    run.record_file("train").unlink()
    with pytest.raises(RunError, match=r"checkpoints/6: is damaged \(.*\); step 4 is good: delete .*/6, then") as error:
        train(run)
    assert "\n" not in str(error.value)


def test_checkpoints_of_the_other_backend_are_refused(prepare, tmp_path):
    run = prepare(tmp_path / "run", train={"checkpoint_folder": str(tmp_path / "saved")})
    (tmp_path / "saved" / "9").mkdir(parents=True)
    (tmp_path / "saved" / "9" / "training.json").write_text("{}")
    with pytest.raises(
        RunError,
        match=r"saved/9: was not saved by train.backend tunix; set train.checkpoint_folder to another, or start",
    ):
        train(run)


@pytest.mark.slow
def test_a_lost_log_is_written_again_from_the_checkpoint(whole, prepared_run, monkeypatch, interrupt):
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "DATA_LOSS: Error writing: No space left on device [tensorstore]",
            "no space left on device while writing under",
        ),
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
        (
            {"attention": "sdpa"},
            "train.attention: sdpa was given, train.backend tunix has auto, splash, dense; set one of them",
        ),
        (
            {"mesh": {"fsdp": 2, "tp": 2}},
            r"train.mesh: fsdp 2 × tp 2 needs 4 devices, this machine has 1 \(cpu\); set their product to 1",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_key(prepared_run, keys, expected):
    with pytest.raises(RecipeError, match=expected):
        train(prepared_run(train=keys))


def test_rows_that_do_not_divide_over_the_devices_are_refused(small_recipe):
    recipe = small_recipe(train={"mesh": {"fsdp": 4}})
    with pytest.raises(
        RecipeError, match=r"train.rows_per_step: 2 rows do not divide over replica × fsdp = 4; set a multiple of 4"
    ):
        mesh_sizes(recipe, find_variant("tiny-12b"), devices=4, kind="cpu")


SHARDED = """
import sys
from pathlib import Path
import jax
from gemsmith.data import Batches
from gemsmith.data.batches import rows_sha256
from gemsmith.data.pack import ARRAYS
from gemsmith.run import Run, find_run
from gemsmith.train.tunix import backend as tunix
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
def test_four_devices_train_like_one_and_continue_with_their_shardings(whole, prepared_run):
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


def read_events(run) -> dict[str, dict[int, float]]:
    """TensorBoard's scalars, tag -> step -> value, as TensorBoard shows them: a session's start purges steps from there
    on."""
    events: dict[str, dict[int, float]] = {}
    for file in sorted(Path(run.tensorboard).iterdir(), key=lambda path: path.stat().st_mtime):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (size,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            if event.session_log.status == event.session_log.START:
                events = {
                    tag: {step: value for step, value in steps.items() if step < event.step}
                    for tag, steps in events.items()
                }
            for value in event.summary.value:
                assert event.step not in events.setdefault(value.tag, {}), "an event appears twice"
                events[value.tag][event.step] = value.simple_value
    return events
