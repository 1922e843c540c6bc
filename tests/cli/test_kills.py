"""Stages that are killed or suspended, or find the disk full or slow, wherever a file gets its name or reaches the
disk: the same command makes what it makes undisturbed."""

import json
import os
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, find_run, open_run
from support.fault_points import commands, state, wait_until
from support.made import made_once, shared_folder

pytestmark = pytest.mark.slow
PLACES = ("pathlib:Path.replace", "pathlib:Path.rename", "os:fsync")
# What each stage imports, so that a process of it need not. Train has its own tests of kills: here its disk is full.
MODULES = {
    "data": ("gemsmith.data.stage",),
    "train": ("gemsmith.train.jax.backend",),
    "export": ("gemsmith.export.stage", "orbax.checkpoint", "gemsmith.models"),
    "verify": ("gemsmith.verify.stage", "orbax.checkpoint", "gemsmith.models", "peft", "accelerate"),
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


@pytest.fixture(scope="module")
def undisturbed(small_checkpoint, tmp_path_factory):
    """{a stage, or "" before the first: the folder of a run as nothing disturbed it}, made once for all processes."""

    def make(folder):
        values = {
            "checkpoint": str(small_checkpoint),
            "data": {"train": {"task": "verilog", "rows": 8}, "max_length": 256},
            "lora": {"rank": 2, "targets": ["q", "down"]},
            "train": {"max_steps": 2, "global_batch_size": 1},
        }
        open_run(folder / "begun", *resolve(build_recipe(values)))
        for before, stage in pairwise(("begun", *MODULES)):
            shutil.copytree(folder / before, folder / stage)
            with commands(folder, *MODULES[stage]) as gemsmith:
                code, err = gemsmith.run(stage, folder / stage)
            assert code == 0, err

    folder = made_once(shared_folder(tmp_path_factory) / "stages", make)
    return {stage: folder / (stage or "begun") for stage in ("", *MODULES)}


def copy(whole: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(whole, folder)


def assert_same(stage: str, folder: Path, whole: Path, *about: object) -> None:
    if stage == "train":  # its files tell times and folders
        assert weights(folder) == weights(whole), about
    else:
        assert contents(folder) == contents(whole), (stage, *about)


def disturbed(undisturbed, folder, stages, fault, check):
    """Has the fault come at each call of each place, until a stage ends well; returns how often it came.

    What a stage ended with and said is asked of `check`. Each must end with the files of one that was not disturbed.
    """
    tries = 0
    for before, stage in pairwise(undisturbed):
        with commands(folder.parent, *MODULES[stage]) as gemsmith:
            for place in PLACES if stage in stages else ():
                copy(undisturbed[before], folder)
                calls = 0
                while (ended := gemsmith.run(stage, folder, fault=f"{fault} {calls + 1} {place}"))[0]:
                    calls += 1
                    check(*ended)
                    assert calls < 100, f"{stage} {place}: {ended}"
                tries += calls
                assert_same(stage, folder, undisturbed[stage], place)
    return tries


def test_a_stage_that_is_killed_at_each_write_makes_the_same_files_in_the_end(undisturbed, tmp_path, record_property):
    def check(code, err):
        assert code == -signal.SIGKILL, err

    tries = disturbed(undisturbed, tmp_path / "run", {*MODULES} - {"train"}, "KILL", check)
    record_property("tries", tries)
    assert tries > 20


def test_a_disk_that_is_full_from_any_write_on_is_one_line_and_nothing_is_half_written(
    undisturbed, tmp_path, record_property
):
    def check(code, err):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1 and re.search("no space left|disk became full", lines[0].lower()), err
        assert "Traceback" not in err, err
        halves = [file for file in folder.rglob(".*") if file.name != ".lock" and file.parent.name != "checkpoints"]
        assert not halves

    folder = tmp_path / "run"
    tries = disturbed(undisturbed, folder, MODULES, "ENOSPC", check)
    record_property("tries", tries)
    assert tries > 20


def test_a_stage_that_is_suspended_and_continued_makes_the_same_files(undisturbed, tmp_path, record_property):
    stages = [(before, stage) for before, stage in pairwise(undisturbed) if stage != "train"]  # has its own test
    for before, stage in stages:
        folder = copy(undisturbed[before], tmp_path / "run")
        with commands(tmp_path, *MODULES[stage]) as gemsmith:
            number = gemsmith.start(stage, folder, fault="STOP 1 os:fsync")
            wait_until(lambda process=number: state(process) == "T", number)
            os.kill(number, signal.SIGCONT)
            code, err = gemsmith.wait()
        assert code == 0, err
        assert_same(stage, folder, undisturbed[stage])
    record_property("tries", len(stages))


def test_on_a_slow_disk_the_stages_make_the_same_files(undisturbed, tmp_path):
    """Each fsync and rename takes 0.2 s more."""
    slow = ",".join(f"SLOW 200 {place}" for place in PLACES)
    for before, stage in pairwise(undisturbed):
        folder = copy(undisturbed[before], tmp_path / "run")
        with commands(tmp_path, *MODULES[stage]) as gemsmith:
            code, err = gemsmith.run(stage, folder, fault=slow)
        assert code == 0, err
        assert_same(stage, folder, undisturbed[stage])
