"""Machines that die at any moment, and a bucket: the run ends as one that nobody disturbed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemsmith.files import sha256_file
from gemsmith.bucket import Bucket
from gemsmith.launch.mirror import whole_steps

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STAGES = "plan,data,train,export"
KILLS = 2
EXTRA = "train: {optimizer_steps: 12, rows_per_step: 2, checkpoint_every: 1, dtype: float32}\n"
RUNNER = """
import sys
import gemsmith.launch.mirror as mirror
mirror._BETWEEN_LOOKS_S = 0.05
from gemsmith.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def launched(recipe, tmp_path):
    def make(name: str) -> str:
        store = tmp_path / name / "launched"
        store.mkdir(parents=True)
        (store / "recipe.yaml").write_text(recipe.read_text() + EXTRA)
        return f"file://{store.parent}"

    return make


def machine(root: str, attempt: int) -> subprocess.Popen:
    """A new machine: nothing is on its disk."""
    shutil.rmtree("work", ignore_errors=True)
    command = [sys.executable, "-c", RUNNER, "launch", "here", root, "--folder", "work", "--stages", STAGES]
    environment = os.environ | {"CLOUD_RUN_TASK_ATTEMPT": str(attempt), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen) -> str:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


def adapter_of(root: str) -> str:
    return sha256_file(Path(root.removeprefix("file://")) / "run" / "adapter" / "adapter_model.safetensors")


@pytest.mark.timeout(900)
def test_machines_that_die_and_a_bucket_that_fails_change_no_byte(tmp_path):
    script, record = ROOT / "benchmarks" / "launch_drill.py", tmp_path / "drill.json"
    subprocess.run([sys.executable, str(script), "2", "--record", str(record)], check=True)
    found = json.loads(record.read_text())
    assert found["kills"] == 2 and found["all_adapters_the_same"] and sum(found["faults"].values()) > 20


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_launch_that_loses_its_machine_comes_home(tmp_path):
    script = ROOT / "scripts" / "demo_launch.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "demo"), "plan,data,train,export"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "the run is home in" in done.stdout, done.stdout + done.stderr


def test_the_kept_record_says_that_no_byte_changed():
    found = json.loads((ROOT / "benchmarks" / "records" / "launch_drill.json").read_text())
    assert found["kills"] == 20 == len(found["each_kill"]) and found["all_adapters_the_same"]
    assert sum(found["faults"].values()) > 0.15 * found["requests"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_whose_machines_die_ends_as_one_that_nobody_disturbed(launched, number):
    calm, disturbed = launched("calm"), launched("disturbed")
    finish(machine(calm, 0))
    moment, killed = random.Random(7), 0
    bucket, attempt = Bucket(disturbed), 0
    while killed < KILLS and "run/train.json" not in bucket.names("run/"):
        steps, process = len(whole_steps(bucket)), machine(disturbed, attempt)
        attempt += 1
        # Killed at some moment after another step has begun to arrive.
        while process.poll() is None and len(bucket.names("checkpoints/")) <= steps:
            time.sleep(0.02)
        time.sleep(moment.uniform(0, 1.5))
        if process.poll() is None:
            process.send_signal(number)
            killed += 1
        process.communicate(timeout=120)
    err = finish(machine(disturbed, attempt))
    assert killed and f"attempt {attempt}: complete in the bucket: data, plan" in err
    assert adapter_of(disturbed) == adapter_of(calm)
