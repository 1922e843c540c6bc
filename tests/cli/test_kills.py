"""Stages that are killed or suspended, or find the disk full or slow, wherever a file gets its name or reaches the
disk: the same command makes what it makes undisturbed."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, find_run, open_run
from support.fault_points import commands, state, wait_until

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


def weights(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    pairs = read_run_adapter(Run(path=folder, recipe=find_run(folder)), 2).modules
    return {name: (pair.a.tobytes(), pair.b.tobytes()) for name, pair in pairs.items()}


@pytest.fixture
def run(small_checkpoint, tmp_path) -> Run:
    values = {
        "checkpoint": str(small_checkpoint),
        "data": {"train": {"task": "verilog", "rows": 8}, "max_length": 256},
        "lora": {"rank": 2, "targets": ["q", "down"]},
        "train": {"max_steps": 2, "global_batch_size": 1},
    }
    return open_run(tmp_path / "run", *resolve(build_recipe(values)))


def disturbed(run, tmp_path, stages, fault, check):
    """Has the fault come at each call of each place, until a stage ends well; returns how often it came.

    What a stage ended with and said is asked of `check`. Each must end with the files of one that was not disturbed.
    """
    tries, whole = 0, tmp_path / "whole"
    shutil.copytree(run.path, whole)
    for stage, module in MODULES.items():
        with commands(tmp_path, module) as gemsmith:
            shutil.copytree(whole, tmp_path / "before")
            code, err = gemsmith.run(stage, whole)
            assert code == 0, err
            for place in PLACES if stage in stages else ():
                shutil.rmtree(run.path)
                shutil.copytree(tmp_path / "before", run.path)
                calls = 0
                while (ended := gemsmith.run(stage, run.path, fault=f"{fault} {calls + 1} {place}"))[0]:
                    calls += 1
                    check(*ended)
                    assert calls < 100, f"{stage} {place}: {ended}"
                tries += calls
                if stage == "train":  # its files tell times and folders
                    assert weights(run.path) == weights(whole), place
                else:
                    assert contents(run.path) == contents(whole), f"{stage} {place}"
            shutil.rmtree(tmp_path / "before")
    return tries


def test_a_stage_that_is_killed_at_each_write_makes_the_same_files_in_the_end(run, tmp_path, record_property):
    def check(code, err):
        assert code == -signal.SIGKILL, err

    tries = disturbed(run, tmp_path, {*MODULES} - {"train"}, "KILL", check)
    record_property("tries", tries)
    assert tries > 20


def test_a_disk_that_is_full_from_any_write_on_is_one_line_and_nothing_is_half_written(run, tmp_path, record_property):
    def check(code, err):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1 and re.search("no space left|disk became full", lines[0].lower()), err
        assert "Traceback" not in err, err
        assert not [file for file in run.path.rglob(".*") if file.name != ".lock" and file.parent != run.checkpoints]

    tries = disturbed(run, tmp_path, MODULES, "ENOSPC", check)
    record_property("tries", tries)
    assert tries > 20


def test_a_stage_that_is_suspended_and_continued_makes_the_same_files(run, tmp_path, record_property):
    whole = tmp_path / "whole"
    shutil.copytree(run.path, whole)
    for stage, module in MODULES.items():
        with commands(tmp_path, module) as gemsmith:
            shutil.rmtree(run.path)
            shutil.copytree(whole, run.path)
            code, err = gemsmith.run(stage, whole)
            assert code == 0, err
            if stage == "train":  # has its own test
                continue
            number = gemsmith.start(stage, run.path, fault="STOP 1 os:fsync")
            wait_until(lambda process=number: state(process) == "T", number)
            os.kill(number, signal.SIGCONT)
            code, err = gemsmith.wait()
            assert code == 0, err
            assert contents(run.path) == contents(whole), stage
    record_property("tries", len(MODULES) - 1)


def test_on_a_slow_disk_the_stages_make_the_same_files(run, tmp_path):
    """Each fsync and rename takes 0.2 s more."""
    whole, slow = tmp_path / "whole", ",".join(f"SLOW 200 {place}" for place in PLACES)
    shutil.copytree(run.path, whole)
    for stage, module in MODULES.items():
        with commands(tmp_path, module) as gemsmith:
            for folder, fault in ((whole, ""), (run.path, slow)):
                code, err = gemsmith.run(stage, folder, fault=fault)
                assert code == 0, err
        if stage == "train":  # its files tell times and folders
            assert weights(run.path) == weights(whole)
            shutil.rmtree(run.path)
            shutil.copytree(whole, run.path)
        else:
            assert contents(run.path) == contents(whole), stage
