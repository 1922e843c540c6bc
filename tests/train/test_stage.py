"""Two trainings where only one can be, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemsmith.errors import InputError, MachineError, RunError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.schema import Train
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, open_run, read_record
from gemsmith.system.locks import LOCK
from gemsmith.train.stage import ask_xla, check_training, train

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


def asked(monkeypatch, tmp_path, script, flags="--xla_a=1", options=None):
    """What ask_xla does where the process that asks XLA is a shell's script."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("gemsmith.train.stage.XLA_S", 2)
    monkeypatch.setenv("XLA_FLAGS", flags)
    ask_xla(Train(compiler_options=options or {}))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exec sleep 60", "XLA_FLAGS: XLA did not say within 2 s whether it takes these flags"),
        ("echo 'RuntimeError: no such GPU' >&2; exit 1", "could not be asked about these flags (RuntimeError: no such"),
        ("kill -9 $$", "XLA_FLAGS: XLA could not be asked about these flags (it ended with -9)"),
    ],
)
def test_xla_that_does_not_say_whether_it_takes_its_flags_is_a_warning(monkeypatch, tmp_path, capsys, script, said):
    asked(monkeypatch, tmp_path, script)
    assert said in capsys.readouterr().err


def test_a_flag_that_xla_does_not_take_is_an_error_in_its_words(monkeypatch, tmp_path):
    line = "F1126 17:38:03.5 1 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_a=1"
    with pytest.raises(
        MachineError, match=r"^XLA_FLAGS: XLA ends at once: Unknown flag .* --xla_a=1; mend it, or unset"
    ):
        asked(monkeypatch, tmp_path, f"echo '{line}' >&2; kill -ABRT $$")
    with pytest.raises(InputError, match=r"^train\.compiler_options\.a: wrong$"):
        asked(monkeypatch, tmp_path, "echo train.compiler_options.a: wrong; exit 2", options={"a": 1})


def test_nobody_is_asked_where_no_flag_is_given(monkeypatch, tmp_path):
    asked(monkeypatch, tmp_path, "exit 1", flags="")


@pytest.mark.slow
def test_a_flag_that_xla_does_not_know_is_told_before_the_rows_are_read(gemsmith, recipe, monkeypatch):
    code, _, err = gemsmith("run", recipe, "--set", "train.compiler_options={xla_no_such: true}", "--until", "train")
    assert code == 2 and "train.compiler_options.xla_no_such: the recipe sets it, but XLA on cpu does not take" in err
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such=1")
    code, _, err = gemsmith("run", recipe, "--until", "train")
    assert code == 2 and "error: XLA_FLAGS: XLA ends at once: Unknown flag in XLA_FLAGS: --xla_no_such=1" in err
    assert not (recipe.parent / "runs" / "my" / "data.json").exists()
