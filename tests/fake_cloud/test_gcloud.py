"""The gcloud of this machine, asked as rendered scripts ask."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fake_cloud import gcloud

JOB = """\
apiVersion: run.googleapis.com/v1
kind: Job
metadata: {name: big}
spec: {template: {spec: {taskCount: 1, template: {spec: {maxRetries: 0, timeoutSeconds: "60", containers: [
  {command: [sh], args: ["-c", "echo trained"]}]}}}}}
"""


@pytest.fixture
def local(tmp_path):
    """Asks it; returns its exit code and words."""

    def ask(*arguments: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(Path(gcloud.__file__).parent), *arguments],
            cwd=tmp_path,
            env=os.environ | {gcloud.FOLDER: str(tmp_path / "cloud")},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout.split()

    return ask


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_job_is_made_run_listed_and_removed(local, tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    assert local("run", "jobs", "replace", "job.yaml", "--project", "local", "--quiet")[0] == 0
    assert local("run", "jobs", "list", "--format=value(metadata.name)") == (0, ["big"])
    assert local("run", "jobs", "execute", "big", "--async") == (0, ["big-1"])
    execution = tmp_path / "cloud" / "executions" / "big-1"
    deadline = time.monotonic() + 60
    while not gcloud.read_state(execution)["ended"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [attempt["code"] for attempt in gcloud.read_state(execution)["attempts"]] == [0]
    assert local("logging", "read", "query") == (0, ["trained"])
    assert local("run", "jobs", "executions", "list", "--filter=NOT status.completionTime:*") == (0, [])
    assert local("run", "jobs", "delete", "big", "--quiet")[0] == 0 and local("run", "jobs", "list") == (0, [])


def test_files_and_folders_are_copied_below_what_is_named(local, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "store").mkdir()
    local("storage", "cp", "--recursive", str(tmp_path / "base"), f"file://{tmp_path}/store/")
    local("storage", "cp", "--recursive", "base/config.json", f"file://{tmp_path}/store/")
    found = {str(file.relative_to(tmp_path / "store")) for file in (tmp_path / "store").rglob("*.json")}
    assert found == {"base/config.json", "config.json"}


def test_rsync_leaves_what_the_folder_has_and_nothing_else(local, tmp_path):
    for name in ("here/0.tar", "store/b/old.tar", "store/c/other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    exactly = ("--recursive", "--checksums-only", "--delete-unmatched-destination-objects")
    local("storage", "rsync", *exactly, str(tmp_path / "here"), f"file://{tmp_path}/store/b")
    found = {str(file.relative_to(tmp_path / "store")) for file in (tmp_path / "store").rglob("*") if file.is_file()}
    assert found == {"b/0.tar", "c/other"}


def test_what_is_only_asked_for_is_there(local):
    assert local("storage", "buckets", "describe", "gs://b") == (0, ["US-CENTRAL1"])
    policy = json.loads(" ".join(local("storage", "buckets", "get-iam-policy", "gs://b")[1]))
    assert policy["bindings"][0]["role"] == "roles/storage.objectUser"


def test_a_command_that_is_not_known_fails(local):
    assert local("compute", "instances", "create", "x")[0] == 2
