"""Damage to a saved step, to the rows and to records: found before it does harm, told in one line, and the advice works
when followed."""

import json
import random
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.data.stage import prepare_data
from gemsmith.errors import CorruptCheckpointError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.records import ExportRecord, TrainRecord, VerifyRecord
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, is_up_to_date, open_run, read_record
from gemsmith.train.jax.backend import adapted_model
from gemsmith.train.jax.checkpoints import OrbaxCheckpoints, checksums
from gemsmith.train.jax.mesh import make_mesh
from gemsmith.train.jax.step import make_optimizer, shard_opt_state
from gemsmith.train.jax.upstream import TunixTrainer
from gemsmith.train.stage import train

pytestmark = pytest.mark.slow
FLIPS = 16
RANK = 16  # Orbax writes smaller arrays than these into its index, which has checksums of its own


@pytest.fixture(scope="module")
def whole(prepare, tmp_path_factory):
    """A run of six steps, saved after 2, 4 and 6, that the command line opens. Tests must not change it."""
    folder = tmp_path_factory.mktemp("whole")
    run = open_run(folder / "run", *resolve(prepare(folder / "unresolved", lora={"rank": RANK}).recipe))
    prepare_data(run)
    train(run)
    return run


@pytest.fixture
def trained(whole, tmp_path):
    """A copy of it."""
    return Run(path=shutil.copytree(whole.path, tmp_path / "run"), recipe=whole.recipe)


@pytest.fixture(scope="module")
def trainer(whole):
    """A trainer that has not begun, whose arrays lie where those of a step are restored to."""
    checkpoint = open_checkpoint(whole.recipe.checkpoint)
    model = adapted_model(whole.recipe, checkpoint, make_mesh(whole.recipe, checkpoint.variant))
    trainer = TunixTrainer(model, make_optimizer(whole.recipe.optimizer))
    nnx.update(trainer.optimizer, shard_opt_state(nnx.state(trainer.optimizer), model))
    return trainer


def flips(folder: Path, count: int):
    """Flips a bit or replaces a byte somewhere in the folder, the same places each time; it is mended before the
    next."""
    chosen, files = random.Random(0), sorted(file for file in folder.rglob("*") if file.is_file())
    for _ in range(count):
        file = chosen.choices(files, [file.stat().st_size ** 0.5 for file in files])[0]
        before = file.read_bytes()
        place = chosen.randrange(len(before))
        value = before[place] ^ 1 << chosen.randrange(8) if chosen.random() < 0.7 else chosen.randrange(256)
        file.write_bytes(before[:place] + bytes([value]) + before[place + 1 :])
        yield f"{file.relative_to(folder)} at {place}: {before[place]} -> {value}"
        file.write_bytes(before)


def losses(folder: Path):
    """Deletes, empties and halves each file of a folder in turn; it is mended before the next."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        before = file.read_bytes()
        for after in (None, b"", before[: len(before) // 2]):
            file.unlink() if after is None else file.write_bytes(after)
            yield f"{file.relative_to(folder)}: {'gone' if after is None else len(after)}"
            file.write_bytes(before)


def damages(folder: Path):
    yield from flips(folder, FLIPS)
    yield from losses(folder)


def test_damage_to_a_step_is_found_or_the_adapter_is_the_same(trained):
    good, found = read_run_adapter(trained, 6), []
    for what in damages(trained.checkpoints / "6"):
        try:
            adapter = read_run_adapter(trained)
        except CorruptCheckpointError as error:
            found.append(str(error))
            continue
        for name, pair in good.modules.items():
            assert (
                pair.a.tobytes() == adapter.modules[name].a.tobytes()
                and pair.b.tobytes() == adapter.modules[name].b.tobytes()
            ), what
    assert len(found) > 20
    assert all(error.startswith(f"{trained.checkpoints}/6: is damaged (") and "\n" not in error for error in found)


def test_damage_to_a_step_is_found_or_training_goes_on_from_the_same_state(trained, trainer):
    told = {"best_step": lambda: None, "before_save": dict, "after_save": lambda *_: None}
    checkpoints = OrbaxCheckpoints(trained, **told)
    good, metadata = checkpoints.read(6, trainer.model, trainer.optimizer), checkpoints.read_metadata(6)
    found = 0
    for what in damages(trained.checkpoints / "6"):
        try:
            assert checkpoints.read_metadata(6) == metadata, what
            state = checkpoints.read(6, trainer.model, trainer.optimizer)
        except CorruptCheckpointError:
            found += 1
            continue
        same = jax.tree.map(np.array_equal, good, state)
        assert all(jax.tree.leaves(same)), what
    assert found > 30


def flip(file: Path, place: int = -1) -> None:
    before = bytearray(file.read_bytes())
    before[place] ^= 1
    file.write_bytes(before)


def damage_arrays(run: Run, step: int, item: str = "model_params") -> None:
    """Flips a bit in each file that may hold values of an item."""
    for file in (run.checkpoints / str(step) / item).rglob("d/*"):
        flip(file, file.stat().st_size // 2)


def advised(error: str) -> list[str]:
    """The last command that an error ends with, as arguments."""
    told = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and error.endswith(f"{told[0]}\n"), error
    return re.search(r"gemsmith ((?:(?!gemsmith ).)*)$", error.strip())[1].split()


def test_an_export_of_a_damaged_step_offers_the_last_good_one(trained, gemsmith):
    damage_arrays(trained, 6)
    damage_arrays(trained, 4)
    code, _, error = gemsmith("export", trained.path)
    assert code == 2 and re.search(r"checkpoints/6: is damaged \(.*\); step 2 is good: ", error)
    assert advised(error) == f"export {trained.path} --set export.step=2 --force".split()
    code, _, error = gemsmith(*advised(error))
    assert code == 0, error
    assert read_record(trained, ExportRecord).step == 2 and read_record(trained, ExportRecord).warnings == ()


def test_an_export_without_a_good_step_says_so_and_leaves_the_earlier_export(trained, gemsmith):
    assert gemsmith("export", trained.path)[0] == 0
    for step in (2, 4, 6):
        (trained.checkpoints / str(step) / "_CHECKPOINT_METADATA").unlink()
    code, _, error = gemsmith("export", trained.path, "--force")
    assert (
        code == 2
        and "6: is damaged (its _CHECKPOINT_METADATA is missing); no other step is good: train again with: " in error
    )
    assert is_up_to_date(trained, "export") and (trained.adapter / "adapter_model.safetensors").exists()
    assert gemsmith(*advised(error))[0] == 0


def test_a_step_that_is_damaged_after_its_export_is_no_failure_of_the_export(trained, gemsmith):
    assert gemsmith("export", trained.path)[0] == 0
    damage_arrays(trained, 6)
    assert gemsmith("verify", trained.path)[0] == 0
    check = next(check for check in read_record(trained, VerifyRecord).checks if check.name == "adapter")
    assert check.passed is None and "not compared: " in check.detail and "6: is damaged" in check.detail


@pytest.mark.parametrize("item", ["model_params", "optimizer_state"])
def test_training_goes_on_from_the_last_good_step_and_says_so(whole, trained, gemsmith, item):
    damage_arrays(trained, 6, item)
    (trained.checkpoints / "4" / "_CHECKPOINT_METADATA").unlink()
    (trained.checkpoints / "6.damaged").mkdir()  # of an earlier time
    trained.record_file("train").unlink()
    code, _, error = gemsmith("run", trained.path, "--until", "train")
    assert code == 0, error
    root, record = trained.checkpoints, read_record(trained, TrainRecord)
    assert record.resumed_at == (2,) and sums(trained, 6) == sums(whole, 6)
    told = [line for line in error.splitlines() if line.startswith("train: warning: ")]
    assert told[0].startswith(f"train: warning: {root}/6: is damaged (")
    assert told[0].endswith("); it is kept as 6.damaged1, and training goes on from step 2")
    assert f"{root}/4: is damaged (its _CHECKPOINT_METADATA is missing); it is kept as 4.damaged, and" in told[1]
    assert [f"train: warning: {text}" for text in record.warnings[:2]] == told[:2]
    assert sorted(folder.name for folder in root.iterdir()) == ["2", "4", "4.damaged", "6", "6.damaged", "6.damaged1"]


def test_an_export_takes_the_step_that_training_ended_with_and_no_earlier_one(trained, gemsmith):
    shutil.rmtree(trained.checkpoints / "6")
    code, _, error = gemsmith("export", trained.path)
    assert code == 2 and "checkpoints: holds 2, 4, and step 6 is what training kept, says " in error
    assert not (trained.record_file("export").exists() or trained.merged.exists() or trained.adapter.exists())
    assert advised(error) == f"train {trained.path}".split()


def test_once_its_record_is_deleted_training_goes_on_to_the_step_that_was_lost(whole, trained, gemsmith):
    shutil.rmtree(trained.checkpoints / "6")
    code, _, error = gemsmith("run", trained.path)
    trained.record_file("train").unlink()
    assert (
        code == 2
        and not trained.merged.exists()
        and "delete that file and resume from step 4 with" in error
        and gemsmith(*advised(error))[0] == 0
    )
    assert read_record(trained, TrainRecord).resumed_at == (4,) and sums(trained, 6) == sums(whole, 6)
    assert gemsmith("export", trained.path)[0] == 0


def test_a_step_that_another_training_saved_is_not_exported(trained, gemsmith):
    record = json.loads(trained.record_file("train").read_text())
    record["steps"][3]["loss"] += 1.0
    trained.record_file("train").write_text(json.dumps(record))
    code, _, error = gemsmith("export", trained.path)
    assert code == 2 and "checkpoints/6: was saved by another training than " in error
    assert advised(error) == f"train {trained.path} --force".split() and not trained.merged.exists()
    assert gemsmith("export", trained.path, "--set", "export.step=2")[0] == 0


def sums(run: Run, step: int) -> dict:
    return json.loads((run.checkpoints / str(step) / "_CHECKPOINT_METADATA").read_text())["custom_metadata"][
        "checksums"
    ]


def test_training_whose_steps_are_all_damaged_starts_again_as_advised(trained, gemsmith):
    for step in (2, 4, 6):
        truncate(trained.checkpoints / str(step) / "_CHECKPOINT_METADATA")
    trained.record_file("train").unlink()
    code, _, error = gemsmith("train", trained.path)
    assert (
        code == 2
        and "6: is damaged (its _CHECKPOINT_METADATA is damaged); no earlier step is good, so start again with: "
        in error
    )
    assert gemsmith(*advised(error))[0] == 0


def test_arrays_have_the_checksums_on_devices_that_numpy_finds(trainer):
    from gemsmith.checkpoints.steps import checksum

    state = nnx.state(trainer.optimizer, nnx.optimizer.OptState)
    found = checksums(state)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    assert len(found) == len(leaves) > 20
    for path, leaf in leaves:
        assert found[jax.tree_util.keystr(path, simple=True, separator="/")] == checksum(np.asarray(leaf))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("damage", "finished"),
    [
        (lambda run: truncate(run.data / "tokens.npy"), True),
        (lambda run: truncate(run.data / "tokens.npy"), False),
        (lambda run: flip(run.data / "loss_mask.npy"), False),
        (lambda run: shutil.rmtree(run.data), False),
        (lambda run: truncate(run.record_file("data")), True),
        (lambda run: truncate(run.record_file("data")), False),
        (lambda run: truncate(run.record_file("train")), True),
    ],
)
def test_what_is_advised_mends_rows_and_records_and_training_goes_on(whole, trained, gemsmith, damage, finished):
    if not finished:
        shutil.rmtree(trained.checkpoints / "6")
        trained.record_file("train").unlink()
    damage(trained)
    for _ in range(5):
        code, _, error = gemsmith("export" if is_up_to_date(trained, "train") else "train", trained.path)
        while code:
            command = advised(error)
            assert command[0] in ("data", "train") and (command[0] == "data" or "--force" not in command), error
            code, _, error = gemsmith(*command)
        if is_up_to_date(trained, "export"):
            break
    assert is_up_to_date(trained, "train") and is_up_to_date(trained, "export")
    assert sums(trained, 6) == sums(whole, 6)


def test_rows_that_are_written_again_leave_what_was_made_from_them_complete(trained, gemsmith):
    before = trained.record_file("data").read_bytes()
    truncate(trained.data / "positions.npy")
    code, _, error = gemsmith("data", trained.path, "--show", "1")
    assert code == 2 and "positions.npy: is damaged" in error
    assert gemsmith(*advised(error))[0] == 0
    assert trained.record_file("data").read_bytes() == before and is_up_to_date(trained, "train")
    assert gemsmith("data", trained.path, "--show", "1")[0] == 0


def test_checkpoints_that_are_gone_are_trained_anew_as_advised(trained, gemsmith):
    shutil.rmtree(trained.checkpoints)
    code, _, error = gemsmith("export", trained.path)
    assert code == 2 and "holds no complete checkpoint; run first: gemsmith train" in error
    assert gemsmith(*advised(error))[0] == 0
    assert gemsmith("export", trained.path)[0] == 0
