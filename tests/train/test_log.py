import json

import pytest

from gemsmith.errors import RunError
from gemsmith.records import TrainStep
from gemsmith.run import Run
from gemsmith.train.log import StepLog, read_resumes, read_steps


@pytest.fixture
def run(tmp_path, small_recipe):
    return Run(path=tmp_path, recipe=small_recipe())


def make_step(number, loss=1.5):
    return TrainStep(step=number, loss=loss, grad_norm=0.5, learning_rate=1e-4, real_tokens=300, step_s=0.25)


def log_steps(run, first, last, *, done=0, loss=1.5):
    with StepLog(run, steps=6, done=done) as log:
        for number in range(first, last + 1):
            log.add(make_step(number, loss))


def test_steps_come_back_as_they_were_written(run, capsys):
    log_steps(run, 1, 3)
    assert read_steps(run) == [make_step(number) for number in (1, 2, 3)]
    assert read_resumes(run) == []
    lines = capsys.readouterr()
    assert lines.out == "" and lines.err.splitlines() == ["train  step 1/6  loss 1.5000"]


def test_a_continued_log_drops_the_steps_that_are_done_again(run):
    log_steps(run, 1, 5)
    with (run.logs / "train_steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    log_steps(run, 4, 6, done=3, loss=9.0)
    assert [step.loss for step in read_steps(run)] == [1.5, 1.5, 1.5, 9.0, 9.0, 9.0]
    assert read_resumes(run) == [3]
    for line in (run.logs / "train_steps.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == {"step", "loss", "grad_norm", "learning_rate", "real_tokens", "step_s"}


def test_a_log_that_starts_again_forgets_the_earlier_attempts(run):
    log_steps(run, 1, 5)
    log_steps(run, 4, 4, done=3)
    log_steps(run, 1, 1)
    assert len(read_steps(run)) == 1 and read_resumes(run) == []


def test_a_log_that_lacks_finished_steps_is_an_error(run):
    log_steps(run, 1, 2)
    with pytest.raises(RunError, match="lacks steps before 3"):
        StepLog(run, steps=6, done=3)


def test_the_last_line_says_how_fast(run, capsys):
    log_steps(run, 1, 6)
    assert capsys.readouterr().err.splitlines()[-1] == "train  step 6/6  loss 1.5000  1,200 real tokens/s  ETA 0:00:00"
