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

from gemsmith.launch.sync import complete_checkpoints
from gemsmith.serve.settings import engine_python
from gemsmith.system.files import sha256_file
from gemsmith.system.storage import Bucket
from support.made import made_once, shared_folder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STAGES = "plan,data,train,export"
KILLS = 2
EXTRA = "train: {max_steps: 12, global_batch_size: 2, save_steps: 1, dtype: float32}\n"
RUNNER = """
import sys
import gemsmith.launch.sync as mirror
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


@pytest.fixture
def calm_adapter(launched, tmp_path_factory) -> str:
    """The checksum of the adapter of a run that nobody disturbed, made once for all tests."""

    def make(folder: Path) -> None:
        root = launched("calm")
        finish(machine(root, 0))
        folder.mkdir()
        (folder / "sha256").write_text(adapter_of(root))

    return (made_once(shared_folder(tmp_path_factory) / "calm", make) / "sha256").read_text()


# Waits before step sys.argv[1] until the file `goes_on` is there. What nohup starts ignores SIGHUP, as do its children.
WAITING = """
import signal, sys, time
from pathlib import Path
from gemsmith.data.batches import Batches
signal.signal(signal.SIGHUP, signal.SIG_DFL)
here, wanted, batch = Path.cwd(), int(sys.argv.pop(1)), Batches.batch
def waiting(self, step, rows):
    while step == wanted and not (here / "goes_on").exists():
        (here / "waits").touch()
        time.sleep(0.05)
    return batch(self, step, rows)
Batches.batch = waiting
"""


def machine(root: str, attempt: int, *, waits_at: int | None = None) -> subprocess.Popen:
    """A new machine: nothing is on its disk."""
    shutil.rmtree("work", ignore_errors=True)
    words = ["launch", "worker", root, "--folder", "work", "--stages", STAGES]
    command = [sys.executable, "-c", RUNNER, *words]
    if waits_at is not None:
        command = [sys.executable, "-c", WAITING + RUNNER, str(waits_at), *words]
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
    short = os.environ | {"GEMSMITH_BENCH_SHORT": str(tmp_path)}
    subprocess.run([sys.executable, str(script), "2", "--record", str(record)], check=True, env=short)
    found = json.loads(record.read_text())
    assert found["kills"] == 2 and found["all_adapters_the_same"] and sum(found["faults"].values()) > 20


NAMES = {"a red one": (200, 30, 30), "a blue one": (30, 30, 200)}


def write_images(folder: Path) -> None:
    """Rows that name images beside them, 48 to train on and 4 to score."""
    for part, count in (("train", 48), ("held_out", 4)):
        rows = []
        for number in range(count):
            name, color = [*NAMES.items()][number % 2]
            file = folder / "images" / part / f"{number}.ppm"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"P6 28 28 255\n" + bytes((*color[:2], (color[2] + number) % 256)) * 28 * 28)
            answers = {"response": name, "labels": [*NAMES]}
            rows.append({"image": str(file.relative_to(folder)), "prompt": "Which is it?"} | answers)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_launch_with_images_that_loses_its_machine_trains_on_the_rows_of_here_and_comes_home(tmp_path, gemsmith):
    write_images(tmp_path / "rows")
    rows = {part: tmp_path / "rows" / f"{name}.jsonl" for part, name in (("train", "train"), ("eval", "held_out"))}
    keys = [*(f"data.{part}={file}" for part, file in rows.items()), "data.format=auto", "data.prompt=null"]
    keys += [
        "train.max_steps=32",
        "train.global_batch_size=4",
        "train.save_steps=4",
        f"checkpoint={ROOT / 'recipes' / 'demo_images_base'}",
    ]
    changes = [word for key in keys for word in ("--set", key)]
    recipe, stages = ROOT / "recipes" / "demo_images.yaml", "plan,data,train,export"
    stages += ",verify,eval" if engine_python().exists() else ""
    options = ("--folder", str(tmp_path / "demo"), "--stages", stages, "--recipe", str(recipe), "--", *changes)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo_launch.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "the run is home in" in done.stdout, done.stdout + done.stderr
    assert "uploads 48 images (114\u00a0kB) that data.train names" in done.stderr
    assert gemsmith("data", str(recipe), "--run", str(tmp_path / "here"), *changes)[0] == 0
    home = tmp_path / "demo" / "runs" / "demo-images"
    here, there = (json.loads((run / "data.json").read_text()) for run in (tmp_path / "here", home))
    assert here["rows_sha256"] == there["rows_sha256"] and here["images"] == there["images"] == 48
    # The recipe's own hash has the path of the rows in it.
    sources = [{**record["provenance"]["inputs_sha256"], "recipe": ""} for record in (here, there)]
    assert sources[0] == sources[1] and len(sources[0]) == 5
    if "eval" in stages:
        assert json.loads((home / "eval.json").read_text())


def test_the_kept_record_says_that_no_byte_changed():
    found = json.loads((ROOT / "benchmarks" / "records" / "launch_drill.json").read_text())
    assert found["kills"] == 20 == len(found["each_kill"]) and found["all_adapters_the_same"]
    assert sum(found["faults"].values()) > 0.15 * found["requests"]


@pytest.mark.timeout(900)
def test_a_run_whose_machines_die_ends_as_one_that_nobody_disturbed(launched, calm_adapter):
    """By SIGKILL, and by SIGTERM with the seconds that Cloud Run gives after it."""
    disturbed = launched("disturbed")
    moment, killed = random.Random(7), 0
    bucket, attempt = Bucket(disturbed), 0
    while killed < KILLS and "run/train.json" not in bucket.names("run/"):
        steps, process = len(complete_checkpoints(bucket)), machine(disturbed, attempt)
        attempt += 1
        # Killed at some moment after another step has begun to arrive.
        while process.poll() is None and len(bucket.names("checkpoints/")) <= steps:
            time.sleep(0.02)
        time.sleep(moment.uniform(0, 1.5))
        if process.poll() is None:
            process.send_signal((signal.SIGKILL, signal.SIGTERM)[killed % 2])
            killed += 1
        process.communicate(timeout=120)
    err = finish(machine(disturbed, attempt))
    assert killed == KILLS and f"attempt {attempt}: complete in the bucket: data, plan" in err
    assert adapter_of(disturbed) == calm_adapter


@pytest.mark.timeout(600)
def test_a_machine_that_is_told_to_stop_sends_the_step_under_way_and_another_goes_on(launched, calm_adapter):
    """SIGTERM as a provider sends it to the worker, and SIGHUP as it comes where it was started by hand."""
    stopped = launched("stopped")
    asked, saved = {4: signal.SIGTERM, 8: signal.SIGHUP}, []
    for attempt, (step, number) in enumerate(asked.items()):
        process, deadline_s = machine(stopped, attempt, waits_at=step), time.monotonic() + 240
        while not Path("waits").exists():
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(number)
        Path("goes_on").touch()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 143 and "note: " in err and "Traceback" not in err, err
        saved.append(max(complete_checkpoints(Bucket(stopped))))
        Path("waits").unlink()
        Path("goes_on").unlink()
    err = finish(machine(stopped, len(asked)))
    assert saved[0] >= 3 and saved[1] >= 7, saved
    record = json.loads(Bucket(stopped).read("run/train.json") or b"")
    assert record["resumed_at"] == saved and adapter_of(stopped) == calm_adapter
