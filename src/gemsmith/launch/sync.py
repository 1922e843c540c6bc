"""A run directory and its copy in a bucket, which a launched run writes and is brought home from.

    ROOT/launched/recipe.yaml  inputs/     what the launch brought
    ROOT/run/                              the run directory
    ROOT/checkpoints/<step>/  <step>.whole saved steps; only those with the second are whole
    ROOT/writer                            the machine that writes there now
    ROOT/answers/KEY/1-of-2/               a run directory and its writer, of what a task has answered (launch.worker)

At any moment the copy is a run that could have been stopped there: before a stage's files are changed its old record is
deleted, and the new record is written after all of them, saved steps among them. So a record in the bucket is never of
other files than those beside it. A saved step is read only once `<step>.whole`, written last and deleted first, is
there.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.errors import GemsmithError, RunError
from gemsmith.runs.run import start_clock
from gemsmith.runs.stages import STAGES
from gemsmith.system.files import sha256_file
from gemsmith.system.storage import Bucket, files_below

RUN, CHECKPOINTS, LAUNCHED = "run/", "checkpoints/", "launched/"
RECORDS = tuple(f"{stage}.json" for stage in STAGES)
_WRITER, _WHOLE = "writer", ".whole"
_BETWEEN_LOOKS_S = 5.0
_LARGE = ("merged", "data")  # folders that can be made again, and that nothing at home needs at first
_State = dict[str, tuple[int, int]]


class RunSync:
    """One machine's side of the copy; it is the only one that writes, until another takes over."""

    def __init__(self, bucket: Bucket, run: Path) -> None:
        self._bucket, self._run, self._checkpoints = bucket, run, run / "checkpoints"
        self._there: _State = {}
        self._steps: set[int] = set()
        self._token = secrets.token_hex(8).encode()
        self._sending = threading.RLock()

    def acquire_lease(self) -> None:
        """From now on another machine that wrote there refuses to continue, such as one that was given up as lost."""
        self._bucket.write(_WRITER, self._token)

    def fetch(self, *, without: Collection[str] = ()) -> None:
        """Copies the run from the bucket, but folders in `without`, and the saved steps that are whole."""
        fetched = fetch_run(self._bucket, self._run, without=without)
        self._there = {name: seen for name, seen in _state(self._run).items() if name in fetched}
        for step in complete_checkpoints(self._bucket):
            fetch_step(self._bucket, step, self._checkpoints)
            self._steps.add(step)

    def send(self) -> None:
        """Copies what has changed since to the bucket, records last: that of training after its saved steps."""
        with self._sending:
            self.send_steps()
            self._refuse_another()
            now = _state(self._run)
            changed = [name for name in now if self._there.get(name) != now[name]]
            gone = [name for name in self._there if name not in now]
            for name in [name for name in (*changed, *gone) if name in RECORDS]:
                self._bucket.delete(RUN + name)
            for name in sorted(changed, key=_records_last):
                if name in RECORDS:
                    self._refuse_another()
                self._bucket.upload(self._run / name, RUN + name)
                self._there[name] = now[name]
            for name in gone:
                self._bucket.delete(RUN + name)
                del self._there[name]

    def send_steps(self) -> None:
        """Copies saved steps that are new and whole, and deletes those that training has deleted."""
        # One at a time: a signal that ends the wait for the watching thread does not end that thread.
        with self._sending:
            steps = set(checkpoint_steps(self._checkpoints))
            for step in sorted(steps - self._steps):
                self._refuse_another()
                if self._send_step(self._checkpoints / str(step), step):
                    self._steps.add(step)
            for step in sorted(self._steps - steps):
                delete_step(self._bucket, step)
                self._steps.discard(step)

    @contextlib.contextmanager
    def watching(self, send: Callable[[], None] | None = None) -> Iterator[None]:
        """Copies saved steps, or what `send` does, as they come, while the block runs; `send` copies what is left."""
        ended, failures = threading.Event(), []

        def watch() -> None:
            took_s = 0.0
            while not ended.wait(max(_BETWEEN_LOOKS_S, took_s)):
                clock = start_clock()
                try:
                    (send or self.send_steps)()
                except (GemsmithError, FileNotFoundError) as error:
                    # The next look tries again, or `send`, where it is not caught.
                    failures.append(str(error))
                took_s = clock.elapsed_s()

        thread = threading.Thread(target=watch, name="saved steps to the bucket", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.failures = tuple(failures)

    failures: tuple[str, ...] = ()
    """What went wrong while saved steps were copied, of the last block; what it was about was copied later."""

    def _send_step(self, folder: Path, step: int) -> bool:
        """Whether the step is in the bucket now; training may delete it meanwhile."""
        try:
            files = list(files_below(folder, hidden=True))
            sums = {name: sha256_file(path) for name, path in files}
            for name, path in files:
                self._bucket.upload(path, f"{CHECKPOINTS}{step}/{name}")
        except FileNotFoundError:
            return False
        self._bucket.write(f"{CHECKPOINTS}{step}{_WHOLE}", json.dumps(sums).encode())
        return True

    def _refuse_another(self) -> None:
        if self._bucket.read(_WRITER) not in (self._token, None):
            what = "another machine has taken this run over since"
            raise RunError(f"{self._bucket.url}: {what}; this one stops, and nothing that it did since is kept")


def fetch_run(bucket: Bucket, run: Path, *, without: Collection[str] = ()) -> list[str]:
    """Copies the run directory from the bucket, without the folders in `without`; returns the names, records last.

    Names are listed once, before anything is read: of a run that is being written the records that are fetched are
    those whose files were there. Those of an earlier copy are deleted before its files are replaced.
    """
    names = [name.removeprefix(RUN) for name in bucket.names(RUN)]
    names = sorted((name for name in names if name.partition("/")[0] not in without), key=_records_last)
    for name in names:
        if name in RECORDS:
            (run / name).unlink(missing_ok=True)
    for name in names:
        bucket.download(RUN + name, _inside(run, name))
    return names


def complete_checkpoints(bucket: Bucket) -> list[int]:
    """The saved steps in the bucket that are complete."""
    names = (name.removeprefix(CHECKPOINTS) for name in bucket.names(CHECKPOINTS))
    stems = (name.removesuffix(_WHOLE) for name in names if name.endswith(_WHOLE))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def fetch_step(bucket: Bucket, step: int, checkpoints: Path) -> None:
    """Copies a saved step from the bucket. Raises RunError where its files are not those that were saved."""
    sums = json.loads(bucket.read(f"{CHECKPOINTS}{step}{_WHOLE}") or b"{}")
    for name, expected in sums.items():
        target = _inside(checkpoints / str(step), name)
        bucket.download(f"{CHECKPOINTS}{step}/{name}", target)
        if sha256_file(target) != expected:
            remedy = f"delete {CHECKPOINTS}{step}{_WHOLE} there, and training resumes from the step before"
            raise RunError(f"{bucket.url}/{CHECKPOINTS}{step}/{name}: is not what was saved; {remedy}")


def delete_step(bucket: Bucket, step: int) -> None:
    """Deletes a saved step, first what says that it is whole."""
    bucket.delete(f"{CHECKPOINTS}{step}{_WHOLE}")
    for name in bucket.names(f"{CHECKPOINTS}{step}/"):
        bucket.delete(name)


def _inside(folder: Path, name: str) -> Path:
    """The path of a name in the folder. Raises RunError for one that would lead out of it."""
    if name.startswith("/") or ".." in name.split("/"):
        raise RunError(f"{name}: leads out of the run directory, so it is not one of ours; delete it in the bucket")
    return folder / name


def _state(run: Path) -> _State:
    """File -> when it was changed, and its size. Saved steps are copied by themselves."""
    files = ((name, path.stat()) for name, path in files_below(run) if not name.startswith("checkpoints/"))
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in files}


def _records_last(name: str) -> tuple[int, str]:
    return (1 + RECORDS.index(name), name) if name in RECORDS else (0, name)


def fetch_home(root: str, path: Path, *, merged: bool) -> int:
    """How many files a run directory has once the bucket's run is there. Raises RunError where either is no run."""
    fetch_run(_opened(root, path), path, without=() if merged else _LARGE)
    return sum(1 for _ in files_below(path))


def fetch_records(root: str, path: Path) -> None:
    """Copies the recipe and the records alone, which is all that a report needs."""
    bucket = _opened(root, path)
    there = bucket.names(RUN)
    for name in ("recipe.yaml", *RECORDS):
        if f"{RUN}{name}" in there:
            bucket.download(RUN + name, path / name)


def _opened(root: str, path: Path) -> Bucket:
    bucket = Bucket(root)
    if bucket.read(f"{RUN}recipe.yaml") is None:
        remedy = "see how it is doing: gemsmith launch status NAME"
        raise RunError(f"{bucket.url}: holds no run yet ({RUN}recipe.yaml does not exist); {remedy}")
    if path.exists() and not (path / "recipe.yaml").exists() and any(files_below(path)):
        raise RunError(f"run directory {path}: is not empty and holds no recipe.yaml; name another with --run")
    return bucket
