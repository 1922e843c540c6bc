"""A finished run is given more steps: those that are done stay, and the end is the same after a kill."""

import pytest

from gemsmith.export.stage import export
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.records import DataRecord, Extension, TrainRecord
from gemsmith.runs.run import Run, find_run, is_up_to_date, read_record, write_record
from gemsmith.train.loop import TrainSession
from gemsmith.train.schedule import learning_rate
from gemsmith.train.stage import train

# Upstream's warnings, at import.
pytestmark = pytest.mark.filterwarnings("ignore")


def opened(run):
    return Run(path=run.path, recipe=find_run(run.path))


def stop_before(monkeypatch, step):
    plan = TrainSession.plan

    def stopping(self, number):
        if number == step:
            raise KeyboardInterrupt
        return plan(self, number)

    monkeypatch.setattr(TrainSession, "plan", stopping)


@pytest.mark.parametrize("backend", [pytest.param("tunix", marks=pytest.mark.slow), "trl"])
def test_a_finished_run_goes_on_and_ends_alike_after_a_kill(
    prepare, tmp_path, gemsmith, monkeypatch, same_numbers, backend
):
    keys = {"model": "custom", "train": {"backend": backend, "max_steps": 3}, "optimizer": {"warmup_steps": None}}
    whole, killed = (prepare(tmp_path / name, **keys) for name in ("whole", "killed"))
    first = train(whole)
    train(killed)
    export(whole)
    code, _, error = gemsmith("train", whole.path, "--steps", "+3")
    assert code == 0, error
    assert (
        "train  6 steps instead of 3: the 3 done keep their learning rates; from step 4 on they are those of a cosine "
        "schedule over 6 steps, 0.005 to 0.00067\n" in error
    )
    run, record = opened(whole), read_record(whole, TrainRecord)
    assert record.steps[:3] == first.steps and len(record.steps) == 6
    rates = [learning_rate(run.recipe.optimizer, update=update, updates=6) for update in (3, 4, 5)]
    assert [step.learning_rate for step in record.steps[3:]] == rates
    assert record.extensions == (Extension(after=3, planned_steps=3, steps=6),) and record.resumed_at == (3,)
    assert run.recipe.train.max_steps == 6 and is_up_to_date(run, "train") and not is_up_to_date(run, "export")
    with monkeypatch.context() as patch:
        stop_before(patch, 6)
        assert gemsmith("train", killed.path, "--steps", "6")[0] == 130
    assert gemsmith("train", killed.path)[0] == 0
    again = read_record(killed, TrainRecord)
    assert same_numbers(again, record) and again.extensions == record.extensions and again.resumed_at == (3, 4)
    adapters = []
    for folder in (whole, killed):
        export(opened(folder))
        adapters.append((folder.adapter / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def test_patience_counts_anew_from_where_more_steps_were_given(prepared_run, gemsmith, monkeypatch):
    evaluated = TrainSession.evaluated
    monkeypatch.setattr(
        TrainSession,
        "evaluated",
        lambda self, step, *, nll, targets, **rest: evaluated(self, step, nll=step * targets, targets=targets, **rest),
    )
    held_out = {"task": "verilog", "rows": 2, "split": "held-out"}
    keys = {"backend": "trl", "eval_steps": 1, "early_stopping_patience": 1, "keep": "best"}
    run = prepared_run(model="custom", data={"eval": held_out}, train=keys)
    assert len(train(run).steps) == 2
    code, _, error = gemsmith("train", run.path, "--steps", "+4")
    assert code == 2 and "--steps +4: makes 6 steps in all; 2 are done, of 6 that were planned; ask for others" in error
    assert gemsmith("train", run.path, "--steps", "+2")[0] == 0
    record = read_record(run, TrainRecord)
    assert len(record.steps) == 3 and record.early_stop.startswith("ended after step 3 of 4: ")
    assert record.last_checkpoint == "checkpoints/1"
    assert record.extensions == (Extension(after=2, planned_steps=6, steps=4),)


def test_epochs_are_counted_in_all_and_what_asks_for_no_more_is_refused(prepared_run, gemsmith):
    run = prepared_run(model="custom", train={"backend": "trl", "max_steps": 1, "global_batch_size": 1})
    code, _, error = gemsmith("train", run.path, "--epochs", 1)
    assert code == 2 and error.endswith(f"run first: gemsmith train {run.path}\n")
    train(run)
    recipe = run.recipe_file.read_text()
    for asked, message in (
        (
            "1",
            "--steps 1: makes 1 steps in all; 1 are done, of 1 that were planned; ask for others, such as --steps +1",
        ),
        ("-5", "--steps -5: must be a number of steps in all, such as 2, or of more, such as +1"),
        ("+many", "--steps +many: must be a number of steps"),
    ):
        code, _, error = gemsmith("train", run.path, f"--steps={asked}")
        assert code == 2 and message in error
    code, _, error = gemsmith("train", run.path, "--steps", "+1", "--set", "optimizer.learning_rate=1e-3")
    assert code == 2 and "--set: does not go with --steps" in error
    assert run.recipe_file.read_text() == recipe
    code, _, error = gemsmith("train", run.path, "--set", "train.max_steps=5")
    assert code == 2 and f"train on with: gemsmith train {run.path} --steps 5" in error
    rows = read_record(run, DataRecord).packed_rows
    assert gemsmith("train", run.path, "--epochs", 1)[0] == 0
    assert len(read_record(run, TrainRecord).steps) == rows > 1
    found = load_recipe(run.recipe_file).train
    assert (found.epochs, found.max_steps) == (1, None)
    code, _, error = gemsmith("train", run.path, "--set", "lora.rank=2")
    assert code == 2 and f"do that again with: gemsmith train {run.path} --set lora.rank=2 --force" in error
    code, _, error = gemsmith("data", run.path, "--set", "lora.rank=2", "--set", "data.max_length=80")
    assert code == 2 and f"gemsmith data {run.path} --set data.max_length=80 --set lora.rank=2 --force; or" in error
    assert "--steps +N trains on" in gemsmith("train", run.path)[2]


@pytest.mark.parametrize("warmup", [{"warmup_steps": None}, {"warmup_steps": None, "warmup_ratio": 0.25}], ids=str)
def test_a_run_that_is_given_more_steps_again_and_again_warms_up_once(prepared_run, gemsmith, warmup):
    """A longer training by itself would have a longer warm-up: a tenth of the steps, or a share of them."""
    held_out = {"task": "verilog", "rows": 2, "split": "held-out"}
    keys = {"backend": "trl", "max_steps": 4, "eval_steps": 5, "global_batch_size": 1}
    run = prepared_run(model="custom", data={"eval": held_out}, train=keys, optimizer=warmup)
    first = train(run)
    for asked in ("+1", "12"):
        code, _, error = gemsmith("train", run.path, "--steps", asked)
        assert code == 0, error
    code, _, error = gemsmith("run", run.path, "--set", "train.max_steps=null")
    assert code == 2 and f"resume it as it is: gemsmith run {run.path}; or do that again with: gemsmith d" in error
    record = read_record(run, TrainRecord)
    assert record.extensions == (
        Extension(after=4, planned_steps=4, steps=5),
        Extension(after=5, planned_steps=5, steps=12),
    )
    assert record.steps[:4] == first.steps and record.resumed_at == (4, 5)
    assert record.warmup_steps == first.warmup_steps == (0 if len(warmup) == 1 else 1)
    assert [one.step for one in record.evaluations] == [4, 5, 10, 12]
    optimizer = opened(run).recipe.optimizer
    once = optimizer.model_copy(update={"warmup_ratio": None, "warmup_steps": first.warmup_steps})
    for updates, after, until in ((4, 0, 4), (5, 4, 5), (12, 5, 12)):
        expected = [learning_rate(once, update=update, updates=updates) for update in range(after, until)]
        assert [step.learning_rate for step in record.steps[after:until]] == expected
    run.record_file("train").unlink()
    assert gemsmith("train", run.path)[0] == 0
    again = read_record(run, TrainRecord)
    assert again.extensions == record.extensions and again.steps == record.steps


def test_what_is_extended_on_several_hosts_is_told_as_commands(prepared_run, gemsmith):
    run = prepared_run(model="custom", train={"backend": "trl", "max_steps": 1}, optimizer={"warmup_steps": None})
    write_record(run, train(run).model_copy(update={"hosts": 2}))
    code, _, error = gemsmith("train", run.path, "--steps", "20")
    assert (
        code == 2
        and (
            "--steps 20: is for training on one host, and this was on 2; first: gemsmith data "
            f"{run.path} --set train.max_steps=20 --set optimizer.warmup_steps=0 --force, then on each host: "
            f"gemsmith train {run.path}\n"
        )
        in error
    )
    code, _, error = gemsmith("train", run.path, "--steps", "+1", "--force")
    assert code == 2 and "--force: does not go with --steps" in error
    code, _, error = gemsmith("train", run.path, "--steps", "+1", "--epochs", 2)
    assert code == 2 and "--epochs: does not go with --steps" in error
