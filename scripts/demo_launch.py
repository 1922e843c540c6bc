"""A launch to Cloud Run, its job, a lost machine and the way home, all on this machine: make demo-launch.

    python scripts/demo_launch.py [folder, default runs/demo-launch]

recipes/demo.yaml is launched by `gemsmith launch --on cloud-run --submit` to a gcloud of this machine
(gemsmith.testing.gcloud) and a bucket of this machine. The first attempt loses its machine once a saved step is in the
bucket; the second goes on from there, scores base and tuned model, and `gemsmith launch fetch` brings records, adapter
and report home. Ends with an error where anything was done twice or is not there. Costs nothing, needs no account.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gemsmith.testing.buckets import bucket_server
from gemsmith.testing.gcloud import FOLDER, INTERRUPT, PROJECT, read_state

ROOT = Path(__file__).parents[1]
BUCKET = "gs://demo-runs"
STAGES = "plan,data,train,export,verify,eval"
LOST_AT_STEP = 50
OPTIONS = (
    *("--on", "cloud-run", "--project", PROJECT, "--bucket", BUCKET, "--stages", STAGES, "--image", "local/gemsmith"),
    *("--set", f"checkpoint={ROOT / 'recipes' / 'demo_base'}", "--set", "train.epochs=1"),
    *("--retries", "1", "--timeout-hours", "1", "--max-usd", "10", "--yes", "--submit"),
)
HOME = ("recipe.yaml", *(f"{stage}.json" for stage in STAGES.split(",")), "report.html", "adapter/adapter_config.json")


def gemsmith(folder: Path, environment: dict[str, str], *arguments: str) -> None:
    print(f"$ gemsmith {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "gemsmith", *arguments]
    if code := subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        sys.exit(code)


def follow(execution: Path) -> None:
    """Prints the job's log as it grows, until the job has ended."""
    told = 0
    while True:
        ended = read_state(execution)["ended"]
        text = (execution / "log.txt").read_bytes()
        sys.stdout.write(text[told:].decode(errors="replace"))
        sys.stdout.flush()
        told = len(text)
        if ended:
            return
        time.sleep(0.5)


def check(folder: Path) -> None:
    """Ends with an error where the launch did not go as it must."""
    state = read_state(folder / "cloud" / "executions" / "demo-1")
    log = (folder / "cloud" / "executions" / "demo-1" / "log.txt").read_text(encoding="utf-8")
    home = folder / "runs" / "demo"
    ends = [(attempt["ended_by"], attempt["code"] == 0) for attempt in state["attempts"]]
    evaluated = json.loads((home / "eval.json").read_text(encoding="utf-8"))
    wrong = [
        *([] if ends == [("interruption", False), ("itself", True)] else [f"attempts ended as {ends}"]),
        *(f"{name} did not come home" for name in HOME if not (home / name).exists()),
        *([] if log.count("attempt 1: complete in the bucket: data, plan") == 1 else ["attempt 1 did not go on"]),
        *([] if evaluated else ["nothing was scored"]),
    ]
    if wrong:
        sys.exit(f"error: {'; '.join(wrong)}")
    seconds = ", ".join(f"{attempt['duration_s']:.0f} s" for attempt in state["attempts"])
    print(f"two attempts of {seconds}; the run is home in {home}")


def main() -> None:
    folder = (ROOT / (sys.argv[1] if len(sys.argv) > 1 else "runs/demo-launch")).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    tools = folder / "tools"
    tools.mkdir(parents=True)
    (tools / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} -m gemsmith.testing.gcloud "$@"\n')
    (tools / "gcloud").chmod(0o755)
    with bucket_server() as bucket:
        environment = {
            **os.environ,
            **bucket.environment,
            FOLDER: str(folder / "cloud"),
            INTERRUPT: f"{BUCKET}/demo/checkpoints/{LOST_AT_STEP}.whole",
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        gemsmith(folder, environment, "launch", str(ROOT / "recipes" / "demo.yaml"), *OPTIONS)
        follow(folder / "cloud" / "executions" / "demo-1")
        gemsmith(folder, environment, "launch", "status", "demo")
        gemsmith(folder, environment, "launch", "fetch", "demo")
        gemsmith(folder, environment, "launch", "clean", "demo", "--yes")
    check(folder)


if __name__ == "__main__":
    main()
