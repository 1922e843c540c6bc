import errno
import json
import math

import pytest

from gemsmith.errors import MachineError
from gemsmith.runs.records import TrainStep
from gemsmith.runs.run import Run
from gemsmith.train.logging import Display, Events, StepLog, StepsFile


@pytest.fixture
def run(tmp_path, small_recipe):
    return Run(path=tmp_path, recipe=small_recipe())


def make_step(number, **values):
    values = {"loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4, "real_tokens": 300, "step_s": 0.25} | values
    return TrainStep(step=number, **values)


def log_steps(run, first, last, *, kept=(), **values):
    display = Display(steps=6, done=len(kept), compare=lambda _: None)
    with StepLog(kept, (StepsFile(run, kept), Events(run, done=len(kept)), display), ()) as log:
        for number in range(first, last + 1):
            log.add(make_step(number, **values))
    return log.steps


def read_lines(run):
    return [TrainStep.model_validate_json(line) for line in (run.logs / "train_steps.jsonl").read_text().splitlines()]


def test_steps_come_back_as_they_were_written(run, capsys):
    steps = log_steps(run, 1, 3)
    assert read_lines(run) == steps == [make_step(number) for number in (1, 2, 3)]
    lines = capsys.readouterr()
    assert lines.out == "" and lines.err.splitlines() == ["train  step 1/6  loss 1.5000"]


def test_a_continued_log_drops_the_steps_that_are_done_again(run):
    steps = log_steps(run, 1, 5)
    with (run.logs / "train_steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    again = log_steps(run, 4, 6, kept=steps[:3], loss=9.0)
    assert [step.loss for step in read_lines(run)] == [step.loss for step in again] == [1.5, 1.5, 1.5, 9.0, 9.0, 9.0]
    keys = {"step", "loss", "grad_norm", "learning_rate", "real_tokens", "step_s", "spike", "skipped"}
    keys |= {"images", "soft_tokens", "loss_tokens", "token_accuracy", "grad_norm_spike"}
    for line in (run.logs / "train_steps.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == keys


def test_an_attempt_within_the_same_second_keeps_the_events_before(run, read_events, monkeypatch):
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1.7e9)  # names a file of events
    steps = log_steps(run, 1, 12)
    log_steps(run, 10, 11, kept=steps[:9], loss=9.0)
    assert read_events(run)["train/loss"] == {number: 1.5 if number < 10 else 9.0 for number in range(1, 12)}


def test_an_attempt_that_trains_nothing_leaves_the_files_of_the_one_before(run):
    steps = log_steps(run, 1, 2)
    events = sorted(run.tensorboard.iterdir())
    log_steps(run, 1, 0)
    assert read_lines(run) == steps and sorted(run.tensorboard.iterdir()) == events


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_tensorboard_is_told_once_and_nobody_waits(run, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"), Events(run, done=0) as events:
        events.send({"train/loss": 1.0}, 1)
        writer = events._writer.file_writer.event_writer
        while writer._worker.is_alive():
            writer._worker._next_flush_time = 0  # what comes next goes to the disk at once, not in two minutes
            events._writer.add_scalar("train/loss", 1.0, 1)
            writer._worker.join(0.01)
        with pytest.raises(
            MachineError, match=r"tensorboard: cannot be written any more; is its disk full\?"
        ) as refusal:
            events.send(dict.fromkeys(map(str, range(30)), 1.0), 2)
    assert refusal.value  # that none came would be lost in the error of closing
    writer.close()  # as at Python's end


def test_a_loss_that_is_no_number_comes_back_as_such(run):
    log_steps(run, 1, 1, loss=math.nan, grad_norm=math.inf, skipped=True)
    step, line = read_lines(run)[0], (run.logs / "train_steps.jsonl").read_text()
    assert math.isnan(step.loss) and step.grad_norm == math.inf and step.skipped
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_spikes_and_skipped_steps_are_told(run, capsys):
    log_steps(run, 1, 1, loss=7.0, spike=True)
    log_steps(run, 1, 1, loss=7.0, spike=True, skipped=True)
    log_steps(run, 1, 1, loss=math.nan, skipped=True)
    log_steps(run, 1, 1, loss=1.0, grad_norm=523.0, grad_norm_spike=True)
    told = [line for line in capsys.readouterr().err.splitlines() if line.count(":")]
    assert told == [
        "train  step 1/6  loss 7.0000: a spike",
        "train  step 1/6  loss 7.0000: a spike, its update is left out",
        "train  step 1/6  loss nan: NaN or infinite, its update is left out",
        "train  step 1/6  loss 1.0000: gradient norm 523, a spike",
    ]


def test_the_last_line_says_how_fast(run, capsys):
    log_steps(run, 1, 6)
    assert capsys.readouterr().err.splitlines()[-1] == "train  step 6/6  loss 1.5000  1,200 real tokens/s  ETA 0:00:00"
