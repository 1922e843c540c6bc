"""Breaks each guard of tests/faults/guards.yaml once, and writes to benchmarks/records/faults.json which test fails.

    python scripts/break_guards.py

Ends with an error where a test passes without its guard. Files are put back, also after Ctrl-C.
"""

import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
GUARDS = ROOT / "tests" / "faults" / "guards.yaml"
RECORD = ROOT / "benchmarks" / "records" / "faults.json"


def fails_without(guard: dict[str, str]) -> bool:
    """Whether the test fails once the guard's words are replaced. Raises ValueError where they are not there once."""
    file = ROOT / guard["file"]
    whole = file.read_text(encoding="utf-8")
    if whole.count(guard["words"]) != 1:
        raise ValueError(f"{guard['file']}: {guard['words']!r} is there {whole.count(guard['words'])} times, not once")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", guard["test"]]
    try:
        file.write_text(whole.replace(guard["words"], guard["instead"]), encoding="utf-8")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    finally:
        file.write_text(whole, encoding="utf-8")
    return done.returncode == 1


def main() -> None:
    found, passed = [], []
    for guard in yaml.safe_load(GUARDS.read_text(encoding="utf-8")):
        failed = fails_without(guard)
        print(f"{'fails ' if failed else 'PASSES'}  {guard['guard']}: {guard['test']}", flush=True)
        found.append({"guard": guard["guard"], "file": guard["file"], "test": guard["test"], "failed": failed})
        passed += [] if failed else [guard["test"]]
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"schema_version": 1}
    RECORD.write_text(json.dumps(record | {"guards": found}, indent=1) + "\n", encoding="utf-8")
    if passed:
        sys.exit(f"error: {len(passed)} tests pass without their guards: {', '.join(passed)}")


if __name__ == "__main__":
    main()
