"""The verdict on one answer to one problem: its module beside the reference, in Icarus Verilog, in a sandbox."""

import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import MachineError
from gemsmith.sandbox import FOLDER, Limits, Outcome, Sandbox
from gemsmith.tasks.verilog_eval.extract import TOP, extract_modules
from gemsmith.tasks.verilog_eval.guard import Forged, guard, scope_names
from gemsmith.tasks.verilog_eval.problems import Problem

REASONS = ("no module", "compile error", "wrong output", "timeout", "forged", "sandbox")
MOST_CHARACTERS = 2**20
"""Of an answer; a model writes about four to a token."""
COMPILING = Limits(wall_s=30.0)
RUNNING = Limits(wall_s=60.0)
"""The slowest testbench of verilog-eval takes 13 s on one core, with its own reference."""
_VERDICT = re.compile(r'"Mismatches: %1d in %1d samples"')
_COMPILE = ("iverilog", "-g2012", "-Wno-timescale", "-s", "tb", "-o", f"{FOLDER}/tb.vvp")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`reason` is one of REASONS where it did not pass; `samples` is how many the testbench compared."""

    passed: bool
    reason: str | None = None
    detail: str = ""
    samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A problem whose own reference has passed, with the number of samples that it was compared in."""

    problem: Problem
    modules: set[str]
    scopes: set[str]
    samples: int


def find_simulator() -> str:
    """The version of Icarus Verilog. Raises MachineError where it is not installed."""
    if not (shutil.which("iverilog") and shutil.which("vvp")):
        raise MachineError("iverilog is not installed, which scores Verilog; install Debian's package iverilog")
    outcome = Sandbox(bubblewrap=None).run(["iverilog", "-V"], Path("/"), limits=COMPILING)
    version = re.search(r"Icarus Verilog version (\S+)", outcome.text)
    return f"Icarus Verilog {version[1]}" if version else "Icarus Verilog"


def open_bench(problem: Problem, sandbox: Sandbox) -> Bench | Verdict:
    """The problem, ready to judge answers; or the verdict on its own reference, which did not pass."""
    modules, scopes = scope_names(problem.testbench, problem.reference)
    itself = re.sub(r"\bRefModule\b", TOP, problem.reference)
    verdict = _simulate(problem, itself, sandbox)
    return (
        Bench(problem=problem, modules=modules, scopes=scopes, samples=verdict.samples) if verdict.passed else verdict
    )


def judge(bench: Bench, answer: str, sandbox: Sandbox) -> Verdict:
    """Whether a model's answer solves the problem, and if not, why."""
    if len(answer) > MOST_CHARACTERS:
        detail = f"the answer has {len(answer):,} characters, more than {MOST_CHARACTERS:,}"
        return Verdict(passed=False, reason="sandbox", detail=detail)
    # Half of a surrogate pair is no text, and no file would take it.
    source = extract_modules(answer.encode("utf-8", "replace").decode())
    if source is None:
        return Verdict(passed=False, reason="no module", detail=f"the answer has no module named {TOP}")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "answer.sv").write_text(source, encoding="utf-8")
        read = sandbox.run(
            ["iverilog", "-g2012", "-E", "-o", f"{FOLDER}/read.sv", f"{FOLDER}/answer.sv"],
            _opened(Path(name)),
            limits=COMPILING,
            writes="read.sv",
        )
        if failed := _failed(read, "compile error"):
            return failed
        preprocessed = (Path(name) / "read.sv").read_text(encoding="utf-8", errors="replace")
    try:
        kept = guard(preprocessed, modules=bench.modules, scopes=bench.scopes)
    except Forged as error:
        return Verdict(passed=False, reason="forged", detail=str(error))
    verdict = _simulate(bench.problem, kept, sandbox)
    if verdict.passed and verdict.samples != bench.samples:
        detail = f"the testbench compared {verdict.samples} samples, with the reference {bench.samples}"
        return Verdict(passed=False, reason="forged", detail=detail, samples=verdict.samples)
    return verdict


def _simulate(problem: Problem, source: str, sandbox: Sandbox) -> Verdict:
    """The verdict of the testbench, which it prints behind a word that nothing else knows."""
    word = secrets.token_hex(16)
    testbench, count = _VERDICT.subn(f'"{word} %1d %1d"', problem.testbench)
    if count != 1:
        detail = f"its testbench prints its result {count} times where once is expected"
        return Verdict(passed=False, reason="compile error", detail=detail)
    # Last, and from the default timescale on: no directive of the answer's reaches the other files.
    files = {"test.sv": testbench, "ref.sv": problem.reference, "answer.sv": f"`resetall\n{source}"}
    with tempfile.TemporaryDirectory() as name:
        folder = _opened(Path(name))
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        compiled = sandbox.run(
            [*_COMPILE, *(f"{FOLDER}/{file}" for file in files)], folder, limits=COMPILING, writes="tb.vvp"
        )
        if failed := _failed(compiled, "compile error"):
            return failed
        for file in files:
            (folder / file).unlink()
        ran = sandbox.run(["vvp", "-n", f"{FOLDER}/tb.vvp", "-none"], folder, limits=RUNNING)
    if failed := _failed(ran, "wrong output"):
        return failed
    return _read_result(ran.text, word)


def _read_result(printed: str, word: str) -> Verdict:
    """The verdict in the one line that begins with the word."""
    if printed.count(word) > 1:
        return Verdict(passed=False, reason="forged", detail="the testbench's own word was printed twice")
    result = re.search(rf"^{word} (\d+) (\d+)$", printed, re.MULTILINE)
    if result is None:
        return Verdict(passed=False, reason="wrong output", detail="the simulation ended without a result")
    errors, samples = int(result[1]), int(result[2])
    detail = f"{errors} of {samples} samples differ"
    if errors or not samples:
        return Verdict(passed=False, reason="wrong output", detail=detail, samples=samples)
    return Verdict(passed=True, samples=samples)


def _opened(folder: Path) -> Path:
    """The folder, for the sandbox's user to read."""
    folder.chmod(0o755)
    return folder


def _failed(outcome: Outcome, reason: str) -> Verdict | None:
    if outcome.code is None:
        return Verdict(passed=False, reason="timeout", detail="it ran out of time")
    if outcome.code == 0:
        return None
    lines = outcome.text.strip().splitlines() or [f"exit status {outcome.code}"]
    if outcome.was_stopped or outcome.text.startswith("bwrap:"):
        return Verdict(passed=False, reason="sandbox", detail=f"it was stopped: {lines[-1]}")
    return Verdict(passed=False, reason=reason, detail=lines[0])


def count_reasons(verdicts: list[Verdict]) -> Mapping[str, int]:
    """How many did not pass, by reason."""
    found = [verdict.reason for verdict in verdicts if verdict.reason]
    return {reason: found.count(reason) for reason in REASONS if reason in found}
