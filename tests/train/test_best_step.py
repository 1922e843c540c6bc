"""Which step is kept, and when training ends early, by the losses on held-out rows; both are the same after a kill."""

import math

import pytest

from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import RecipeError, RunError
from gemsmith.export.adapters import find_step, read_run_adapter
from gemsmith.export.stage import export
from gemsmith.runs.records import Evaluation, ExportRecord, TrainRecord
from gemsmith.runs.run import read_record
from gemsmith.train.loop import TrainSession
from gemsmith.train.loss_checks import best_evaluation
from gemsmith.train.stage import train

# Upstream's warnings, at import.
pytestmark = pytest.mark.filterwarnings("ignore")

EVAL = {"eval": {"task": "verilog", "rows": 2, "split": "held-out"}}
KEEPS = {"eval_steps": 1, "keep": "best", "early_stopping_patience": 2, "save_steps": 3, "save_total_limit": 1}
LOSSES = {1: 3.0, 2: 2.0, 3: 2.0, 4: 2.5, 5: 1.0, 6: 1.0}
"""The loss after each step: the lowest comes at step 2, and two that are not below it have come at step 4."""


@pytest.fixture
def losses(monkeypatch):
    """What evaluations come to, by step; may be changed."""
    found, evaluated = dict(LOSSES), TrainSession.evaluated

    def told(self, step, *, nll, targets, **rest):
        assert nll / targets != pytest.approx(found[step])
        evaluated(self, step, nll=found[step] * targets, targets=targets, **rest)

    monkeypatch.setattr(TrainSession, "evaluated", told)
    return found


def stop_at(monkeypatch, method, step):
    """Lets an attempt end as by a second Ctrl-C when a session's method is called for a step."""
    original = getattr(TrainSession, method)

    def stopping(self, number, *given, **named):
        found = original(self, number, *given, **named)
        if number == step:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(TrainSession, method, stopping)


@pytest.mark.parametrize("backend", [pytest.param("tunix", marks=pytest.mark.slow), "trl"])
def test_the_best_step_is_kept_and_the_end_is_the_same_after_kills(
    prepare, tmp_path, losses, monkeypatch, capsys, same_numbers, backend
):
    keys = {"data": EVAL, "train": KEEPS | {"backend": backend}}
    whole, killed = prepare(tmp_path / "whole", **keys), prepare(tmp_path / "killed", **keys)
    record = train(whole)
    assert [step.step for step in record.steps] == [1, 2, 3, 4]
    assert checkpoint_steps(whole.checkpoints) == [2, 4]
    assert (record.last_checkpoint, record.kept) == ("checkpoints/2", "best")
    assert record.early_stop == (
        "ended after step 4 of 6: no held-out loss below 2.0000, that of step 2, in 2 evaluations "
        "(train.early_stopping_patience)"
    )
    told = capsys.readouterr().err
    assert f"train  {record.early_stop}" in told
    assert "train  step 2 has the lowest held-out loss: export takes that one" in told
    for method, step in (("evaluated", 2), ("plan", 4), ("record", None)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if step is None:
                patch.setattr(TrainSession, method, stops)
            else:
                stop_at(patch, method, step)
            train(killed)
    again = train(killed)
    assert same_numbers(again, record) and again.resumed_at
    assert (again.last_checkpoint, again.early_stop) == (record.last_checkpoint, record.early_stop)
    assert checkpoint_steps(killed.checkpoints) == [2, 4]
    adapters = []
    for run in (whole, killed):
        export(run)
        assert read_record(run, ExportRecord).step == 2
        adapters.append((run.adapter / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]
    last, best = (read_run_adapter(whole, step).modules for step in (4, 2))
    assert any((last[name].b != best[name].b).any() for name in best)


def stops(*_):
    raise KeyboardInterrupt


def test_a_best_step_that_is_gone_is_not_replaced_by_another(prepared_run, losses):
    losses[5] = losses[6] = 9.0
    run = prepared_run(data=EVAL, train=KEEPS | {"backend": "trl", "early_stopping_patience": None})
    record = train(run)
    assert record.early_stop is None and find_step(run) == 2
    (run.checkpoints / "2").rename(run.path / "2")
    with pytest.raises(RunError, match=r"holds 6, and step 2 is what training kept"):
        find_step(run)


def test_a_loss_that_is_no_number_is_never_the_lowest():
    def of(*losses):
        evaluations = [Evaluation(step=n, loss=loss, token_accuracy=0, loss_tokens=1, s=0) for n, loss in losses]
        return best_evaluation(evaluations).step

    assert of((1, math.nan), (2, 5.0), (3, 4.0), (4, 4.0)) == 3
    assert of((1, math.nan), (2, math.nan)) == 1


def test_settings_that_need_held_out_losses_are_refused_without(small_recipe):
    for key, value in (("keep", "best"), ("early_stopping_patience", 3)):
        with pytest.raises(RecipeError, match=rf"^train\.{key}: {value} was given, and train\.eval_steps null"):
            small_recipe(data=EVAL, train={key: value})


def test_a_step_to_export_is_chosen_after_training_where_that_says_which_stay(prepared_run):
    run = prepared_run(data=EVAL, train=KEEPS, export={"step": 6})
    with pytest.raises(
        RecipeError,
        match=r"^export\.step: 6 was given, and training decides which steps stay \(train\.keep, .*; set null",
    ):
        train(run)
    assert not run.record_file(TrainRecord.stage).exists()
