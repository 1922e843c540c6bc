"""Stages that are killed wherever a file gets its name or reaches the disk: the same command makes what it makes
undisturbed."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from gemsmith.recipe.load import build_recipe
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, open_run
from support.fault_points import commands

pytestmark = pytest.mark.slow
PLACES = ("pathlib:Path.replace", "pathlib:Path.rename", "os:fsync")
MODULES = {
    "data": "gemsmith.data.stage",
    "train": "gemsmith.train.stage",  # has its own tests: once, undisturbed
    "export": "gemsmith.export.stage",
    "verify": "gemsmith.verify.stage",
}


def contents(folder: Path) -> dict[str, object]:
    """What each file holds, of a record all but where and when it was made; without logs, locks and halves of files."""
    found: dict[str, object] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file() and not name.startswith("logs") and not file.name.startswith("."):
            found[name] = file.read_bytes()
        if file.suffix == ".json" and file.parent == folder:
            found[name] = {key: value for key, value in json.loads(file.read_bytes()).items() if key != "provenance"}
    return found


@pytest.fixture
def run(small_checkpoint, tmp_path) -> Run:
    values = {
        "checkpoint": str(small_checkpoint),
        "data": {"train": {"task": "verilog", "rows": 8}, "max_length": 256},
        "lora": {"rank": 2, "targets": ["q", "down"]},
        "train": {"max_steps": 2, "global_batch_size": 1},
    }
    return open_run(tmp_path / "run", *resolve(build_recipe(values)))


def test_a_stage_that_is_killed_at_each_write_makes_the_same_files_in_the_end(run, tmp_path, record_property):
    tries, whole = 0, tmp_path / "whole"
    shutil.copytree(run.path, whole)
    for stage, module in MODULES.items():
        with commands(tmp_path, module) as gemsmith:
            shutil.copytree(whole, tmp_path / "before")
            code, err = gemsmith.run(stage, whole)
            assert code == 0, err
            for place in PLACES if stage != "train" else ():
                shutil.rmtree(run.path)
                shutil.copytree(tmp_path / "before", run.path)
                calls = 0
                while code := gemsmith.run(stage, run.path, fault=f"KILL {calls + 1} {place}")[0]:
                    calls += 1
                    assert code == -signal.SIGKILL and calls < 100, f"{stage} {place} {calls}: {code}"
                tries += calls
                assert contents(run.path) == contents(whole), f"{stage} {place}"
            shutil.rmtree(tmp_path / "before")
    record_property("tries", tries)
    assert tries > 20
