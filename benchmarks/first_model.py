"""Writes how long it takes from `git clone` to an answer of one's own model, to benchmarks/records/first_model.json.

    python benchmarks/first_model.py

A clone of this commit, its environments, and then every command of docs/first-model.md in order, each as often as the
page has it. Short, it takes the environments that are here, and ends before training.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from gemsmith import __version__
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8").partition("## With a real model")[0]
LIMIT_S = 600
"""From the clone to the answer, with the packages' downloads."""


def timed(command: str, folder: Path, environment: dict[str, str]) -> float:
    """Seconds; the benchmark ends where the command fails."""
    print(f"$ {command}", flush=True)
    begin_s = time.monotonic()
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {command} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return round(time.monotonic() - begin_s, 1)


def main() -> None:
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        home, environment = Path(folder) / "gemsmith", dict(os.environ)
        environment.pop("VIRTUAL_ENV", None)
        if SHORT:
            home.mkdir()
            for name in ("recipes", ".venv", ".venv-serve"):
                (home / name).symlink_to(ROOT / name)
        else:
            steps["git clone"] = timed(f"git clone --quiet '{ROOT}' '{home}'", Path(folder), environment)
            steps["make env serve-env"] = timed("make env serve-env", home, environment)
        (home / "first").mkdir()
        program = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        assert program
        (home / "first" / "rows.py").write_text(program[1], encoding="utf-8")
        environment["PATH"] = f"{home}/.venv/bin:{environment['PATH']}"
        page = PAGE.partition("## 5. Run")[0] if SHORT else PAGE
        for command in re.findall(r"^\$ ((?:.*\\\n)*.*)", page, flags=re.MULTILINE):
            if not command.startswith(("source ", "mkdir ")):
                steps[re.sub(r"\\\n\s*", "", command)] = timed(command, home / "first", environment)
            if "gemsmith chat" in command:
                break
    total_s = round(sum(steps.values()), 1)
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "machine": host_info().model_dump(),
        "limit_s": LIMIT_S,
        "seconds": steps,
        "total_s": total_s,
    }
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / "first_model.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{total_s:.0f} s from the clone to the answer")
    if total_s > LIMIT_S:
        sys.exit(f"error: {total_s:.0f} s; the limit is {LIMIT_S} s")


if __name__ == "__main__":
    main()
