"""Whole training runs on CPU: what they record, what they start from, and what is refused."""

import shutil
import time

import jax
import numpy as np
import pytest

from gemsmith.arch import find_variant
from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.data.batches import rows_sha256
from gemsmith.data.packing import ARRAYS
from gemsmith.errors import MachineError, RecipeError, RunError
from gemsmith.runs.records import DataRecord
from gemsmith.runs.run import is_up_to_date, read_record, write_record
from gemsmith.system.files import sha256_file
from gemsmith.train.jax import backend as tunix
from gemsmith.train.jax.mesh import mesh_sizes
from gemsmith.train.loop import TrainSession
from gemsmith.train.stage import train


def test_a_run_records_every_step_and_counts_its_adapters(whole, read_arrays, read_events):
    run, record = whole
    assert is_up_to_date(run, "train")
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert record.steps[0].learning_rate == 0 and record.steps[2].learning_rate == 1e-2
    assert record.steps[-1].loss < record.steps[0].loss - 0.1
    assert record.adapted == {"q": 2, "k": 2, "v": 1, "o": 2, "gate": 2, "up": 2, "down": 2}
    assert record.attention == {"sliding_attention": "dense, head_dim 16", "full_attention": "dense, head_dim 32"}
    assert record.last_checkpoint == "checkpoints/6"
    assert record.trained_parameters == sum(
        array.size for array in read_arrays(run.checkpoints / "6" / "model_params").values()
    )
    # Two float32 moments beside every adapter, and the optimizer's counters.
    # Orbax saves the first step, too, which is deleted once there are three others.
    assert record.saves is not None and record.saves.number == 4 and record.saves.s > 0
    assert 4 * 12 * record.trained_parameters <= record.saves.bytes < 4 * 12 * record.trained_parameters + 1000
    assert record.peak_memory_bytes > 1e8 and record.real_tokens_per_s > 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "4", "6"]
    events = read_events(run)
    assert events["train/loss"] == {step.step: pytest.approx(step.loss) for step in record.steps}
    names = ("loss", "token_accuracy", "grad_norm", "learning_rate", "real_tokens_per_s")
    assert set(events) == {f"train/{name}" for name in names}


def test_a_step_ends_with_its_own_computation_where_dispatch_waits_for_the_next(prepared_run, monkeypatch):
    told, dispatched, bounds = list[float](), list[float](), list[float | None]()
    update, finish = tunix.TunixBackend._update, TrainSession.finish

    def waits(self, example):
        metrics, pending = update(self, example)
        jax.block_until_ready(metrics)  # as on a GPU
        dispatched.append(time.monotonic())
        return metrics, pending

    def listens(self, outcome):
        told.append(outcome.ended_s)
        finish(self, outcome)

    monkeypatch.setattr(tunix.TunixBackend, "_update", waits)
    monkeypatch.setattr(TrainSession, "finish", listens)
    monkeypatch.setattr(tunix.distributed, "LONGEST_STEP_S", 0.0)
    monkeypatch.setattr(tunix.distributed, "note_progress", lambda longest_s=None: bounds.append(longest_s))
    record = train(prepared_run(train={"max_steps": 3, "save_steps": 100}))
    # Hosts take another for hung by what steps take: nothing is known before one has ended.
    assert bounds[0] is None and bounds[-1] in [10 * step.step_s for step in record.steps[:2]]
    assert all(ended < later for ended, later in zip(told, dispatched[1:], strict=False))
    # A save lies between the first two.
    assert record.steps[2].step_s == pytest.approx(told[2] - told[1], abs=1e-5)


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_in_the_record(prepared_run):
    record = train(prepared_run(optimizer={"learning_rate": 1e-9}))
    assert (
        len(record.warnings) == 1
        and "optimizer.learning_rate, 1e-09, is too low, or 6 steps are too few" in record.warnings[0]
    )
    assert record.critical_warnings == ()


def test_a_checkpoint_is_read_with_no_model(whole, read_arrays):
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
    run = prepared_run(train={"max_steps": 4, "save_total_limit": 1})
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
def test_checkpoints_may_be_kept_elsewhere_and_outlive_the_run_directory(
    whole, prepare, tmp_path, monkeypatch, interrupt, same_numbers, saved_bytes
):
    keys = {"checkpoint_folder": str(tmp_path / "saved" / "here")}
    run = prepare(tmp_path / "run", train=keys)
    interrupt(monkeypatch, at=6, by=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    assert checkpoint_steps(run.checkpoints) == [1, 2, 4]  # Orbax saves the first step always
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
        read_record(run, DataRecord).model_copy(update={"files": files, "rows_sha256": rows_sha256(files, run.data)}),
    )
    with pytest.raises(
        RunError,
        match=r"saved/6: was trained on other rows than .*; put those of data\.train back and run: gemsmith data",
    ):
        train(run)


def test_checkpoints_of_the_other_backend_are_refused(prepare, tmp_path):
    run = prepare(tmp_path / "run", train={"checkpoint_folder": str(tmp_path / "saved")})
    (tmp_path / "saved" / "9").mkdir(parents=True)
    (tmp_path / "saved" / "9" / "training.json").write_text("{}")
    with pytest.raises(
        RunError,
        match=r"saved/9: was not saved by train.backend tunix; set train.checkpoint_folder to another, or start",
    ):
        train(run)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "DATA_LOSS: Error writing: No space left on device [tensorstore]",
            "no space left on device while writing under",
        ),
        (
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nmore",
            "lower train.global_batch_size or data.max_length",
        ),
    ],
)
def test_what_the_libraries_raise_for_want_of_room_is_one_line(prepared_run, monkeypatch, text, expected):
    monkeypatch.setattr(tunix, "adapted_model", lambda *_, **__: (_ for _ in ()).throw(ValueError(text)))
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
        RecipeError, match=r"train.global_batch_size: 2 rows do not divide over replica × fsdp = 4; set a multiple of 4"
    ):
        mesh_sizes(recipe, find_variant("tiny-12b"), devices=4, kind="cpu")
