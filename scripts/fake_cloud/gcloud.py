"""A gcloud for this machine: `gemsmith launch` finds it on PATH, and its jobs run here.

    python scripts/fake_cloud run jobs replace job.yaml …

Storage is a bucket server's, Cloud Run is fake_cloud.cloud_run. What is only asked for (projects, roles, images)
is said to be there; a command that is not known fails. LOCAL_CLOUD is the folder that it keeps:

    jobs/NAME.yaml              as replaced
    executions/NAME-N/          state.json, log.txt, and the tasks' disks
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fake_cloud.cloud_run import read_job, run_task
from gemsmith.system.characters import escape_control_chars

FOLDER, INTERRUPT = "LOCAL_CLOUD", "LOCAL_CLOUD_INTERRUPT"
"""Of the environment: the folder, and a pattern such as gs://runs/my/checkpoints/*.whole; once an object of such a name
is there, the first attempt of the first task loses its machine."""
PROJECT, REGION = "local", "us-central1"


def main(arguments: Sequence[str]) -> int:
    """Does what gcloud would; returns its exit code."""
    words = [word for word in arguments if not word.startswith("-")]
    for begin, answer in ANSWERS.items():
        if " ".join(arguments).startswith(begin):
            count = len(begin.split())
            said = answer(words[count:], list(arguments)) if callable(answer) else answer
            if said:
                print(escape_control_chars(said))
            return 0
    print(escape_control_chars(f"local gcloud: does not know: {' '.join(arguments)}"), file=sys.stderr)
    return 2


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _copy(words: list[str], _arguments: list[str]) -> None:
    """Storage cp --recursive FILE|FOLDER gs://…/."""
    local, remote = Path(words[0]), words[1]
    files = sorted(path for path in local.rglob("*") if path.is_file()) if local.is_dir() else [local]
    store = _open(remote)
    for file in files:
        store.write(str(file.relative_to(local.parent)), file.read_bytes()).result()


def _rsync(words: list[str], _arguments: list[str]) -> None:
    """Storage rsync --recursive … FOLDER gs://…: afterwards there is what the folder has, and nothing else."""
    local, store = Path(words[0]), _open(f"{words[1]}/")
    files = {str(path.relative_to(local)): path for path in local.rglob("*") if path.is_file()}
    for name in {key.decode() for key in store.list().result()} - files.keys():
        store.write(name, None).result()
    for name, path in files.items():
        store.write(name, path.read_bytes()).result()


def _open(url: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.open(url).result()


def _replace(words: list[str], _arguments: list[str]) -> None:
    text = Path(words[0]).read_text(encoding="utf-8")
    jobs = _folder() / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    (jobs / f"{read_job(text).job}.yaml").write_text(text, encoding="utf-8")


def _execute(words: list[str], _arguments: list[str]) -> str:
    """Starts the job in a process that outlives this one."""
    executions = _folder() / "executions"
    folder = executions / f"{words[0]}-{len(list(executions.glob(f'{words[0]}-*'))) + 1}"
    folder.mkdir(parents=True)
    _write_state(folder, {"ended": False, "attempts": []})
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "execution", words[0], str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "pid").write_text(str(process.pid))
    return folder.name


def _run(words: list[str], _arguments: list[str]) -> None:
    """An execution, to its end."""
    job, folder = words[0], Path(words[1])
    task = read_job((_folder() / "jobs" / f"{job}.yaml").read_text(encoding="utf-8"))
    state: dict[str, Any] = {"ended": False, "attempts": []}
    telling = threading.Lock()

    def run(index: int) -> None:
        for attempt in run_task(
            task,
            folder,
            index,
            environment=os.environ,
            log=sys.stdout.buffer,
            secrets={},
            mounted=lambda bucket: _fetch_bucket(bucket, folder / "volumes" / str(index) / bucket),
            interrupt=_interruption(),
        ):
            with telling:
                state["attempts"].append(asdict(attempt))
                _write_state(folder, state)

    try:
        with ThreadPoolExecutor(task.count) as tasks:
            [*tasks.map(run, range(task.count))]
    finally:
        _write_state(folder, state | {"ended": True})


def _interruption() -> Callable[[], bool]:
    address = os.environ.get(INTERRUPT)
    if address is None:
        return lambda: False
    folder = address.partition("*")[0].rpartition("/")[0]
    pattern = address.removeprefix(folder + "/")
    store = _open(folder + "/")
    return lambda: any(fnmatch(key.decode(), pattern) for key in store.list().result())


def _fetch_bucket(bucket: str, folder: Path) -> Path:
    store = _open(f"gs://{bucket}/")
    for name in (key.decode() for key in store.list().result()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(store.read(name).result().value)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    partial = folder / ".state.json"
    partial.write_text(json.dumps(state))
    partial.replace(folder / "state.json")


def read_state(folder: Path) -> dict[str, Any]:
    """How an execution is doing: `ended`, and its attempts so far."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def _executions(_words: list[str], arguments: list[str]) -> str:
    running = any("NOT status.completionTime" in word for word in arguments)
    lines = []
    for folder in sorted((_folder() / "executions").glob("*")):
        state = read_state(folder)
        if not (running and state["ended"]):
            ends = [f"attempt {item['number']} ended with {item['code']}" for item in state["attempts"]]
            more = "" if running else "  " + "; ".join([*ends, "ended" if state["ended"] else "running"])
            lines.append(folder.name + more)
    return "\n".join(lines)


def _jobs(_words: list[str], _arguments: list[str]) -> str:
    return "\n".join(sorted(file.stem for file in (_folder() / "jobs").glob("*.yaml")))


def _cancel(words: list[str], _arguments: list[str]) -> None:
    folder = _folder() / "executions" / words[0]
    with suppress(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    _write_state(folder, read_state(folder) | {"ended": True})


def _delete(words: list[str], _arguments: list[str]) -> None:
    (_folder() / "jobs" / f"{words[0]}.yaml").unlink()


def _logs(_words: list[str], _arguments: list[str]) -> str:
    """Newest first, as --order=desc has them."""
    folders = sorted((_folder() / "executions").glob("*"))
    return "\n".join(reversed((folders[-1] / "log.txt").read_text(encoding="utf-8").splitlines())) if folders else ""


def _policy(_words: list[str], _arguments: list[str]) -> str:
    """The default service account has the role that a launch needs."""
    member = f"serviceAccount:gemsmith@{PROJECT}.iam.gserviceaccount.com"
    return json.dumps({"bindings": [{"role": "roles/storage.objectUser", "members": [member]}]})


ANSWERS: dict[str, str | Callable[[list[str], list[str]], str | None]] = {
    "execution": _run,
    "storage cp": _copy,
    "storage rsync": _rsync,
    "run jobs replace": _replace,
    "run jobs executions list": _executions,
    "run jobs executions cancel": _cancel,
    "run jobs execute": _execute,
    "run jobs list": _jobs,
    "run jobs delete": _delete,
    "run services list": "",
    "logging read": _logs,
    "version": "Google Cloud SDK, a stand-in on this machine",
    "auth list": "you",
    "projects describe": PROJECT,
    "services list": "run.googleapis.com\nstorage.googleapis.com",
    "storage buckets describe": REGION.upper(),
    "storage buckets get-iam-policy": _policy,
    "artifacts docker images describe": "sha256:0",
    "iam service-accounts describe": "gemsmith",
    "beta quotas info list": f"""[{{"quotaId": "NvidiaRtxPro6000GpuAllocNoZonalRedundancyPerProjectRegion",
        "dimensionsInfos": [{{"applicableLocations": ["{REGION}"], "details": {{"value": "1"}}}}]}}]""",
}
"""What a command line begins with -> what is done, or said."""
