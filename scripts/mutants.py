"""Changes one operator, constant or branch of a core file at a time and sees whether a quick test fails.

    python scripts/mutants.py [--count 40] [--seed 1] [--record FILE]

Each mutant is written into a copy of the tree. Its room's tests run there until the first that fails, those that name
the module before the others, then the tests of other rooms that name it. That test must pass without the mutant. What
became of each goes to benchmarks/records/mutants.json; a survivor is a test that is missing, or no change at all.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemsmith.runs.run import host_info, start_clock
from gemsmith.system.version import __version__

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "mutants.json"
SOURCE = "src/gemsmith"
CORE = """
analysis/confounders analysis/cost analysis/ratios arch/lora_targets bench/metrics bench/requests checkpoints/peft
checkpoints/safetensors data/batches data/dedup data/encode data/packing data/tokenize evals/labels evals/metrics
evals/predict export/merge export/tunix hardware/model/memory hardware/model/serving hardware/model/step_time
hardware/model/work images/patches models/attention models/loss models/moe plan/cost plan/fix plan/mesh plan/serving
runs/checksums runs/resolve tasks/json_fields tasks/regex train/jax/step train/loss_checks train/resume train/schedule
""".split()
MOST_S = 900
"""A test that runs so long is in a loop without end."""
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """The bytes from `begin` to `end` of a file become others."""

    file: str
    line: int
    was: str
    became: str
    begin: int
    end: int

    def write(self, tree: Path) -> None:
        text = (ROOT / self.file).read_bytes()
        (tree / self.file).write_bytes(text[: self.begin] + self.became.encode() + text[self.end :])


def find_mutants(file: str) -> Iterator[Mutant]:
    """Every one of a file, in the order of its syntax tree."""
    text = (ROOT / file).read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]

    def place(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(node: Any, begin: int, end: int, became: str) -> Mutant:
        was = text[begin:end].decode()
        return Mutant(file=file, line=node.lineno, was=was, became=became, begin=begin, end=end)

    def between(node: Any, left: Any, right: Any, operator: Any) -> Iterator[Mutant]:
        begin, end = place(left)[1], place(right)[0]
        if found := re.search(rb"<=|>=|==|!=|//|not\s+in|is\s+not|[-+*/%<>]|\b(in|is|and|or)\b", text[begin:end]):
            yield mutant(node, begin + found.start(), begin + found.end(), SWAPPED[type(operator)])

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare():
                for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators):  # noqa: B905
                    yield from between(node, left, right, operator)
            case ast.BinOp() if type(node.op) in SWAPPED:
                yield from between(node, node.left, node.right, node.op)
            case ast.BoolOp():
                yield from between(node, node.values[0], node.values[1], node.op)
            case ast.UnaryOp(op=ast.Not()):
                yield mutant(node, place(node)[0], place(node)[0] + len("not"), "")
            case ast.If() | ast.IfExp():
                begin, end = place(node.test)
                yield mutant(node.test, begin, end, f"(not ({text[begin:end].decode()}))")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield mutant(node, *place(node), str(value + 1))


def tests_of(file: str) -> list[str]:
    """The paths for pytest: those that name the module, its room, those elsewhere that name it."""
    room = Path("tests") / Path(file).parent.relative_to(SOURCE)
    name = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    words = re.compile(rf"\b{re.escape(name)}\b|from {re.escape(name.rpartition('.')[0])} import .*{Path(file).stem}\b")
    found = [
        test.relative_to(ROOT) for test in sorted((ROOT / "tests").rglob("test_*.py")) if words.search(test.read_text())
    ]
    inside = [str(test) for test in found if room in test.parents]
    return [*inside, str(room), *(str(test) for test in found if str(test) not in inside)]


def first_failure(tree: Path, tests: list[str]) -> str:
    """The node id of the first quick test that fails; "" where none does."""
    options = ["-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", f"--basetemp={tree / 'made'}"]
    command = [sys.executable, "-m", "pytest", *options, "-m", "not (slow or vllm or install)", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"none in {MOST_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE)  # some have spaces
    return failed[1] if failed else "" if process.returncode == 0 else f"pytest ended with {process.returncode}"


def try_mutant(tree: Path, mutant: Mutant) -> dict[str, Any]:
    begin_s = time.monotonic()
    mutant.write(tree)
    killed_by = first_failure(tree, tests_of(mutant.file))
    shutil.copyfile(ROOT / mutant.file, tree / mutant.file)
    if "::" in killed_by and first_failure(tree, [killed_by]):
        sys.exit(f"error: {killed_by} fails without the mutant, too; mend it first")
    told = {name: value for name, value in asdict(mutant).items() if name not in ("begin", "end")}
    return told | {"killed_by": killed_by or None, "seconds": round(time.monotonic() - begin_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, default=RECORD)
    given, clock = parser.parse_args(), start_clock()
    every = [mutant for name in CORE for mutant in find_mutants(f"{SOURCE}/{name}.py")]
    tried: list[dict[str, Any]] = []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, listed):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder) / name)
        for mutant in random.Random(given.seed).sample(every, given.count):
            tried.append(try_mutant(Path(folder), mutant))
            print(json.dumps(tried[-1]), flush=True)
            record = {
                "schema_version": 1,
                "when": clock.started,
                "duration_s": round(clock.elapsed_s(), 1),
                "gemsmith": __version__,
                "machine": host_info().model_dump(),
                "seed": given.seed,
                "files": len(CORE),
                "possible": len(every),
                "asked": given.count,
                "tried": len(tried),
                "survived": sum(one["killed_by"] is None for one in tried),
                "mutants": tried,
            }
            given.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
