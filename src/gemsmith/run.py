"""The run directory: the only place that names its files.

    recipe.yaml  plan.json data.json train.json export.json verify.json serve.json bench.json eval.json
    data/  checkpoints/  adapter/  merged/  logs/  tensorboard/  report.html

A stage is complete when its record is there and was made from the same recipe keys and the same upstream records as a record made now.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gemsmith import __version__
from gemsmith.errors import MachineError, RunError, VersionError
from gemsmith.lock import LOCK, explain_missing_locks
from gemsmith.recipe import Derived, Recipe, differing_keys, dump_recipe, flatten, load_recipe, read_reasons
from gemsmith.records import RECORDS, STAGES, Machine, Origin, Record, read_record_file
from gemsmith.resolve import resolve_again, resolve_file

# Linux's list of cores, and enough of it for the first one.
_CPUINFO, _FIRST_CORE_BYTES = Path("/proc/cpuinfo"), 2**14
_WARMUP = "optimizer.warmup_steps"
_STOPS = ("train.on_nonfinite", "train.on_spike")
_TRAINED_DATA = ("data.train", "data.format", "data.template", "data.max_length", "data.packing", "data.too_long")

# What each stage reads: keys of the recipe (or whole sections of it), and the records of earlier stages.
_KEYS: dict[str, tuple[str, ...]] = {
    "plan": ("model", "checkpoint", "data", "lora", "train", "hardware"),
    "data": ("checkpoint", "seed", *_TRAINED_DATA, "train.epochs", "train.optimizer_steps", "train.rows_per_step"),
    "train": ("model", "checkpoint", "seed", *_TRAINED_DATA, "lora", "optimizer", "train"),
    "export": ("export",),
    "verify": (),
    "serve": ("serve",),
    "bench": ("seed", "serve.dtype", "serve.max_model_len", "serve.arguments", "bench"),
    "eval": ("seed", "data.eval", "serve.dtype", "serve.max_model_len", "serve.arguments", "eval"),
}
UPSTREAM: dict[str, tuple[str, ...]] = {
    "plan": (),
    "data": (),
    "train": ("data",),
    "export": ("train",),
    "verify": ("export",),
    "serve": ("export",),
    "bench": ("export",),
    "eval": ("export",),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory and the resolved recipe in it."""

    path: Path
    recipe: Recipe

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        """In a bucket it is an epath.Path, which has the methods of a Path."""
        folder = self.recipe.train.checkpoint_folder
        if folder is None:
            return self.path / "checkpoints"
        return _bucket_path(folder) if "://" in folder else Path(folder)

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def record_file(self, stage: str) -> Path:
        return self.path / f"{stage}.json"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """When a stage began, for its record."""

    started: str
    _begin_s: float

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s


def start_clock() -> Clock:
    return Clock(started=datetime.now(UTC).isoformat(timespec="seconds"), _begin_s=time.monotonic())


def open_run(path: Path, recipe: Recipe, derived: Sequence[Derived] = (), *, redo: str | None = None) -> Run:
    """A run directory for a resolved recipe, made if it is not there.

    Keys that no begun stage has read may change; raises RunError naming those that some stage has read, unless it is `redo`, which is
    about to be run again, or one that depends on it.
    """
    run = Run(path=path, recipe=recipe)
    if run.recipe_file.exists():
        there = load_recipe(run.recipe_file)
        _refuse_another_recipe(run, there, redo)
        derived = _joined_reasons(run, there, derived)
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    run.logs.mkdir(exist_ok=True)
    values = dict(flatten(recipe.model_dump(mode="json")))
    # What is there was made with the recipe there, and both stay until the stage done again has something to put in its place.
    pending = redo is not None and has_begun(run, redo)
    if redo and not pending:
        _next_recipe_file(run).unlink(missing_ok=True)
    file = _next_recipe_file(run) if pending else run.recipe_file
    write_text(file, dump_recipe(recipe, [item for item in derived if values.get(item.key) == item.plain_value]))
    return run


def open_source(
    source: Path, path: Path | None = None, overrides: Sequence[str] = (), *, redo: str | None = None, claim: Callable[[Path], Any]
) -> Run:
    """The run of a recipe (by default in runs/ under the recipe's name) or of a run directory; see open_run.

    `claim(directory)` is called before anything is written, and before a run there is read: to lock it.
    """
    if not source.is_dir():
        folder, resolved = path or Path("runs") / source.stem, resolve_file(source, overrides)
        _refuse_foreign(folder)
        claim(folder)
        return open_run(folder, *resolved, redo=redo)
    if path is not None and path.resolve() != source.resolve():
        raise RunError(f"--run {path}: {source} is a run directory itself; give a recipe, or leave --run out")
    _refuse_no_run(source)
    claim(source)
    return open_run(source, *_resolve_again(source, overrides, redo), redo=redo)


def confirm_recipe(run: Run) -> None:
    """Puts the recipe in place that open_run held back, since the stage that it is for has replaced what was there."""
    with contextlib.suppress(FileNotFoundError):
        _next_recipe_file(run).replace(run.recipe_file)


def find_run(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of an existing run directory, with overrides applied. Raises RunError where there is none."""
    _refuse_no_run(path)
    return load_recipe(path / "recipe.yaml", overrides)


def borrow_run(path: Path, overrides: Sequence[str] = (), *, section: str) -> Run:
    """An existing run with other keys in one section of its recipe, for this time only: its recipe.yaml stays as it is.

    Raises RunError where a key outside the section differs.
    """
    recipe, _ = _resolve_again(path, overrides, None)
    others = [key for key in differing_keys(find_run(path), find_run(path, overrides)) if not key.startswith(f"{section}.")]
    if others:
        raise RunError(f"{others[0]}: cannot be changed here; of the recipe in {path} only keys of {section} can")
    return Run(path=path, recipe=recipe)


def is_complete(run: Run, stage: str) -> bool:
    """Whether the stage's record is there, was made from what is there now, and does not say that a check failed.

    Raises VersionError where another version of Gemsmith wrote it.
    """
    try:
        record = read_record(run, stage)
    except VersionError:
        raise
    except RunError:
        return False
    return getattr(record, "passed", True) and record.origin.made_from == made_from(run, stage) | _own_sources(record, run, stage)


def has_begun(run: Run, stage: str) -> bool:
    """Whether the stage left anything that another recipe's run must not be mixed with."""
    if stage == "train" and run.checkpoints.exists() and any(entry.name != LOCK for entry in run.checkpoints.iterdir()):
        return True
    return run.record_file(stage).exists()


def read_record(run: Run, stage: str) -> Any:
    """The stage's record. Raises RunError naming the command that makes it, where it is missing or damaged, and VersionError."""
    command = f"gemsmith {stage} {run.path}{' --json' if stage == 'serve' else ''}"
    return read_record_file(run.record_file(stage), RECORDS[stage], missing=f"run first: {command}", damaged=f"run: {command}")


def write_record(run: Run, record: Record) -> None:
    """Writes the record whole or not at all."""
    write_text(run.record_file(record.stage), record.model_dump_json(indent=1) + "\n")


def make_origin(run: Run, stage: str, clock: Clock, *, packages: Sequence[str] = (), sources: Mapping[str, str] | None = None) -> Origin:
    """Where a record comes from. `sources`: name -> SHA-256 of what was read beside the recipe and earlier records."""
    from importlib import metadata  # here, since it costs a tenth of the start of a command that needs no versions

    return Origin(
        started=clock.started,
        duration_s=round(clock.elapsed_s(), 3),
        gemsmith=__version__,
        versions={"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        machine=this_machine(),
        seed=run.recipe.seed,
        made_from=made_from(run, stage) | dict(sources or {}),
    )


def made_from(run: Run, stage: str) -> dict[str, str]:
    """What the stage depends on -> SHA-256: its keys of the recipe, and the records before it."""
    hashes = {"recipe": hashlib.sha256(json.dumps(stage_keys(run.recipe, stage), sort_keys=True).encode()).hexdigest()}
    for upstream in UPSTREAM[stage]:
        file = run.record_file(upstream)
        hashes[file.name] = sha256_file(file) if file.exists() else "missing"
    return hashes


def stage_keys(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The dotted keys of the recipe that the stage reads."""
    return {key: value for key, value in flatten(recipe.model_dump(mode="json")) if _reads(stage, key)}


def refused_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that training cannot go on with, with both values.

    What was trained has not met what `stop` would have stopped; what open warm-up came to, the learning rates of its steps say.
    """
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not (key in _STOPS and old.get(key) == "stop")
        and not (key == _WARMUP and old.get(key) is None)
        and key != "train.checkpoint_folder"
    }


def this_machine() -> Machine:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            cpuinfo = file.read(_FIRST_CORE_BYTES)
    except OSError:
        cpuinfo = ""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(cpuinfo),
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
    )


def _processor(cpuinfo: str) -> str:
    """Name and widest vectors of the first core that Linux lists, where it does: two machines of one cloud may differ in both."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    core = {key.strip(): value.strip() for key, _, value in lines}
    flags = core.get("flags", "").split()
    kinds = [platform.machine(), *(name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags)][:2]
    return f"{core['model name']} ({', '.join(kinds)})" if "model name" in core else platform.machine()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    with replacing(path) as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """A text file that takes the place of `path` once it is complete and on disk; on any error `path` stays as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` that takes its place once the block has ended well; on any error `path` stays as it was.

    Killed between its two renames, `path` is gone and the old one beside it; the next call puts it back first. Raises RunError where
    `path` is a symbolic link, or another process is at it.
    """
    beside, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    if path.is_symlink():
        raise RunError(f"{path}: is a symbolic link, which would be replaced by a folder; name the folder itself ({path.resolve()})")
    with _locked_folder(beside):
        if old.exists() and not path.exists():
            old.rename(path)
        try:
            yield beside
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        # From here on the name `beside` may be another process's.
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """An empty folder that is this process's until the block ends; whatever a killed one left there is deleted."""
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{path}: another process is writing there; wait for it, or stop it") from None
        except OSError as error:
            explain_missing_locks(str(path), error)
        # Whoever held the lock before may have renamed the folder: then this is no longer the one at the path.
        if not path.exists() or os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            raise RunError(f"{path}: another process has just written there; run the same command again")
        for left in path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield
    finally:
        os.close(descriptor)


def _next_recipe_file(run: Run) -> Path:
    return run.path / ".recipe.yaml.next"


def _bucket_path(url: str) -> Path:
    # Orbax opens buckets through etils, and that through gcsfs.
    if missing := [name for name in ("etils", "gcsfs") if importlib.util.find_spec(name) is None]:
        raise MachineError(f"train.checkpoint_folder: {url} needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")
    from etils import epath

    return epath.Path(url)


def _reads(stage: str, key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _KEYS[stage])


def _own_sources(record: Record, run: Run, stage: str) -> dict[str, str]:
    """What the stage itself added to made_from: files that it hashed when it ran."""
    known = made_from(run, stage)
    return {name: value for name, value in record.origin.made_from.items() if name not in known}


def _readers(run: Run, key: str, redo: str | None) -> list[str]:
    """The begun stages that have read the key and stay. A plan is made again in no time, so it holds nobody to its keys."""
    readers = [stage for stage in STAGES if stage != "plan" and _reads(stage, key) and has_begun(run, stage)]
    return [stage for stage in readers if redo is None or not _depends_on(stage, redo)]


def _resolve_again(path: Path, overrides: Sequence[str], redo: str | None) -> tuple[Recipe, list[Derived]]:
    run = Run(path=path, recipe=find_run(path))
    return resolve_again(run.recipe, run.recipe_file, overrides, used=lambda key: bool(_readers(run, key, redo)))


def _joined_reasons(run: Run, recipe: Recipe, derived: Sequence[Derived]) -> list[Derived]:
    """The reasons in the run's recipe and the new ones. A value that is there without a reason, and stays the same, gets none."""
    earlier = read_reasons(run.recipe_file.read_text(encoding="utf-8"))
    there, said = dict(flatten(recipe.model_dump(mode="json"))), {item.key for item in earlier}
    return [*earlier, *(item for item in derived if item.key in said or there.get(item.key) != item.plain_value)]


def _depends_on(stage: str, other: str) -> bool:
    return stage == other or any(_depends_on(upstream, other) for upstream in UPSTREAM[stage])


def _refuse_no_run(path: Path) -> None:
    if not (path / "recipe.yaml").exists():
        raise RunError(f"run directory {path}: holds no recipe.yaml; start one in a new folder with: gemsmith run RECIPE --run FOLDER")


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not (path / "recipe.yaml").exists() and any(file.name != LOCK for file in path.iterdir()):
        raise RunError(f"run directory {path}: is not empty and holds no recipe.yaml; name another with --run")


def _refuse_another_recipe(run: Run, there: Recipe, redo: str | None) -> None:
    for key, (old, new) in differing_keys(there, run.recipe).items():
        if key in _STOPS and old == "stop" and not run.record_file("train").exists():
            continue
        if key == _WARMUP and old is None and not run.record_file("train").exists():
            continue  # how far the steps so far had it, training finds in their learning rates
        if readers := _readers(run, key, redo):
            raise RunError(
                f"run directory {run.path}: belongs to another recipe: {key} is {json.dumps(old)} there and {json.dumps(new)} here, "
                f"and {readers[0]} has used it; name another directory with --run"
            )
