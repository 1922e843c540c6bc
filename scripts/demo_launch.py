"""A launch to Cloud Run, its job, a lost machine and the way home, all on this machine: make demo-launch.

    python scripts/demo_launch.py [--folder runs/demo-launch] [--stages A,B,…] [--recipe recipes/demo.yaml] [-- --set …]

The recipe is launched by `gemsmith launch --provider cloud-run --submit` to a gcloud of this machine
(fake_cloud.gcloud) and a bucket of this machine. The first attempt loses its machine once a saved step is in the
bucket; the second resumes from there, scores base and tuned model, and `gemsmith launch fetch` brings records, adapter
and report home. Ends with an error where anything was done twice or does not exist. Costs nothing, needs no account.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fake_cloud.bucket import bucket_server
from fake_cloud.gcloud import FOLDER, INTERRUPT, PROJECT, read_state

ROOT = Path(__file__).parents[1]
BUCKET = "gs://demo-runs"
STAGES = "plan,data,train,export,verify,eval"
OPTIONS = (
    *("--provider", "cloud-run", "--project", PROJECT, "--bucket", BUCKET, "--image", "local/gemsmith"),
    # Few steps and rows: it is shown that a launch comes home, not how well the model learns.
    *("--set", "train.max_steps=60", "--set", "train.save_steps=5", "--set", "eval.limit=50"),
    *("--retries", "1", "--timeout-hours", "1"),
    *("--max-usd", "10", "--yes", "--submit"),
)


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


def check(folder: Path, name: str, stages: str) -> None:
    """Ends with an error where the launch did not go as it must."""
    state = read_state(folder / "cloud" / "executions" / f"{name}-1")
    log = (folder / "cloud" / "executions" / f"{name}-1" / "log.txt").read_text(encoding="utf-8")
    home = folder / "runs" / name
    ends = [(attempt["ended_by"], attempt["code"] == 0) for attempt in state["attempts"]]
    expected = [
        "recipe.yaml",
        "report.html",
        "adapter/adapter_config.json",
        *(f"{name}.json" for name in stages.split(",")),
    ]
    wrong = [
        *([] if ends == [("interruption", False), ("itself", True)] else [f"attempts ended as {ends}"]),
        *(f"{name} did not come home" for name in expected if not (home / name).exists()),
        *([] if "attempt 1: complete in the bucket: data, plan" in log else ["attempt 1 began anew"]),
        *([] if log.count("eval: base:") == stages.count("eval") else ["the base was not scored once"]),
    ]
    if wrong:
        sys.exit(f"error: {'; '.join(wrong)}")
    seconds = ", ".join(f"{attempt['duration_s']:.0f} s" for attempt in state["attempts"])
    print(f"two attempts of {seconds}; the run is home in {home}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/demo-launch")
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "demo.yaml")
    parser.add_argument("options", nargs="*", help="of gemsmith launch")
    given = parser.parse_args()
    name = given.recipe.stem.replace("_", "-")
    folder = (ROOT / given.folder).resolve()
    tools = folder / "tools"
    if folder.exists() and not tools.exists():
        sys.exit(f"error: {folder} holds something else; name a folder that does not exist")
    shutil.rmtree(folder, ignore_errors=True)
    tools.mkdir(parents=True)
    (tools / "gcloud").write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "fake_cloud"} "$@"\n')
    (tools / "gcloud").chmod(0o755)
    # What recipes name as seen from the repository.
    for inner in ("recipes", "build"):
        (folder / inner).symlink_to(ROOT / inner)
    with bucket_server() as bucket:
        environment = {
            **os.environ,
            **bucket.environment,
            FOLDER: str(folder / "cloud"),
            INTERRUPT: f"{BUCKET}/{name}/checkpoints/*.whole",
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        options = (*OPTIONS, *given.options, "--stages", given.stages)
        gemsmith(folder, environment, "launch", str(given.recipe), *options)
        follow(folder / "cloud" / "executions" / f"{name}-1")
        gemsmith(folder, environment, "launch", "status", name)
        gemsmith(folder, environment, "launch", "fetch", name)
        gemsmith(folder, environment, "launch", "clean", name, "--yes")
    check(folder, name, given.stages)


if __name__ == "__main__":
    main()
