"""Cloud Run on this machine: a rendered Job's container command, run as Google's contract for tasks says.

    task         one of taskCount, all at once; CLOUD_RUN_TASK_INDEX counts from 0
    attempt      a machine with nothing on its /tmp, CLOUD_RUN_TASK_ATTEMPT counting from 0
    failure      another attempt, up to maxRetries
    end          after timeoutSeconds, or when the machine is taken away: SIGTERM, and 10 s later SIGKILL
    volume       a bucket's objects, read-only, where the container wants them

The environment at hand stands in for the image: bubblewrap gives it a /tmp, mounts and process numbers of its own.
Memory, processors and GPU are not limited.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

import gemsmith
from gemsmith.errors import InputError, MachineError
from gemsmith.serve.settings import engine_python

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt of a task ended."""

    task: int
    number: int
    code: int
    """Of the command; 128 and the signal's number where a signal ended it."""
    ended_by: str
    """itself, timeout or interruption."""
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a Job's YAML asks for, of each of its tasks."""

    job: str
    count: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    """Variable -> name of the secret."""
    mounts: Mapping[str, str]
    """Folder -> bucket."""
    timeout_s: float
    retries: int


def read_job(text: str) -> Task:
    """The tasks of a Job of kind run.googleapis.com/v1. Raises InputError for what is not understood here."""
    job = yaml.safe_load(text)
    if (job["apiVersion"], job["kind"]) != ("run.googleapis.com/v1", "Job"):
        raise InputError(f"{job['apiVersion']} {job['kind']}: is not a Job of run.googleapis.com/v1")
    execution = job["spec"]["template"]["spec"]
    if execution["taskCount"] != execution.get("parallelism", 1):
        raise InputError(f"taskCount {execution['taskCount']}: only jobs whose tasks all run at once are run here")
    task = execution["template"]["spec"]
    (container,) = task["containers"]
    variables = container.get("env", [])
    buckets = {volume["name"]: _read_only_bucket(volume) for volume in task.get("volumes", [])}
    return Task(
        job=job["metadata"]["name"],
        count=execution["taskCount"],
        command=(*container["command"], *container["args"]),
        environment={item["name"]: item["value"] for item in variables if "value" in item},
        secrets={item["name"]: item["valueFrom"]["secretKeyRef"]["name"] for item in variables if "valueFrom" in item},
        mounts={mount["mountPath"]: buckets[mount["name"]] for mount in container.get("volumeMounts", [])},
        timeout_s=float(task["timeoutSeconds"]),
        retries=task["maxRetries"],
    )


def _read_only_bucket(volume: Mapping[str, Any]) -> str:
    source = volume["csi"]
    if source["driver"] != "gcsfuse.run.googleapis.com" or not source.get("readOnly"):
        raise InputError(f"volume {volume['name']}: only a bucket that is mounted read-only can be mounted here")
    return str(source["volumeAttributes"]["bucketName"])


def run_task(
    task: Task,
    folder: Path,
    index: int = 0,
    *,
    environment: Mapping[str, str],
    log: IO[bytes],
    secrets: Mapping[str, str],
    mounted: Callable[[str], Path],
    interrupt: Callable[[], bool] = lambda: False,
) -> Iterator[Attempt]:
    """The attempts of a task, each once it has ended; the last has code 0, or no retry is left.

    `mounted` gives a folder with a bucket's objects. Where `interrupt` is true, the machine of the first task's first
    attempt is taken away. Raises InputError for a secret that does not exist, MachineError without bubblewrap.
    """
    variables = {**environment, **task.environment, **_secret_values(task, secrets)}
    binds = {path: mounted(bucket) for path, bucket in task.mounts.items()}
    for number in range(task.retries + 1):
        told = {
            "CLOUD_RUN_JOB": task.job,
            "CLOUD_RUN_EXECUTION": f"{task.job}-{folder.name}",
            "CLOUD_RUN_TASK_INDEX": str(index),
            "CLOUD_RUN_TASK_COUNT": str(task.count),
            "CLOUD_RUN_TASK_ATTEMPT": str(number),
        }
        disk = folder / f"tmp-{index}"
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir(parents=True)
        attempt = _attempt(
            index,
            number,
            [*_container(disk, binds), *task.command],
            environment=variables | told,
            log=log,
            timeout_s=task.timeout_s,
            interrupt=interrupt if index == number == 0 else lambda: False,
        )
        yield attempt
        if attempt.code == 0:
            return


def _secret_values(task: Task, secrets: Mapping[str, str]) -> dict[str, str]:
    for name in task.secrets.values():
        if name not in secrets:
            raise InputError(f"secret {name}: does not exist; the job cannot start")
    return {variable: secrets[name] for variable, name in task.secrets.items()}


def _container(disk: Path, binds: Mapping[str, Path]) -> list[str]:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise MachineError("bwrap is not installed, which stands in for a container; install the package bubblewrap")
    # What a project below /tmp has there: packages, both environments and the Python that they were made of.
    ours = {str(Path(gemsmith.__file__).parents[1]), sys.prefix, sys.base_prefix}
    if (serving := engine_python()).is_file():
        ours.add(str(serving.absolute().parents[1]))
    # What the binds need of the host is opened by bubblewrap before /tmp and /mnt are covered.
    command = [bubblewrap, "--dev-bind", "/", "/", "--bind", str(disk), "/tmp", "--tmpfs", "/mnt"]
    command += [word for path in sorted(ours) if path.startswith("/tmp/") for word in ("--ro-bind", path, path)]
    command += [word for path, source in binds.items() for word in ("--ro-bind", str(source), path)]
    return [*command, "--unshare-pid", "--as-pid-1", "--proc", "/proc", "--die-with-parent", "--chdir", "/tmp"]


def _attempt(
    index: int,
    number: int,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: IO[bytes],
    timeout_s: float,
    interrupt: Callable[[], bool],
) -> Attempt:
    begun, ended_by = time.monotonic(), "itself"
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [command[0], "--info-fd", str(writes), *command[1:]],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(writes,),
        start_new_session=True,
    )
    os.close(writes)
    with open(reads, encoding="utf-8") as information:
        told = information.read()
    while process.poll() is None:
        if time.monotonic() - begun > timeout_s:
            ended_by = "timeout"
        elif interrupt():
            ended_by = "interruption"
        if ended_by != "itself":
            _end(process, json.loads(told)["child-pid"])
        time.sleep(_LOOK_S)
    return Attempt(
        task=index,
        number=number,
        code=process.returncode,
        ended_by=ended_by,
        duration_s=round(time.monotonic() - begun, 1),
    )


def _end(process: subprocess.Popen[bytes], inside: int) -> None:
    """Sends SIGTERM to the command, and SIGKILL where it has not ended in time.

    As the container's first process it hears of SIGTERM only if it asked to.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(inside, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.kill(inside, signal.SIGKILL)
        process.wait()
