"""Writes how many CPU-seconds the command line takes to start, to benchmarks/records/cli_start.json.

    python benchmarks/cli_start.py [runs of each command, default 15]

Ends with an error if a median is over the limit, or if a command imports a library that it must not.
"""

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gemsmith import __version__
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "cli_start.json"
COMMANDS = {
    "gemsmith --help": ["--help"],
    "gemsmith plan recipes/verilog_31b.yaml": ["plan", "recipes/verilog_31b.yaml"],
}
LIMIT_S = 0.3
HEAVY = {"jax", "torch", "transformers", "numpy"}


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one start, children counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run([sys.executable, "-m", "gemsmith", *arguments])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(arguments: list[str]) -> list[str]:
    """Top-level names of everything that a command imports, as Python itself lists them."""
    listing = _run([sys.executable, "-X", "importtime", "-m", "gemsmith", *arguments]).stderr
    modules = re.findall(r"^import time:.*\|\s*([\w.]+)$", listing, re.MULTILINE)
    assert "gemsmith.errors" in modules, "the listing holds no module of Gemsmith, so it cannot be trusted"
    return sorted({module.partition(".")[0] for module in modules})


def measure(arguments: list[str], runs: int) -> dict[str, Any]:
    cpu_seconds(arguments)  # writes the byte code that later starts read
    seconds = sorted(cpu_seconds(arguments) for _ in range(runs))
    return {
        "cpu_s": {
            "median": round(statistics.median(seconds), 3),
            "low": round(seconds[0], 3),
            "high": round(seconds[-1], 3),
        },
        "runs": runs,
        "heavy_imports": sorted(HEAVY.intersection(imported(arguments))),
    }


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5 if SHORT else 15
    commands = {name: measure(arguments, runs) for name, arguments in COMMANDS.items()}
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "machine": host_info().model_dump(),
        "limit_cpu_s": LIMIT_S,
        "not_to_be_imported": sorted(HEAVY),
        "commands": commands,
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(commands, indent=1))
    for name, result in commands.items():
        if result["heavy_imports"]:
            sys.exit(
                f"error: {name} imports {', '.join(result['heavy_imports'])}; import it inside the function that needs "
                "it"
            )
        if result["cpu_s"]["median"] > LIMIT_S and not SHORT:
            sys.exit(f"error: {name} takes {result['cpu_s']['median']} s of CPU; the limit is {LIMIT_S} s")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Where byte code must not be written every start would compile the sources again, which an installed Gemsmith does
    # not.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    main()
