"""One of several processes: what it says, and when it ends."""

import contextlib
import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from gemsmith.train.torch import worker as trl_worker
from gemsmith.train.torch.trainer import TrlTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


TRAIN = {"backend": "trl", "global_batch_size": 4, "max_steps": None, "gradient_accumulation_steps": 2}


@pytest.mark.slow
def test_a_process_says_why_it_failed_once(prepare, tmp_path, monkeypatch, capsys):
    compute_loss = TrlTrainer.compute_loss

    def poisoned(self, model, inputs, **options):
        return compute_loss(self, model, inputs, **options) * (np.nan if self.done + self.state.global_step == 1 else 1)

    monkeypatch.setattr(TrlTrainer, "compute_loss", poisoned)
    run = prepare(tmp_path / "run", train=TRAIN)
    for rank, expected in (("0", "error: training stopped: step 2 has loss"), ("1", "")):
        monkeypatch.setattr(sys, "argv", ["worker", str(run.path)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(run.recipe.model_dump_json()))
        with monkeypatch.context() as patch:
            patch.setenv("RANK", rank)
            patch.delenv("WORLD_SIZE", raising=False)
            assert trl_worker.main() == 1
        said = capsys.readouterr()
        lines = [line for line in said.err.splitlines() if line.startswith("error")]
        assert "".join(lines).startswith(expected) and bool(lines) == bool(expected)
        assert ("error: training stopped: step 2 has loss" in said.out) == (rank == "1")  # for whoever started it


LAUNCHER = """
import os, subprocess, sys, time
from gemsmith.train.torch.distributed import LAUNCHER
code = (
    "import time; from gemsmith.train.torch import worker; worker._end_with_launcher(); print(flush=True); "
    "time.sleep(300)"
)
environment = os.environ | {LAUNCHER: str(os.getpid() + int(sys.argv[1]))}
worker = subprocess.Popen([sys.executable, "-c", code], env=environment)
print(worker.pid, flush=True)
print(worker.wait(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not hear of its parent's death")
def test_a_process_ends_with_the_one_that_started_it_also_where_that_is_killed():
    """It must not go on to save: with its launcher, the lock of the run directory is gone."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, "0"], stdout=subprocess.PIPE, text=True) as launcher:
        worker = int(launcher.stdout.readline())
        assert launcher.stdout.readline() == "\n"
        launcher.kill()
        try:
            assert launcher.communicate(timeout=60)[0] == "", "the worker closes it too, by its end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, "1"], stdout=subprocess.PIPE, text=True) as another:
        assert another.stdout.read().split()[1:] == ["1"]
