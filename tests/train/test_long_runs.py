"""A training of many steps with evaluations and saves: what it holds of the machine does not grow with the steps."""

import os
import statistics
import subprocess
import sys

import pytest

# Trains, and prints after each step its number, open files, threads, bytes in memory and in logs, and seconds of CPU.
WATCHED = """
import os, sys, time
from pathlib import Path
from gemsmith.runs.run import Run, find_run
from gemsmith.train.stage import train
from gemsmith.train.loop import TrainSession
path = Path(sys.argv[1])
run, finish = Run(path=path, recipe=find_run(path)), TrainSession.finish
def finished(self, outcome):
    finish(self, outcome)
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    logs = sum(file.stat().st_size for folder in (run.logs, run.tensorboard) for file in folder.iterdir())
    print("STEP", outcome.plan.step, files, threads, held, logs, time.process_time(), flush=True)
TrainSession.finish = finished
train(run)
"""
STEPS = int(os.environ.get("LONG_RUN_STEPS", "600"))
EVERY = max(10, STEPS // 100)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tunix", "trl"])
def test_many_steps_open_no_more_files_and_threads_and_hold_no_more_memory(prepare, tmp_path, backend, record_property):
    keys = {"max_steps": STEPS, "save_steps": EVERY, "eval_steps": EVERY, "backend": backend}
    held_out = {"task": "verilog", "rows": 2, "split": "held-out"}
    run = prepare(tmp_path / "run", train=keys, data={"eval": held_out}, lora={"targets": ["q", "down"]})
    command = [sys.executable, "-W", "ignore", "-c", WATCHED, str(run.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    steps = [[*map(float, line.split()[1:])] for line in done.stdout.splitlines() if line.startswith("STEP")]
    assert done.returncode == 0 and len(steps) == STEPS, done.stderr[-2000:]
    # The first third warms up; a save in the background opens some twenty files for a step or two.
    middle, end = steps[STEPS // 3 : 2 * STEPS // 3], steps[2 * STEPS // 3 :]
    for place, what in ((1, "files"), (2, "threads")):
        usual, later = (statistics.median(step[place] for step in part) for part in (middle, end))
        assert later <= usual + 2, f"{what}: {usual}, then {later}"
    most, later = (max(step[3] for step in part) for part in (middle, end))
    assert later < 1.1 * most, f"memory: {most:,}, then {later:,}"
    for place, what, allowed in ((4, "bytes of logs", 1.2), (5, "seconds of CPU", 1.5)):
        each, later = ((part[-1][place] - part[0][place]) / len(part) for part in (middle, end))
        assert later < allowed * each, f"{what} a step: {each}, then {later}"
        print(f"{what} a step: {each:.4g}, then {later:.4g}")
    print(
        "most files, threads, bytes", *([*map(int, map(max, zip(*part, strict=True)))][1:4] for part in (middle, end))
    )
    record_property("tries", STEPS)
