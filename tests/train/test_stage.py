"""Two trainings where only one can be, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.errors import InputError, RunError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, open_run, read_record
from gemsmith.system.locks import LOCK
from gemsmith.train.stage import check_training, train

# `gemsmith … FOLDER`, which trains to the second save and goes on once a file named FOLDER.goes_on is there.
SLOWLY = """
import sys, time
from pathlib import Path
from gemsmith import cli
from gemsmith.data.batches import Batches
batch = Batches.batch
def slowly(self, step, rows):
    while step > 6 and not Path(sys.argv[-1] + ".goes_on").exists():
        time.sleep(0.05)
    return batch(self, step, rows)
Batches.batch = slowly
cli.main(sys.argv[1:])
"""
KEYS = {"train": {"max_steps": 12, "save_steps": 3}, "lora": {"targets": ["q", "down"]}}


@pytest.fixture
def start():
    """Starts `gemsmith …`: `start("train", folder)`."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-W", "ignore", "-c", SLOWLY, *map(str, arguments)]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_a_save(process, folder):
    while not list(folder.glob("[0-9]")):
        assert process.poll() is None, process.stderr.read()
    assert json.loads((folder / LOCK).read_text())["pid"] == process.pid


@pytest.mark.slow
def test_a_second_command_leaves_a_training_alone_and_once_that_is_killed_goes_on(
    prepare, start, tmp_path, gemsmith, capfd
):
    whole, shared = (prepare(tmp_path / name, **KEYS) for name in ("whole", "shared"))
    train(whole)
    first = start("train", shared.path)
    wait_for_a_save(first, shared.checkpoints)
    capfd.readouterr()
    for verb in (
        ["train"],
        ["train", "--force"],
        ["run"],
        ["export"],
        ["report"],
        ["data", "--force", "--set", "data.max_length=128"],
    ):
        code, _, err = gemsmith(*verb, shared.path)
        assert (
            code == 2
            and err.count("\n") == 1
            and f"is in use by `gemsmith train {shared.path}` (process {first.pid} on" in err
        ), verb
    assert "<turn|>" in gemsmith("data", shared.path, "--show", 1)[1]
    assert first.poll() is None, "it has ended too early to be disturbed"
    first.kill()
    first.wait()
    Path(f"{shared.path}.goes_on").touch()
    second = start("train", shared.path)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert read_record(shared, TrainRecord).resumed_at
    found, wanted = (read_run_adapter(run, 12).modules for run in (shared, whole))
    for name, pair in wanted.items():
        assert (found[name].a.tobytes(), found[name].b.tobytes()) == (pair.a.tobytes(), pair.b.tobytes()), name


@pytest.mark.slow
def test_two_runs_do_not_save_to_one_folder_at_a_time(prepare, start, tmp_path):
    saves = {"max_steps": 12, "save_steps": 3, "checkpoint_folder": str(tmp_path / "saves")}
    first, second = (prepare(tmp_path / name, **KEYS | {"train": saves}) for name in ("first", "second"))
    training = start("train", first.path)
    wait_for_a_save(training, first.checkpoints)
    for restart in (False, True):
        with pytest.raises(RunError) as error:
            train(second, restart=restart)
        expected = (
            f"train.checkpoint_folder {tmp_path / 'saves'}: is in use by `gemsmith train {first.path}` (process "
            f"{training.pid} on"
        )
        assert expected in str(error.value)
    assert not second.record_file("train").exists()
    Path(f"{first.path}.goes_on").touch()
    _, err = training.communicate(timeout=300)
    assert training.returncode == 0 and len(read_record(first, TrainRecord).steps) == 12, err


def test_a_folder_that_holds_only_a_lock_was_not_trained_in(prepared_run):
    run = prepared_run()
    run.checkpoints.mkdir()
    (run.checkpoints / LOCK).touch()
    assert (
        open_run(
            run.path, run.recipe.model_copy(update={"lora": run.recipe.lora.model_copy(update={"rank": 2})})
        ).recipe.lora.rank
        == 2
    )


def test_callbacks_that_new_processes_could_not_call_are_refused_before_the_first_stage(small_recipe, tmp_path):
    def run(*callbacks, replica):
        mesh = {"replica": replica, "fsdp": 1}
        recipe = small_recipe(train={"backend": "trl", "mesh": mesh, "global_batch_size": 2})
        return Run(path=tmp_path, recipe=recipe, callbacks=callbacks)

    with pytest.raises(
        InputError, match=r"^callbacks: 2 new processes would train, .* set train\.mesh to \{replica: 1"
    ):
        check_training(run(print, replica=2))
    check_training(run(replica=2))
    check_training(run(print, replica=1))
