"""One attempt at a run, with a backend that computes nothing."""

import math
import signal

import pytest

from gemsmith.arch import find_variant
from gemsmith.errors import DataError, EngineError, Terminated
from gemsmith.runs.records import TrainStep
from gemsmith.runs.run import Run, start_clock
from gemsmith.train import loop as session
from gemsmith.train.loop import BackendInfo, StepOutcome, TrainSession, _per_s

GOOD = {"grad_norm": 1.0, "real_tokens": 10, "targets": 5, "correct": 4, "skipped": False, "should_stop": False}


class Still:
    """A backend that has saved nothing and runs what a test asks for."""

    name, packages, writes = "still", (), False

    def __init__(self, outcomes=()):
        self.outcomes, self.deleted, self.checkpoints, self.session = outcomes, 0, self, None

    def others(self):
        return []

    def prepare(self, session):
        self.session = session

    def steps(self):
        return [step.step for step in self.session.log.steps] if self.session else []

    def delete_all(self):
        self.deleted += 1

    def facts(self):
        devices = ("NVIDIA H200",) * 8
        nothing = {"trained_parameters": 0, "mesh": {}, "attention": {}, "remat": "none", "hosts": 1}
        return BackendInfo(accelerators=devices, peak_memory_bytes=0, **nothing)

    def run(self):
        for number, changed in enumerate(self.outcomes, 1):
            self.session.finish(StepOutcome(plan=self.session.plan(number), loss=1.0, **GOOD | changed))


@pytest.fixture
def session_of(small_recipe, tmp_path):
    def make(*outcomes, restart=False, **train):
        run = Run(path=tmp_path, recipe=small_recipe(train=train))
        return TrainSession(run, Still(outcomes), steps=4, restart=restart)

    return make


def test_a_training_that_ends_before_its_last_step_was_stopped(session_of):
    with pytest.raises(Terminated, match="step 2 is saved"):
        session_of({}, {"should_stop": True}).train()
    with pytest.raises(Terminated, match="no step is saved yet; continue with: gemsmith train"):
        session_of().train()


@pytest.mark.parametrize("asked", [True, False])
def test_ctrl_c_names_the_step_that_is_saved(session_of, monkeypatch, asked):
    attempt = session_of({}, {"should_stop": True})
    if asked:  # and the step saved, by the first Ctrl-C
        attempt.stopping.ask(signal.SIGINT)
    else:  # at once, by the second
        run = Still.run

        def interrupted(self):
            run(self)
            raise KeyboardInterrupt

        monkeypatch.setattr(Still, "run", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C: step 2 is saved; continue with: gemsmith train "):
        attempt.train()


def test_a_stop_that_comes_with_the_last_step_is_told_once_the_record_is_written(small_recipe, tmp_path, monkeypatch):
    """So that no other stage begins."""
    run, written = Run(path=tmp_path, recipe=small_recipe()), []
    backend = Still([{}, {}, {}, {}])
    monkeypatch.setattr(Still, "writes", True)
    monkeypatch.setattr(TrainSession, "record", lambda self, *_: self.stopping.ask(signal.SIGTERM))
    monkeypatch.setattr(session, "write_record", lambda *given: written.append(given))
    with pytest.raises(Terminated, match="step 4 is saved"):
        session.train_session(run, backend, steps=4, variant=find_variant("tiny-12b"), clock=None)
    assert len(written) == 1


def test_going_on_says_from_which_step(small_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Still, "writes", True)
    monkeypatch.setattr(Still, "restore", lambda *_: None, raising=False)
    monkeypatch.setattr(TrainSession, "_resume", lambda _: (3, [], [], []))
    run = Run(path=tmp_path, recipe=small_recipe())
    TrainSession(run, Still(), steps=8, restart=False)
    assert capsys.readouterr().err == f"train  loading {run.recipe.checkpoint}\ntrain  resuming from step 3 of 8\n"


def test_callbacks_are_called_with_each_step_once_it_is_logged(small_recipe, tmp_path):
    called = []
    run = Run(path=tmp_path, recipe=small_recipe(), callbacks=(lambda step: called.append((step, len(log.steps))),))
    attempt = TrainSession(run, Still([{}, {}, {}, {}]), steps=4, restart=False)
    log = attempt.log
    attempt.train()
    assert called == list(zip(log.steps, [1, 2, 3, 4], strict=True))


def test_each_step_is_logged_with_the_rate_that_it_was_planned_with(session_of):
    attempt = session_of({}, {}, {}, {})
    attempt.train()
    assert [step.step for step in attempt.log.steps] == [1, 2, 3, 4]
    assert [step.learning_rate for step in attempt.log.steps[:3]] == [0, 5e-3, 1e-2]  # two steps of warm-up


def test_a_step_says_what_share_of_its_tokens_in_the_loss_is_correct(session_of):
    session = session_of({}, {"correct": 0}, {"targets": 3, "correct": 1}, {})
    session.train()
    assert [step.token_accuracy for step in session.log.steps] == [0.8, 0.0, 0.333333, 0.8]


def test_the_record_names_the_machine_that_trained_not_the_one_that_was_planned_for(session_of):
    attempt = session_of({}, {}, {}, {})
    attempt.train()
    record = attempt.record(start_clock(), find_variant("tiny-12b"))
    assert attempt.run.recipe.hardware.machines == ("v5p-8", "v6e-8", "2xh100")
    assert record.machine == "8xh200" and record.against_plan is None


def test_a_step_without_targets_or_of_a_bad_loss_is_not_logged(session_of):
    attempt = session_of({}, {"targets": 0})
    with pytest.raises(DataError, match="no token of step 2 is trained on"):
        attempt.train()
    assert len(attempt.log.steps) == 1
    attempt = session_of({"grad_norm": math.inf})
    with pytest.raises(EngineError, match="there is no checkpoint yet"):
        attempt.train()
    assert attempt.log.steps == []


def test_what_was_saved_before_is_deleted_once_a_step_has_shown_that_training_works(session_of):
    attempt = session_of({}, {}, restart=True)
    assert attempt._backend.deleted == 0
    with pytest.raises(Terminated):
        attempt.train()
    assert attempt._backend.deleted == 1 and not attempt.restart


def test_a_loss_is_skipped_above_its_limit_only_where_the_recipe_says_so(session_of, monkeypatch):
    monkeypatch.setattr(session.loss_checks, "spike_limit", lambda _, __, factor: factor)
    plans = [session_of(on_spike=what).plan(3) for what in ("report", "skip")]
    assert [plan.skip_above for plan in plans] == [(math.inf, math.inf), (3.0, 10.0)]
    assert [plan.spike_limits for plan in plans] == [(3.0, 10.0), (3.0, 10.0)]


def test_a_gradient_norm_far_above_the_others_is_a_spike_of_its_own(session_of):
    outcomes = [{"grad_norm": norm} for norm in (*[1.0] * 11, 10.5, 9.5)]
    attempt = session_of(*outcomes)
    attempt.steps = len(outcomes)
    attempt.train()
    record = attempt.record(start_clock(), find_variant("tiny-12b"))
    assert (record.grad_norm_spikes, record.spikes) == ((12,), ())
    assert any("10.5 in step 12" in warning for warning in record.warnings)


def test_the_speed_leaves_out_the_first_step_of_each_attempt():
    def step(number, step_s):
        return TrainStep(step=number, loss=1.0, grad_norm=1.0, learning_rate=0.0, real_tokens=10, step_s=step_s)

    steps = [step(1, 50.0), step(2, 1.0), step(3, 70.0), step(4, 1.0)]
    assert _per_s("real_tokens", steps, [2]) == 10
    assert _per_s("real_tokens", steps[:1], []) == 0.2  # there is no other
