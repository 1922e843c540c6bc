"""Jobs that are shell commands, on the stand-in for Cloud Run."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fake_cloud import cloud_run
from fake_cloud.cloud_run import read_job, run_task
from gemsmith.errors import InputError

JOB = Path(__file__).parents[1] / "launch" / "golden" / "cloud-run" / "verilog_31b" / "job.yaml"
HEARS = "trap 'echo heard; exit 7' TERM; echo up; while :; do sleep 0.1; done"
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def test_a_rendered_job_is_read_as_it_is_meant():
    task = read_job(JOB.read_text())
    assert task.command[:3] == ("gemsmith", "launch", "worker") and task.mounts == {"/mnt/weights": "weights"}
    assert (task.job, task.timeout_s, task.retries) == ("verilog-31b", 43200.0, 3)


@pytest.mark.parametrize(
    ("given", "instead", "message"),
    [
        ("kind: Job", "kind: Service", "Service: is not a Job"),
        ("taskCount: 1", "taskCount: 2", "only jobs whose tasks all run at once"),
        ("readOnly: true", "readOnly: false", "volume weights: only a bucket that is mounted read-only"),
    ],
)
def test_what_is_not_understood_is_an_error(given, instead, message):
    with pytest.raises(InputError, match=message):
        read_job(JOB.read_text().replace(given, instead))


def job(script: str, *, timeout: int = 60, retries: int = 3, **more):
    bucket = {"driver": "gcsfuse.run.googleapis.com", "readOnly": True, "volumeAttributes": {"bucketName": "b"}}
    mount = {"name": "w", "mountPath": "/mnt/weights"}
    task = {
        "maxRetries": retries,
        "timeoutSeconds": str(timeout),
        "volumes": [{"name": "w", "csi": bucket}],
        "containers": [{"command": ["sh"], "args": ["-c", script], "volumeMounts": [mount], **more}],
    }
    return read_job(
        yaml.safe_dump(
            {
                "apiVersion": "run.googleapis.com/v1",
                "kind": "Job",
                "metadata": {"name": "big"},
                "spec": {"template": {"spec": {"taskCount": 1, "template": {"spec": task}}}},
            }
        )
    )


@pytest.fixture
def run(tmp_path):
    """Runs a job; returns its attempts and what it printed."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "weights.txt").write_text("heavy\n")

    def run_job(task, **options):
        with (tmp_path / "log.txt").open("wb") as log:
            attempts = list(
                run_task(
                    task,
                    tmp_path / "big-1",
                    environment={"PATH": os.environ["PATH"], "FROM": "outside"},
                    log=log,
                    mounted=lambda bucket: tmp_path / bucket,
                    **({"secrets": {}} | options),
                )
            )
        return attempts, (tmp_path / "log.txt").read_text().split()

    return run_job


@needs_bubblewrap
def test_a_failure_is_tried_again_on_an_empty_disk(run):
    number = "$CLOUD_RUN_TASK_ATTEMPT"
    script = f"cat /mnt/weights/weights.txt; ls /tmp/x 2>/dev/null; touch /tmp/x; echo {number}$FROM; [ {number} = 1 ]"
    attempts, said = run(job(script))
    assert [(attempt.number, attempt.code) for attempt in attempts] == [(0, 1), (1, 0)]
    assert said == ["heavy", "0outside", "heavy", "1outside"]


@needs_bubblewrap
def test_no_more_than_the_retries_are_tried(run):
    attempts, _ = run(job("exit 3", retries=1))
    assert [attempt.code for attempt in attempts] == [3, 3]


@needs_bubblewrap
def test_a_task_that_takes_too_long_hears_sigterm(run, tmp_path, monkeypatch):
    """Its time is over once it is up."""
    clock = SimpleNamespace(
        monotonic=lambda: 100 if "up" in (tmp_path / "log.txt").read_text() else 0, sleep=time.sleep
    )
    monkeypatch.setattr(cloud_run, "time", clock)
    (attempt,), said = run(job(HEARS, timeout=60, retries=0))
    assert (attempt.code, attempt.ended_by, said) == (7, "timeout", ["up", "heard"])


@needs_bubblewrap
def test_a_task_that_does_not_listen_is_killed(run, monkeypatch):
    monkeypatch.setattr(cloud_run, "GRACE_S", 0.3)
    (attempt,), _ = run(job("trap '' TERM; while :; do sleep 0.1; done", timeout=1, retries=0))
    assert (attempt.code, attempt.ended_by) == (137, "timeout")


@needs_bubblewrap
def test_only_the_first_machine_is_taken_away(run, tmp_path):
    task = job("[ $CLOUD_RUN_TASK_ATTEMPT = 0 ] || exit 0; " + HEARS)
    attempts, said = run(task, interrupt=lambda: "up" in (tmp_path / "log.txt").read_text())
    assert [(attempt.code, attempt.ended_by) for attempt in attempts] == [(7, "interruption"), (0, "itself")]
    assert said == ["up", "heard"]


@needs_bubblewrap
def test_a_mounted_bucket_cannot_be_written(run, tmp_path):
    attempts, _ = run(job("echo light >/mnt/weights/weights.txt", retries=0))
    assert attempts[0].code and (tmp_path / "b" / "weights.txt").read_text() == "heavy\n"


@needs_bubblewrap
def test_the_serving_environment_of_a_project_below_tmp_is_there(run, tmp_path, monkeypatch):
    """That the container's own /tmp would hide."""
    (tmp_path / "serve" / "bin").mkdir(parents=True)
    (tmp_path / "serve" / "bin" / "python").write_text("vLLM's\n")
    monkeypatch.setenv("GEMSMITH_SERVE_PYTHON", str(tmp_path / "serve" / "bin" / "python"))
    assert run(job(f"cat {tmp_path}/serve/bin/python"))[1] == ["vLLM's"]


SECRET = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "latest"}}}]


@needs_bubblewrap
def test_a_secret_arrives_as_a_variable(run):
    assert run(job("echo $HF_TOKEN", env=SECRET), secrets={"hf-token": "s3"})[1] == ["s3"]


def test_a_secret_that_is_missing_starts_nothing(run):
    with pytest.raises(InputError, match="secret hf-token: does not exist"):
        run(job("echo", env=SECRET))
