"""The verdict on one answer to a problem of NVlabs/verilog-eval: its module beside the reference, in Icarus Verilog.

The verdict is a line that the testbench prints. It can be trusted where the tested module cannot print, cannot reach
into the testbench and cannot end the simulation, which `guard` decides on the preprocessed text (so no macro hides
anything), token by token. What it returns is written from those tokens, so that the compiler reads what was checked.
"""

import hashlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gemsmith.errors import DataError, MachineError
from gemsmith.system.files import regular_file
from gemsmith.system.sandbox import FOLDER, Sandbox, SandboxLimits, SandboxResult
from gemsmith.tasks.base import Verdict

TOP = "TopModule"
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"\[BEGIN\](.*?)(?:\[DONE\]|\Z)", re.DOTALL)
# Not one expression from a module to its end: of a thousand modules without one each would be read to the end of all.
_EDGE = re.compile(r"^[ \t]*(?P<begin>(?:\(\*[^\n]*?\*\)\s*)?(?:macro)?module\b)|\bendmodule\b", re.MULTILINE)
_NAME = re.compile(r"module\s+(?:automatic\s+|static\s+)?(\\\S+|\w+)")
_DIRECTIVE = re.compile(r"^[ \t]*`(?:define|undef|ifdef|ifndef|else|elsif|endif|timescale|default_nettype)\b.*$", re.M)
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<open>/\*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<directive>`\w+)
  | (?P<system>\$[A-Za-z_][\w$]*)
  | (?P<escaped>\\\S+)
  | (?P<name>[A-Za-z_][\w$]*)
  | (?P<number>\d[\w]*(?:\.\d[\w]*)?)
  | (?P<other>.)
    """,
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_SILENT = {
    "signed", "unsigned", "clog2", "bits", "countones", "onehot", "onehot0", "isunknown", "size", "left", "right",
    "high", "low", "increment", "dimensions", "unpacked_dimensions", "typename", "cast", "pow", "sqrt", "ceil", "floor",
    "ln", "log10", "exp", "abs", "min", "max", "rtoi", "itor", "realtobits", "bitstoreal", "random", "urandom",
    "urandom_range", "time", "stime", "realtime", "timeformat", "dumpfile", "dumpvars", "dumpon", "dumpoff", "dumpall",
    "dumpflush", "dumplimit",
}  # fmt: skip
_PRINTS = re.compile(r"\$(?:(?:display|write|strobe|monitor)[bho]?|error|warning|info)$")
_KEYWORDS = {"bind", "defparam", "force", "release"}  # what changes other modules
_DIRECTIVES = {
    "timescale", "default_nettype", "resetall", "celldefine", "endcelldefine", "line", "begin_keywords", "end_keywords",
    "unconnected_drive", "nounconnected_drive",
}  # fmt: skip
"""What the preprocessor leaves for the compiler, whose own would make other text of what was checked.
"""
_ENDS = {"prompt": "_prompt.txt", "reference": "_ref.sv", "testbench": "_test.sv"}
REASONS = ("no module", "compile error", "wrong output", "timeout", "forged", "sandbox")
MOST_CHARACTERS = 2**20  # of an answer; a model writes about four to a token
COMPILING = SandboxLimits(wall_s=30.0)
RUNNING = SandboxLimits(wall_s=60.0)
"""The slowest testbench of verilog-eval takes 13 s on one core, with its own reference."""
_VERDICT = re.compile(r'"Mismatches: %1d in %1d samples"')
_COMPILE = ("iverilog", "-g2012", "-Wno-timescale", "-s", "tb", "-o", f"{FOLDER}/tb.vvp")


def extract_modules(answer: str) -> str | None:
    r"""The source text of the modules that an answer ends up with, or None where it has no TopModule.

    Of several blocks the last one that has a TopModule counts, and modules of other blocks that it lacks; what is
    around the modules is dropped, but for directives in front of them.

    >>> extract_modules("Sure:\n```verilog\nmodule TopModule(output y);\nendmodule\n```\nDone.")
    'module TopModule(output y);\nendmodule\n'
    """
    blocks = [match[2] for match in _FENCE.finditer(answer)] or [match[1] for match in _TAGGED.finditer(answer)]
    found = [_modules(block) for block in blocks or [answer]]
    if not any(TOP in modules for modules in found):
        found = [_modules(answer)]
    last = next((modules for modules in reversed(found) if TOP in modules), None)
    if last is None:
        return None
    others = {name: text for modules in found for name, text in modules.items() if name not in last}
    return "\n".join([*others.values(), *last.values()]) + "\n"


def _modules(block: str) -> dict[str, str]:
    """Modules by name, each with the directives between it and the one before; of two of one name the last."""
    modules: dict[str, str] = {}
    start, end = None, 0
    for edge in _EDGE.finditer(block):
        # From the first `module` after each `endmodule` to the next `endmodule`.
        if edge["begin"]:
            start = edge.start("begin") if start is None else start
        elif start is not None:
            text = block[start : edge.end()]
            if named := _NAME.search(text):
                before = [line[0] for line in _DIRECTIVE.finditer(block, end, start)]
                modules[named[1].removeprefix("\\")] = "\n".join([*before, text])
            start, end = None, edge.end()
    return modules


class Failed(Exception):  # noqa: N818 - a verdict, not a fault
    """An answer is wrong: one of REASONS, and a line that says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Token(NamedTuple):
    kind: str
    text: str

    @property
    def name(self) -> str:
        """An identifier's, however it is written; else nothing."""
        return self.text.removeprefix("\\") if self.kind in ("name", "escaped") else ""


def scope_names(testbench: str, reference: str) -> tuple[set[str], set[str]]:
    """The modules that a testbench and a reference define, and every name that may be a scope of the testbench."""
    modules = set(re.findall(r"\bmodule\s+(\w+)", f"{testbench}\n{reference}"))
    blocks = re.findall(r"\b(?:begin|fork)\s*:\s*(\w+)", testbench)
    routines = re.findall(r"\b(?:task|function)\b[^;(]*?(\w+)\s*[;(]", testbench)
    return modules, {*modules, *blocks, *routines, *re.findall(r"(\w+)\s*\(", testbench)}


def guard(source: str, *, modules: set[str], scopes: set[str]) -> str:
    """The preprocessed source with its printing silenced. Raises Failed where it is not a module for itself."""
    tokens = []
    for match in _TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if match[0] in ('"', "`", "\\", "/*") or (
            not match[0].isprintable() and kind not in ("space", "comment", "string")
        ):
            raise Failed("forged", f"it holds {match[0]!r}, with which its text could be read in two ways")
        if kind != "comment":
            tokens.append(_Token(kind, match[0]))
    solid = [token for token in tokens if token.kind != "space"]
    opened: list[int] = []
    openings: dict[int, int] = {}  # where each bracket that is closed was opened
    roots: dict[int, str] = {}
    for place, token in enumerate(solid):
        _check(token, modules)
        if token.text == "[":
            opened.append(place)
        elif token.text == "]" and opened:
            openings[place] = opened.pop()
        # Between a name and a part of it, and not in front of a port.
        if token.text == "." and place and (solid[place - 1].name or solid[place - 1].text in ("]", ")")):
            root = _root(solid, place, openings, roots)
            if root is None or root in scopes:
                raise Failed("forged", f"it reaches into the testbench through {root or 'an expression'}")
            roots[place] = root
    return "".join(_silenced(tokens))


def _check(token: _Token, modules: set[str]) -> None:
    if token.name in modules:
        raise Failed("forged", f"it names {token.name}, a module of the testbench or the reference")
    if token.kind == "name" and token.text in _KEYWORDS:
        raise Failed("forged", f"it uses {token.text}, which changes other modules")
    if token.name.startswith("$"):  # Icarus takes \$finish for $finish
        raise Failed("forged", f"it uses {token.text}, an escaped name of a system task")
    if token.kind == "directive" and token.text[1:] not in _DIRECTIVES:
        raise Failed("forged", f"it uses {token.text}, which is still there after the preprocessor")
    if token.kind == "system" and token.text[1:] not in _SILENT and not _PRINTS.match(token.text):
        raise Failed("forged", f"it uses {token.text}, which a module under test has no need of")


def _root(tokens: Sequence[_Token], place: int, openings: Mapping[int, int], roots: Mapping[int, str]) -> str | None:
    """The first name of the path that goes on at this point; None where it does not begin with one.

    `roots` are those of the points before, so that a path of a million points is not walked a million times.
    """
    at = place - 1
    while at >= 0 and tokens[at].text == "]":
        at = openings.get(at, 0) - 1
    if at < 0 or not tokens[at].name:
        return None
    return roots.get(at - 1, tokens[at].name)


def _silenced(tokens: Sequence[_Token]) -> Iterator[str]:
    """The text again, with what prints made to print to no channel: $display("x") becomes $fdisplay(0, "x")."""
    muted = opened = False
    for token in tokens:
        if token.kind == "system" and _PRINTS.match(token.text):
            yield "$fdisplay"
            muted = True
        elif token.kind == "space" or not (muted or opened):
            yield token.text
        elif opened:
            yield token.text if token.text == ")" else f", {token.text}"
            opened = False
        else:
            muted, opened = False, token.text == "("
            yield "(0" if opened else f"(0){token.text}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One specification, the module that meets it, and the testbench that compares a TopModule with that."""

    name: str
    prompt: str
    reference: str
    testbench: str


def read_problems(folder: Path) -> tuple[Problem, ...]:
    """The problems in a folder, or in its dataset_spec-to-rtl, by name. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"dataset {folder}: is not a folder; give that of verilog-eval's dataset_spec-to-rtl")
    if not any(folder.glob(f"*{_ENDS['testbench']}")) and (folder / "dataset_spec-to-rtl").is_dir():
        folder = folder / "dataset_spec-to-rtl"
    names = sorted({file.name.removesuffix(end) for end in _ENDS.values() for file in folder.glob(f"*{end}")})
    if not names:
        raise DataError(
            f"dataset {folder}: holds no problem; each is three files: NAME_prompt.txt, NAME_ref.sv and NAME_test.sv"
        )
    return tuple(
        Problem(name=name, **{part: _read(folder / f"{name}{end}") for part, end in _ENDS.items()}) for name in names
    )


def problems_sha256(problems: tuple[Problem, ...]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        for text in (problem.name, problem.prompt, problem.reference, problem.testbench):
            digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _read(file: Path) -> str:
    try:
        return regular_file(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"dataset {file.parent}: lacks {file.name}; copy the dataset again") from None
    except UnicodeDecodeError:
        raise DataError(f"dataset {file}: is not UTF-8 text; copy the dataset again") from None


@dataclass(frozen=True, kw_only=True)
class Testbench:
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


def open_bench(problem: Problem, sandbox: Sandbox) -> Testbench:
    """The problem, ready to judge answers. Raises Failed where its own reference does not pass."""
    modules, scopes = scope_names(problem.testbench, problem.reference)
    samples = _simulate(problem, re.sub(r"\bRefModule\b", TOP, problem.reference), sandbox)
    return Testbench(problem=problem, modules=modules, scopes=scopes, samples=samples)


def judge(bench: Testbench, answer: str, sandbox: Sandbox) -> Verdict:
    try:
        if len(answer) > MOST_CHARACTERS:
            raise Failed("sandbox", f"the answer has {len(answer):,} characters, more than {MOST_CHARACTERS:,}")
        # Half of a surrogate pair is no text, and no file would take it.
        source = extract_modules(answer.encode("utf-8", "replace").decode())
        if source is None:
            raise Failed("no module", f"the answer has no module named {TOP}")
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            (Path(name) / "answer.sv").write_text(source, encoding="utf-8")
            command = ["iverilog", "-g2012", "-E", "-o", f"{FOLDER}/read.sv", f"{FOLDER}/answer.sv"]
            read = sandbox.run(command, Path(name), limits=COMPILING, writes="read.sv")
            _refuse_failed(read, "compile error")
            preprocessed = (Path(name) / "read.sv").read_text(encoding="utf-8", errors="replace")
        guarded = guard(preprocessed, modules=bench.modules, scopes=bench.scopes)
        samples = _simulate(bench.problem, guarded, sandbox)
        if samples != bench.samples:
            raise Failed("forged", f"the testbench compared {samples} samples, with the reference {bench.samples}")
    except Failed as failed:
        return Verdict(right=False, reason=failed.reason, detail=str(failed))
    return Verdict(right=True)


def _simulate(problem: Problem, source: str, sandbox: Sandbox) -> int:
    """The samples that the testbench compared, all alike, which it prints behind a word that nothing else knows."""
    word = secrets.token_hex(16)
    testbench, count = _VERDICT.subn(f'"{word} %1d %1d"', problem.testbench)
    if count != 1:
        raise Failed("compile error", f"its testbench prints its result {count} times where once is expected")
    # Last, and from the default timescale on: no directive of the answer's reaches the other files.
    files = {"test.sv": testbench, "ref.sv": problem.reference, "answer.sv": f"`resetall\n{source}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        command = [*_COMPILE, *(f"{FOLDER}/{file}" for file in files)]
        _refuse_failed(sandbox.run(command, folder, limits=COMPILING, writes="tb.vvp"), "compile error")
        for file in files:
            (folder / file).unlink()
        ran = sandbox.run(["vvp", "-n", f"{FOLDER}/tb.vvp", "-none"], folder, limits=RUNNING)
    _refuse_failed(ran, "wrong output")
    if ran.text.count(word) > 1:
        raise Failed("forged", "the testbench's own word was printed twice")
    result = re.search(rf"^{word} (\d+) (\d+)$", ran.text, re.MULTILINE)
    if result is None:
        raise Failed("wrong output", "the simulation ended without a result")
    errors, samples = int(result[1]), int(result[2])
    if errors or not samples:
        raise Failed("wrong output", f"{errors} of {samples} samples differ")
    return samples


def _refuse_failed(outcome: SandboxResult, reason: str) -> None:
    if outcome.code is None:
        raise Failed("timeout", "it ran out of time")
    if outcome.code != 0:
        lines = outcome.text.strip().splitlines() or [f"exit status {outcome.code}"]
        if outcome.was_stopped or outcome.text.startswith("bwrap:"):
            raise Failed("sandbox", f"it was stopped: {lines[-1]}")
        raise Failed(reason, lines[0])
