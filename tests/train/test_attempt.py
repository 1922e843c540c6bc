import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import CheckpointError, EngineError, RunError
from gemsmith.recipe.schema import Train
from gemsmith.runs.records import TrainStep
from gemsmith.runs.run import Run
from gemsmith.train.resume import Stop, checkpoint_metadata, earlier_steps, refuse_to_go_on, stop_on_signals
from gemsmith.train.schedule import learning_rate
from gemsmith.train.stage import train
from support.cases import each

UPDATES = 20
NAME = "model.language_model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def broken_base(small_checkpoint, tmp_path):
    """A copy of the base with one NaN."""
    folder = tmp_path / "base"
    shutil.copytree(small_checkpoint, folder)
    place = open_checkpoint(str(folder)).places[NAME]
    with place.file.open("r+b") as file:
        file.seek(place.begin + 40)
        file.write(b"\x00\x00\xc0\x7f")
    return folder


def steps(*losses, grad_norm=1.0):
    numbers = {"learning_rate": 0.1, "real_tokens": 3, "step_s": 1.0}
    return [
        TrainStep(step=number, loss=loss, grad_norm=grad_norm, skipped=not math.isfinite(loss), **numbers)
        for number, loss in enumerate(losses, start=1)
    ]


@each("backend", ["tunix", "trl"])
def test_a_base_that_was_replaced_since_its_rows_were_made_is_told_before_a_step(
    prepare, broken_base, tmp_path, backend
):
    run = prepare(tmp_path / backend, train={"backend": backend})
    run = replace(run, recipe=run.recipe.model_copy(update={"checkpoint": str(broken_base)}))
    told = (
        rf"^checkpoint {broken_base}: has changed since its rows were made; put it back, or start again with: gemsmith"
    )
    with pytest.raises(CheckpointError, match=told):
        train(run)
    assert not run.checkpoints.exists() or not checkpoint_steps(run.checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tunix", "trl"])
def test_nan_in_the_base_is_named_and_not_blamed_on_the_learning_rate(prepared_run, broken_base, backend):
    run = prepared_run(train={"backend": backend}, checkpoint=str(broken_base))
    with pytest.raises(CheckpointError) as error:
        train(run)
    place = f"checkpoint {broken_base}: {NAME} in model-00001-of-00001.safetensors"
    expected = f"{place} holds NaN or infinity (1 of 2,048 values), so training stopped at step 1"
    assert str(error.value).startswith(expected)
    assert f"copy the checkpoint again, and run: gemsmith data {run.path} --force" in str(error.value)
    assert "learning_rate" not in str(error.value)


def test_a_loss_that_is_no_number_before_any_update_is_not_blamed_on_the_learning_rate(prepared_run):
    run = prepared_run()
    for losses in ([math.nan], [math.nan] * 10):
        asked = Train(dtype="bfloat16", init_adapter="earlier", on_nonfinite="stop" if len(losses) == 1 else "skip")
        with pytest.raises(EngineError) as error:
            refuse_to_go_on(run, steps(*losses), asked, None)
        ways = (
            "set train.dtype to float32, name another train.init_adapter, or look at the rows with: gemsmith data "
            f"{run.path} --show 3"
        )
        assert str(error.value).endswith(f"there is no checkpoint yet; {ways}")
    with pytest.raises(
        EngineError, match=f"no checkpoint yet; look at the rows with: gemsmith data {run.path} --show 3"
    ):
        refuse_to_go_on(run, steps(1.0, grad_norm=math.inf), Train(dtype="float32"), None)
    with pytest.raises(
        EngineError,
        match=r"checkpoints/1; lower optimizer\.learning_rate, let such steps be skipped, or look at the rows",
    ):
        refuse_to_go_on(run, steps(1.0, math.nan), Train(), 1)


STEPS = """
import hashlib, os, signal, sys, threading, time
from gemsmith.train import resume as attempt
attempt._UNHEARD_S = {unheard_s}
stop = attempt.Stop()
def send(cpu_s, times=1):
    def kill():
        end_s = time.process_time() + cpu_s
        while time.process_time() < end_s:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    threading.Timer(0.3, kill).start()
with attempt.stop_on_signals(stop):
    send(0, times=3)  # as `timeout` does
    assert stop.wait(60) and stop.number == signal.SIGINT
    print("first", flush=True)
    try:
        send({cpu_s})
        {step}
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        print("second", flush=True)
"""


def run_steps(step, *, unheard_s, cpu_s=0.0):
    """The second Ctrl-C comes when the step has begun, or has taken `cpu_s`."""
    command = [sys.executable, "-c", STEPS.format(step=step, unheard_s=unheard_s, cpu_s=cpu_s)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_first_ctrl_c_asks_for_a_save_and_the_second_is_raised_and_no_third():
    ended = run_steps("time.sleep(30)", unheard_s=20)
    assert (ended.returncode, ended.stdout) == (130, "first\nsecond\n")
    assert ended.stderr == "train  stops, and saves the step under way if there is one; Ctrl-C again ends it at once\n"


def test_the_second_ctrl_c_ends_a_step_in_which_python_hears_nothing():
    ended = run_steps("hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)", unheard_s=0.1, cpu_s=0.2)  # ten minutes
    assert (ended.returncode, ended.stdout) == (130, "first\n")
    assert ended.stderr.splitlines()[-1] == (
        "note: stopped by Ctrl-C; the same command resumes from the last saved step"
    )


def test_sigterm_sets_the_stop_however_often_it_comes():
    stop = Stop()
    with stop_on_signals(stop):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
    assert stop.number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def steps_with(optimizer, count: int) -> list[TrainStep]:
    rates = [learning_rate(optimizer, update=number, updates=UPDATES) for number in range(count)]
    return [
        TrainStep(step=number, loss=1.0, grad_norm=1.0, learning_rate=rate, real_tokens=1, step_s=1.0)
        for number, rate in enumerate(rates, start=1)
    ]


@pytest.fixture
def saved(prepared_run):
    """A run with warm-up left open, and what its checkpoint says after so many steps with a warm-up of so many."""
    run = prepared_run(train={"max_steps": UPDATES}, optimizer={"warmup_steps": None})

    def make(warmup: int | None, steps: int):
        optimizer = run.recipe.optimizer.model_copy(update={"warmup_steps": warmup})
        return run, checkpoint_metadata(run, steps_with(optimizer, steps), [], None)

    return make


def with_warmup(run: Run, warmup: int | None) -> Run:
    optimizer = run.recipe.optimizer.model_copy(update={"warmup_steps": warmup})
    return Run(path=run.path, recipe=run.recipe.model_copy(update={"optimizer": optimizer}))


def test_training_goes_on_with_the_schedule_and_the_base_that_it_began_with(saved):
    run, metadata = saved(None, 6)
    assert len(earlier_steps(run, "checkpoints/6", metadata, None)) == 6
    with pytest.raises(RunError, match=r"^checkpoints/6: was trained from other weights than .* has; put those back"):
        earlier_steps(run, "checkpoints/6", metadata | {"base_sha256": "0" * 64}, None)  # the rows were made again
    del metadata["base_sha256"]  # as steps that were saved before it was kept
    assert len(earlier_steps(run, "checkpoints/6", metadata, None)) == 6


def test_open_warmup_may_be_set_to_what_it_came_to_and_to_nothing_else(saved):
    run, metadata = saved(None, 6)
    assert len(earlier_steps(with_warmup(run, 2), "checkpoints/6", metadata, None)) == 6
    with pytest.raises(RunError) as refusal:
        earlier_steps(with_warmup(run, 100), "checkpoints/6", metadata, None)
    assert str(refusal.value) == (
        "checkpoints/6: was trained with another schedule: step 2 had the learning rate 0.005, with a warm-up of 100 "
        f"steps it has 0.0001; set warm-up back, or start again with: gemsmith train {run.path} --force"
    )


def test_a_number_of_steps_cannot_be_exchanged_for_another(saved):
    run, metadata = saved(5, 6)
    metadata["recipe"]["optimizer.warmup_steps"] = 5
    with pytest.raises(RunError, match=r"was trained with another recipe: optimizer\.warmup_steps was 5 and is null"):
        earlier_steps(run, "checkpoints/6", metadata, None)
