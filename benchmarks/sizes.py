"""Writes how large the source is, before the rooms were made and now, to benchmarks/records/sizes.json.

    python benchmarks/sizes.py [commit, default 42393dd] [--tests]

With `--tests` the quick tests are also run on two processes, for their seconds. Ends with an error above a limit.
"""

import ast
import collections
import io
import json
import re
import resource
import subprocess
import sys
import tarfile
import time
import tokenize
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from short import RECORDS, SHORT

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "sizes.json"
BEFORE = "42393dd"
LIMITS = {"longest_function": 50, "longest_file": 450, "class_names_used_twice": 8}
QUICK = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not (vllm or slow or install)"]


def now() -> dict[str, str]:
    """The text of each Python file in src/gemsmith."""
    return {str(file): file.read_text(encoding="utf-8") for file in (ROOT / "src/gemsmith").rglob("*.py")}


def at(commit: str) -> dict[str, str]:
    """The same at a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, "src/gemsmith"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tree:
        files = [member for member in tree if member.isfile() and member.name.endswith(".py")]
        return {member.name: tree.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


def measure(texts: dict[str, str]) -> dict[str, Any]:
    functions: list[int] = []
    classes: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    named_once = 0
    for text in texts.values():
        kinds += lines_by_kind(text)
        words = collections.Counter(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(1 + (node.end_lineno or 0) - node.lineno)
                private = node.name.startswith("_") and not node.name.startswith("__")
                named_once += private and words[node.name] == 2
    return {
        "files": len(texts),
        "lines": sum(kinds.values()),
        "lines_by_kind": dict(sorted(kinds.items())),
        "functions": len(functions),
        "longest_function": max(functions),
        "longest_file": max(text.count("\n") for text in texts.values()),
        "private_functions_named_once": named_once,
        "class_names_used_twice": sum(count > 1 for count in classes.values()),
    }


def lines_by_kind(text: str) -> collections.Counter[str]:
    """How many lines have code, a docstring, a comment alone, or nothing."""
    kinds = ["blank"] * text.count("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        kind = "comment" if token.type == tokenize.COMMENT else "code"
        for line in range(token.start[0] - 1, token.end[0]):
            kinds[line] = kind if kinds[line] in ("blank", "comment") else kinds[line]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * (1 + (node.end_lineno or 0) - node.lineno)
    return collections.Counter(kinds)


def collected(marks: str) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-m", marks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sum("::" in line for line in done.stdout.splitlines())


def run_quick_tests() -> dict[str, float]:
    """On as many processes as `make test` has."""
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*QUICK, "-n", "2", "--dist", "worksteal"], cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.monotonic() - begin_s), "cpu_s": round(cpu_s)}


def main() -> None:
    commits = [argument for argument in sys.argv[1:] if argument != "--tests"]
    record: dict[str, Any] = {"schema_version": 1, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    if not SHORT:
        commit = (commits or [BEFORE])[0]
        record["before"] = {"commit": commit, **measure(at(commit))}
    record["now"] = measure(now())
    if not SHORT:
        record["tests_collected"] = {"quick": collected("not (vllm or slow or install)"), "slow": collected("slow")}
    if "--tests" in sys.argv:
        record["quick_tests"] = run_quick_tests()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    for name, most in LIMITS.items():
        if record["now"][name] > most:
            sys.exit(f"error: {name} is {record['now'][name]}, must be at most {most}")


if __name__ == "__main__":
    main()
