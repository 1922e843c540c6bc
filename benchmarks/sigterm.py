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
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemsmith.export.adapters import read_run_adapter
from gemsmith.provenance import start_clock, this_machine
from gemsmith.run import Run, find_run
from gemsmith.testing.tiny import make_checkpoint
from gemsmith.version import __version__
from gemsmith.zoo import find_variant

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "records" / "sigterm.json"
SEED, STEPS, LINE = 29, 12, "note: stopped by SIGTERM"
RECIPE = """\
checkpoint: {folder}/base
data: {{train: {{task: verilog, rows: 24}}, eval: {{task: verilog, rows: 3, split: held-out}}, max_length: 256}}
lora: {{rank: 4, alpha: 8, dropout: 0.1}}
train: {{backend: {backend}, optimizer_steps: 12, rows_per_step: 2, checkpoint_every: 3, dtype: float32}}
bench: {{input_tokens: [16], output_tokens: 16, request_rates: [20], prompts: 12}}
eval: {{scorer: verilog-exact, max_tokens: 16}}
hardware: {{machines: [cpu]}}
"""
# Each time FUNCTION is called for the Nth time, SIGTERM comes so many seconds later, from another process: at the
# interpreter's end no thread of this one would send it.
AT = """
import atexit, functools, importlib, os, subprocess, sys
_, place, number, delay_s, *arguments = sys.argv
def send():
    subprocess.Popen(["sh", "-c", f"sleep {delay_s}; kill -TERM {os.getpid()}"], stderr=subprocess.DEVNULL)
    with open(os.environ["SENT"], "w"):
        pass
if place == "atexit":
    atexit.register(send)
else:
    module, _, names = place.partition(":")
    *owner, name = names.split(".")
    of = functools.reduce(getattr, owner, importlib.import_module(module))
    function, calls = getattr(of, name), []
    @functools.wraps(function)
    def called(*given, **options):
        calls.append(1)
        if len(calls) == int(number):
            send()
        return function(*given, **options)
    setattr(of, name, called)
from gemsmith.cli import main
main(arguments)
"""


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
TRAIN, TUNIX, TRL, EXPORT = "gemsmith.train", "gemsmith.train.tunix", "gemsmith.train.trl", "gemsmith.export"
MOMENTS = (
    Moment("train", "any", 5),
    Moment("train", "any, resuming", 3, resumes=True),
    Moment("train", "the base loads", 2, f"{TUNIX}.backend:load_model", 0.5),
    Moment("train", "Orbax restores", 4, f"{TUNIX}.checkpoints:_restore", 0.2, resumes=True),
    Moment("train", "the step compiles", 2, f"{TUNIX}.backend:compile_step", 1.0),
    Moment("train", "a step runs", 2, f"{TRAIN}.session:Session.finish", 0.05, 2),
    Moment("train", "a step is saved", 2, f"{TUNIX}.checkpoints:seal", 0.1),
    Moment("train", "the record is written", 2, f"{TRAIN}.session:write_record", 0.02),
    Moment("train", END[0], 3, *END[1:]),
    Moment("train", "any", 2, backend="trl"),
    Moment("train", "the model is made", 1, f"{TRL}.backend:adapted_model", 1.0, backend="trl"),
    Moment(
        "train", "a saved step is read", 1, f"{TRL}.checkpoints:Checkpoints.read", 0.02, backend="trl", resumes=True
    ),
    Moment("train", "a step runs", 1, f"{TRAIN}.session:Session.finish", 0.05, 2, backend="trl"),
    Moment("train", "a step is saved", 1, f"{TRL}.checkpoints:Checkpoints.save", 0.02, backend="trl"),
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
        make_checkpoint(find_variant("tiny-31b"), folder / "base", dtype="float32")
        python = folder / "serve-python"
        stand_in = (ROOT / "tests" / "serve" / "fake_vllm.py").read_text(encoding="utf-8")
        python.write_text(f"#!{sys.executable} -I\n{stand_in}", encoding="utf-8")
        python.chmod(0o755)
        golden = ROOT / "tests" / "bench" / "golden" / "vllm_bench_serve_0.32.json"
        told = {"results": [json.loads(golden.read_text(encoding="utf-8"))] * 6}
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "GEMSMITH_SERVE_PYTHON": str(python),
            "FAKE_VLLM": json.dumps(told),
            "SENT": str(folder / "sent"),
        }

    def start(self, command: Sequence[str], *, at: Sequence[str] = ()) -> subprocess.Popen[str]:
        program = ["-c", AT, *at] if at else ["-m", "gemsmith"]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *program, *command],
            env=self.environment, cwd=self.folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish(self, command: Sequence[str]) -> float:
        """The seconds that a command takes that nothing stops."""
        begun_s, process = time.monotonic(), self.start(command)
        _, err = process.communicate(timeout=900)
        if process.returncode:
            sys.exit(f"{err[-3000:]}\nerror: a command that nobody stopped, {command}, ended with {process.returncode}")
        return time.monotonic() - begun_s

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
            seen = self.start(["train", str(path)], at=[f"{TRAIN}.session:Session.finish", "5", "0"])
            _, err = seen.communicate(timeout=900)
            assert seen.returncode == 143, err
        else:
            self.finish(["data", str(recipe), "--run", str(path)])
        return path

    def whole(self, moment: Moment) -> Path:
        """The run directory after the verb."""
        path = self.folder / f"{moment.verb}-{moment.backend}-{moment.resumes}-whole"
        if not path.exists():
            shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), path)
            if moment.verb == "train":  # so that the next finds its step compiled, as the tries do
                self.finish([moment.verb, str(path)])
                shutil.rmtree(path)
                shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), path)
            self.calm_s[path.name] = self.finish([moment.verb, str(path)])
            self.wholes[path.name] = digests(path)
        return path

    def try_at(self, moment: Moment, draw: random.Random) -> dict[str, Any]:
        whole, run, sent = self.whole(moment), self.folder / "tried", self.folder / "sent"
        shutil.rmtree(run, ignore_errors=True)
        sent.unlink(missing_ok=True)
        shutil.copytree(self.template(moment.verb, moment.backend, resumes=moment.resumes), run)
        command = [moment.verb, str(run)]
        if moment.place:
            after_s = draw.uniform(0, moment.within_s)
            process = self.start(command, at=[moment.place, str(moment.call), f"{after_s:.3f}"])
            _, err = process.communicate(timeout=900)
            assert sent.exists(), f"{moment.place} was not called"
        else:
            after_s = draw.uniform(0, self.calm_s[whole.name])
            process = self.start(command)
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.terminate()
            _, err = process.communicate(timeout=900)
        outcome = judge(process.returncode, err, complete=(run / f"{moment.verb}.json").exists())
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


def digests(path: Path) -> dict[str, str]:
    """Of the last saved step's adapter, and of every file that export writes."""
    run = Run(path=path, recipe=find_run(path))
    pairs = read_run_adapter(run, STEPS).modules
    found = {name: hashlib.sha256(pair.a.tobytes() + pair.b.tobytes()).hexdigest() for name, pair in pairs.items()}
    for file in (*run.path.glob("adapter/*"), *run.path.glob("merged/*")):
        found[f"{file.parent.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def main() -> None:
    arguments = sys.argv[1:]
    file = Path(arguments[arguments.index("--record") + 1]) if "--record" in arguments else RECORD
    share = float(arguments[0]) if arguments and not arguments[0].startswith("-") else 1.0
    clock, draw, tries = start_clock(), random.Random(SEED), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        place = Workplace(Path(temporary))
        for moment in MOMENTS:
            for _ in range(round(moment.tries * share)):
                tries.append(place.try_at(moment, draw))
                print(json.dumps(tries[-1]), flush=True)
    bad = [one for one in tries if one["outcome"].startswith("wrong") or not one["same_bytes_after"]]
    record = {
        "schema_version": 1,
        "when": clock.started,
        "duration_s": round(clock.elapsed_s(), 1),
        "gemsmith": __version__,
        "machine": this_machine().model_dump(),
        "model": "tiny-31b in float32",
        "tries": len(tries),
        "outcomes": dict(Counter(one["outcome"] for one in tries)),
        "all_as_promised": not bad,
        "each_try": tries,
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("tries", "outcomes", "all_as_promised")}))
    if bad:
        sys.exit(f"error: {len(bad)} of {len(tries)} ended otherwise: {bad}")


if __name__ == "__main__":
    main()
