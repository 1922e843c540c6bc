"""Writes what comes of wrong inputs to benchmarks/records/wrong_inputs.json.

    python benchmarks/wrong_inputs.py [words that a case's name holds]

Those of wrong_inputs.yaml, each in a folder of its own with a tiny checkpoint, rows, a recipe and its run. Ends with an
error unless every command ended with 2 (a check of verify: 1) and a line for each mistake, within 10 s of CPU and 60 s,
and left what was there as it was; report, which shows what there is, may end with 0 and a warning.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gemsmith.runs.run import host_info
from gemsmith.system.version import __version__
from short import RECORDS, SHORT
from sigterm import SMALL
from tiny_checkpoints import make_checkpoint

ROOT = Path(__file__).parent
RECIPE = """\
checkpoint: base
data: {train: rows.jsonl, eval: 5%, max_length: 128}
lora: {rank: 2, alpha: 4}
train: {max_steps: 2, global_batch_size: 2, dtype: float32}
eval: {scorer: exact, max_tokens: 8}
hardware: {machines: [cpu]}
"""
CPU_S, WALL_S = 10, 60
# Imports once, and runs each command line that it reads in a process and a folder of its own.
SERVER = """
import json, os, resource, signal, sys
import gemsmith.data.stage, gemsmith.export.stage, gemsmith.plan.stage, gemsmith.report.page, gemsmith.verify.stage
from gemsmith.cli import main
for line in sys.stdin:
    arguments, folder, cpu_s, wall_s = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        signal.alarm(wall_s)
        for number, name in enumerate((os.devnull, "../stdout", "../stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        main(arguments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Case:
    kind: str
    command: tuple[str, ...]
    what: str = ""
    """What was done to the files."""
    change: Callable[[Path], None] = field(default=lambda _folder: None)

    @property
    def name(self) -> str:
        command = " ".join(self.command)
        return f"{self.kind}: {command if len(command) < 200 else command[:200] + ' …'}{self.what and '; ' + self.what}"


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def damage(name: str, way: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        whole = path.read_bytes()
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "pipe":
            os.mkfifo(path)
        elif way != "gone":
            path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "noise": bytes(range(256)) * 4}[way])

    return change


def replace(name: str, values: dict[str, Any]) -> Callable[[Path], None]:
    def merged(old: Any, new: Any) -> Any:
        if not (isinstance(old, dict) and isinstance(new, dict) and new):
            return new
        return old | {key: merged(old.get(key), value) for key, value in new.items()}

    return lambda folder: write(name, json.dumps(merged(json.loads(Path(folder, name).read_text()), values)))(folder)


def read_cases() -> Iterator[Case]:
    every = yaml.safe_load((ROOT / "wrong_inputs.yaml").read_text(encoding="utf-8"))
    plan = ("plan", "my.yaml")
    for key, values in every["settings"].items():
        verb = ("data", "my.yaml", "--force") if key.startswith(("data.", "eval.")) else plan
        yield from (Case("setting", (*verb, "--set", f"{key}={value}")) for value in values)
    for text in every["recipes"]:
        yield Case("recipe", plan, repr(text)[:200], write("my.yaml", text))
    for name, texts in every["rows"].items():
        command = ("data", "my.yaml", "--force", "--set", f"data.train={name}")
        yield from (Case("rows", command, repr(text)[:200], write(name, text)) for text in texts)
    for one in every["damaged"]:
        words = tuple(shlex.split(one["command"]))
        for name in one["files"]:
            yield from (Case("damage", words, f"{name}: {way}", damage(name, way)) for way in one["ways"])
    for one in every["changed"]:
        for values in one["values"]:
            what = f"{one['file']}: {json.dumps(values)}"
            yield Case("damage", tuple(shlex.split(one["command"])), what, replace(one["file"], values))
    yield from (Case("command", tuple(shlex.split(command))) for command in every["commands"])


def hashes(folder: Path) -> dict[str, str]:
    """Of what a command must leave as it is: inputs, and weights and steps of a run that is complete."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not re.match(
            r"runs/my/(logs|data\b|data\.json|plan\.json|recipe\.yaml|report)", name := str(path.relative_to(folder))
        )
    }


class Workplace:
    """The folder that cases copy, and the process that runs their commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.template = folder, folder / "template"
        make_checkpoint(SMALL, self.template / "base", dtype="float32", shards=2)
        rows = [json.dumps({"prompt": f"What is {number} + 1?", "response": str(number + 1)}) for number in range(60)]
        write("rows.jsonl", "\n".join(rows) + "\n")(self.template)
        write("my.yaml", RECIPE)(self.template)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        command = [sys.executable, "-m", "gemsmith", "run", "my.yaml", "--until", "export"]
        subprocess.run(command, cwd=self.template, env=environment, check=True, capture_output=True)

    def try_one(self, case: Case) -> dict[str, Any]:
        """The case's outcome: told, silent, traceback, hang, unclear, or lost where what was there has changed."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.template, place)
        case.change(place)
        before = hashes(place)
        assert self.server.stdin is not None and self.server.stdout is not None, "asked for"
        print(json.dumps([case.command, str(place), CPU_S, WALL_S]), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        err = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in err.splitlines() if line.strip()]
        last, after = lines[-1] if lines else "", hashes(place)
        if "Traceback" in err:
            outcome = "traceback"
        elif code < 0:
            outcome = "hang"
        elif any(after.get(name) != digest for name, digest in before.items()):
            outcome = "lost"
        elif code == 0:
            outcome = "told" if case.command[:1] == ("report",) and ": warning: " in last else "silent"
        else:
            codes = (1, 2) if case.command[:1] == ("verify",) else (2,)
            errors = [line for line in lines if line.startswith("error: ")]
            alone = len(errors) == len({*errors})  # a line for each mistake
            outcome = "told" if code in codes and alone and last in errors else "unclear"
        return {
            "case": case.name,
            "outcome": outcome,
            "exit_code": code,
            "line": last.replace(str(place), "FOLDER").replace(str(self.template), "TEMPLATE")[:500],
        }


def main(*words: str) -> None:
    cases = [case for case in read_cases() if all(word in case.name for word in words)][:: 8 if SHORT else 1]
    found = []
    with tempfile.TemporaryDirectory(prefix="gemsmith-wrong-") as folder:
        workplace = Workplace(Path(folder))
        for case in cases:
            found.append(workplace.try_one(case))
            if found[-1]["outcome"] != "told":
                print(json.dumps(found[-1], indent=1, ensure_ascii=False), flush=True)
    outcomes = Counter(one["outcome"] for one in found)
    print(f"wrong inputs: {len(found)}; " + ", ".join(f"{name} {count}" for name, count in outcomes.items()))
    if not words:
        result = {"gemsmith": __version__, "machine": host_info().model_dump(), "outcomes": outcomes, "cases": found}
        (RECORDS / "wrong_inputs.json").write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    if outcomes["told"] != len(found):
        sys.exit("error: not every wrong input was told")


if __name__ == "__main__":
    main(*sys.argv[1:])
