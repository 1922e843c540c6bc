"""The run directory: the only place that names its files.

    recipe.yaml  plan.json data.json train.json export.json verify.json serve.json bench.json eval.json
    data/  images/  checkpoints/  adapter/  merged/  logs/  tensorboard/  report.html  rows-HASH.jsonl

A stage is complete when its record was made from the same recipe keys and upstream records as one made now.
"""

import contextlib
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gemsmith.errors import RunError, VersionError
from gemsmith.recipe.load import (
    differing_keys,
    differing_values,
    dump_recipe,
    load_recipe,
    plain_values,
    read_reasons,
    task_files,
    with_values,
)
from gemsmith.recipe.schema import Recipe, ResolvedValue
from gemsmith.runs.records import Computer, Provenance, Record, RecordT, TrainStep, read_record_file
from gemsmith.runs.resolve import Resolved, absolute_paths, resolve_again, resolve_file
from gemsmith.runs.stages import STAGES, depends_on, reads
from gemsmith.system.files import bucket_path, is_system_folder, sha256_file, sha256_json, write_text
from gemsmith.system.locks import LOCK
from gemsmith.system.version import __version__

_WARMUP = "optimizer.warmup_steps"
_STOPS = ("train.on_nonfinite", "train.on_spike")
_LENGTH = {"train.max_steps": "--steps", "train.epochs": "--epochs"}
# Linux's list of cores, and enough of it for the first one.
_CPUINFO, _FIRST_CORE_BYTES = Path("/proc/cpuinfo"), 2**14


@dataclass(frozen=True, kw_only=True)
class ExportDir:
    """A folder that export wrote without a run. What it holds is called as in a run directory."""

    path: Path

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def record_file(self, stage: str) -> Path:
        return self.path / f"{stage}.json"


@dataclass(frozen=True, kw_only=True)
class Run(ExportDir):
    """A run directory and the resolved recipe in it."""

    recipe: Recipe
    callbacks: tuple[Callable[[TrainStep], object], ...] = ()
    """Called with each step of training in the process that has the run, once the step is logged."""
    told: set[str] = field(default_factory=set, compare=False, repr=False)
    """Warnings that were printed before their record was there, and need not be again."""

    @property
    def records(self) -> dict[str, Record]:
        """What there is so far, by stage. Raises RunError for a record that is damaged."""
        there = {name: stage.record for name, stage in STAGES.items() if self.record_file(name).exists()}
        return {name: read_record(self, record) for name, record in there.items()}

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def images(self) -> Path:
        """Files of images that the rows held as bytes."""
        return self.path / "images"

    @property
    def checkpoints(self) -> Path:
        """In a bucket it is an epath.Path, which has the methods of a Path."""
        folder = self.recipe.train.checkpoint_folder
        if folder is None:
            return self.path / "checkpoints"
        return bucket_path(folder) if "://" in folder else Path(folder)

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def open_run(path: Path, recipe: Recipe, derived: Sequence[ResolvedValue] = (), *, force: tuple[str, ...] = ()) -> Run:
    """A run directory for a resolved recipe, made if it does not exist.

    Keys that no begun stage has read may change; raises RunError naming those that some stage has read, unless it is
    one of `force`, which are about to be run again, or depends on one.
    """
    recipe = with_values(recipe, absolute_paths(recipe))
    run = Run(path=path, recipe=recipe)
    if run.recipe_file.exists():
        there = load_recipe(run.recipe_file)
        _refuse_another_recipe(run, there, force)
        # A value that was there without a reason and is the same gets none.
        earlier = read_reasons(run.recipe_file.read_text(encoding="utf-8"))
        given, said = plain_values(there), {item.key for item in earlier}
        new = (item for item in derived if item.key in said or given.get(item.key) != item.plain_value)
        derived = [*earlier, *new]
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    values = plain_values(recipe)
    # What is there was made with the recipe there; both stay until the stage done again has something in their place.
    pending = any(has_outputs(run, stage) for stage in force)
    if force and not pending:
        _next_recipe_file(run).unlink(missing_ok=True)
    file = _next_recipe_file(run) if pending else run.recipe_file
    write_text(file, dump_recipe(recipe, [item for item in derived if values.get(item.key) == item.plain_value]))
    run.logs.mkdir(exist_ok=True)  # a folder without a recipe, as a full disk would leave it, is taken for another's
    return run


def open_source(
    source: Path,
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    force: tuple[str, ...] = (),
    lock: Callable[[Path], Any],
    check: Callable[[Run], None] | None = None,
) -> Run:
    """The run of a recipe (by default in runs/ under the recipe's name) or of a run directory; see open_run.

    `lock(directory)` is called before anything is written, and before a run there is read: to lock it. `check` is asked
    before that, of a recipe, and in place of what the recipe says of all stages.
    """
    if not source.is_dir():
        folder = path or Path("runs") / source.stem
        resolved = resolve_file(source, overrides, stages=() if check else tuple(STAGES))
        _refuse_foreign(folder)
        if check:
            check(Run(path=folder, recipe=resolved[0]))
        lock(folder)
        return open_run(folder, *resolved, force=force)
    if path is not None and path.resolve() != source.resolve():
        raise RunError(f"--run {path}: {source} is a run directory itself; give a recipe, or leave --run out")
    _refuse_no_run(source)
    lock(source)
    return open_run(source, *resolve_run(source, overrides, force), force=force)


def check_directory(run: Run) -> None:
    """Raises RunError where open_run would not take the run's directory; nothing is written."""
    _refuse_foreign(run.path)
    if run.recipe_file.exists():
        _refuse_another_recipe(run, load_recipe(run.recipe_file), ())


def commit_recipe(run: Run) -> None:
    """Puts the recipe in place that open_run held back, since the stage that it is for has replaced what was there."""
    with contextlib.suppress(FileNotFoundError):
        _next_recipe_file(run).replace(run.recipe_file)


def find_run(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of an existing run directory, with overrides applied. Raises RunError where there is none."""
    _refuse_no_run(path)
    return load_recipe(path / "recipe.yaml", overrides)


def resolve_run(path: Path, overrides: Sequence[str] = (), force: tuple[str, ...] = ()) -> Resolved:
    """What `resolve_again` makes of the recipe in a run directory; what a begun stage has used stays."""
    run = Run(path=path, recipe=find_run(path))
    return resolve_again(run.recipe, run.recipe_file, overrides, used=lambda key: bool(_readers(run, key, force)))


def open_run_readonly(path: Path, overrides: Sequence[str] = (), *, section: str) -> Run:
    """An existing run with other keys in one section, for this time only. Raises RunError for keys of others."""
    recipe, _ = resolve_run(path, overrides)
    changed = differing_keys(find_run(path), find_run(path, overrides))
    if others := [key for key in changed if not key.startswith(f"{section}.")]:
        raise RunError(f"{others[0]}: cannot be changed here; of the recipe in {path} only keys of {section} can")
    return Run(path=path, recipe=recipe)


def is_up_to_date(run: Run, stage: str) -> bool:
    """Whether the stage's record is there, made from what is there now, and no check failed. Raises VersionError."""
    try:
        record = read_record(run, STAGES[stage].record)
    except VersionError:
        raise
    except RunError:
        return False
    return getattr(record, "passed", True) and not is_stale(run, record)


def is_stale(run: Run, record: Record) -> bool:
    """Whether the record was made from other keys, files or records than those there now."""
    # Beside these a record has what the stage hashed as it ran.
    now, then = inputs_sha256(run, record.stage), record.provenance.inputs_sha256
    return any(then.get(name) != value for name, value in now.items())


def has_outputs(run: Run, stage: str) -> bool:
    """Whether the stage left anything that another recipe's run must not be mixed with."""
    if stage == "train" and run.checkpoints.exists() and any(entry.name != LOCK for entry in run.checkpoints.iterdir()):
        return True
    return run.record_file(stage).exists()


def read_record(place: ExportDir, kind: type[RecordT]) -> RecordT:
    """A stage's record. Raises VersionError, and RunError naming the command that makes a missing or damaged one."""
    command = f"gemsmith {kind.stage} {place.path}{' --json' if kind.stage == 'serve' else ''}"
    missing, damaged = f"run first: {command}", f"run: {command}"
    if kind.stage == "export" and not isinstance(place, Run):
        missing, damaged = "give a run directory, or a folder that gemsmith export wrote", "export again, with --force"
    if kind.stage == "lm_eval":
        damaged = "run: gemsmith eval --lm-eval with its tasks"
    return read_record_file(place.record_file(kind.stage), kind, missing=missing, damaged=damaged)


def write_record(place: ExportDir, record: RecordT) -> RecordT:
    """The record, once it is written whole."""
    write_text(place.record_file(record.stage), record.model_dump_json(indent=1) + "\n")
    return record


@dataclass(frozen=True, kw_only=True)
class Clock:
    """When a stage began, for its record."""

    started: str
    _begin_s: float

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s


def start_clock() -> Clock:
    return Clock(started=datetime.now(UTC).isoformat(timespec="seconds"), _begin_s=time.monotonic())


def host_info() -> Computer:
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            cpuinfo = file.read(_FIRST_CORE_BYTES)
    except OSError:
        cpuinfo = ""
    # Name and widest vectors of the first core that Linux lists: two machines of one cloud may differ in both.
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    core = {key.strip(): value.strip() for key, _, value in lines}
    flags = core.get("flags", "").split()
    widest = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None)
    kind = ", ".join(filter(None, (platform.machine(), widest)))
    return Computer(
        system=f"{platform.system()} {platform.release()}",
        processor=f"{core['model name']} ({kind})" if "model name" in core else platform.machine(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def make_provenance(
    place: ExportDir,
    stage: str,
    clock: Clock,
    *,
    packages: Sequence[str] = (),
    engine: str = "",
    sources: Mapping[str, str] | None = None,
) -> Provenance:
    """Where a record comes from. `sources`: name -> SHA-256 of what was read beside the recipe and earlier records.

    `engine`: name and version of what lives in an environment of its own, such as `vllm 0.32.0`.
    """
    from importlib import metadata  # here, since it costs a tenth of the start of a command that needs no versions

    package, _, version = engine.partition(" ")
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    return Provenance(
        started=clock.started,
        duration_s=round(clock.elapsed_s(), 3),
        gemsmith=__version__,
        versions=versions | ({package: version} if engine else {}),
        machine=host_info(),
        seed=place.recipe.seed if isinstance(place, Run) else 0,
        inputs_sha256=(inputs_sha256(place, stage) if isinstance(place, Run) else {}) | dict(sources or {}),
    )


def inputs_sha256(run: Run, stage: str) -> dict[str, str]:
    """What the stage depends on -> SHA-256: its keys of the recipe, the tasks' files in them, the records before it."""
    keys = stage_keys(run.recipe, stage)
    hashes = {"recipe": sha256_json(keys)}
    files = {key: Path(file) for key, file in task_files(keys).items()}
    files |= {file.name: file for file in map(run.record_file, STAGES[stage].upstream)}
    return hashes | {name: sha256_file(file) if file.is_file() else "missing" for name, file in files.items()}


def unproven_keys(run: Run, records: Iterable[Record]) -> set[str]:
    """All keys that the stage of a record reads, where their hash in the record is not that of the recipe there now."""
    keys = set[str]()
    for one in records:
        if one.provenance.inputs_sha256.get("recipe") != inputs_sha256(run, one.stage)["recipe"]:
            keys |= stage_keys(run.recipe, one.stage).keys()
    return keys


def stage_keys(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The dotted keys of the recipe that the stage reads, with their values."""
    values = plain_values(recipe).items()
    also = {"image_requests": recipe.bench.images, "held_out": recipe.train.eval_steps is not None}
    return {key: value for key, value in values if reads(stage, key, **also)}


def incompatible_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that training cannot resume with, with both values.

    What was trained has not met what `stop` would have stopped; what a warm-up came to that is open or a share of the
    steps, their learning rates say; and how many steps there were to be, it says itself.
    """
    return {
        key: values
        for key, values in differing_values(old, new).items()
        if not _is_open(key, values[0]) and key not in ("train.checkpoint_folder", "optimizer.warmup_ratio", *_LENGTH)
    }


def _is_open(key: str, value: Any) -> bool:
    """Whether no step so far depends on the value of the key."""
    return value == "stop" if key in _STOPS else key == _WARMUP and value is None


def _next_recipe_file(run: Run) -> Path:
    return run.path / ".recipe.yaml.next"


def _readers(run: Run, key: str, force: tuple[str, ...]) -> list[str]:
    """The begun stages that have read the key and stay, without the plan, which is made again in no time."""
    held_out = run.recipe.train.eval_steps is not None
    readers = [stage for stage in STAGES if stage != "plan" and reads(stage, key, held_out=held_out)]
    return [one for one in readers if has_outputs(run, one) and not any(depends_on(one, each) for each in force)]


def _refuse_no_run(path: Path) -> None:
    if path.is_file():
        raise RunError(f"run directory {path}: is a file; give the directory of its run, such as runs/{path.stem}")
    if not (path / "recipe.yaml").exists():
        remedy = "start one in a new folder with: gemsmith run RECIPE --run FOLDER"
        raise RunError(f"run directory {path}: holds no recipe.yaml; {remedy}")


def _refuse_foreign(path: Path) -> None:
    if "\0" not in str(path) and is_system_folder(path):
        raise RunError(f"run directory {path}: is the system's; name a folder of your own with --run")
    if path.exists() and not (path / "recipe.yaml").exists() and any(file.name != LOCK for file in path.iterdir()):
        raise RunError(f"run directory {path}: is not empty and holds no recipe.yaml; name another with --run")


def _refuse_another_recipe(run: Run, there: Recipe, force: tuple[str, ...]) -> None:
    differing, used = differing_keys(there, run.recipe), dict[str, str]()
    for key, (old, _) in differing.items():
        # How far the steps so far had warm-up, training finds in their learning rates.
        if (not _is_open(key, old) or run.record_file("train").exists()) and (readers := _readers(run, key, force)):
            used[key] = readers[0]
    if not used:
        return
    key = next(iter(used))
    (old, new), stage = differing[key], min(used.values(), key=[*STAGES].index)
    wanted = {name: json.dumps(differing[name][1]) for name in used if not _readers(run, name, (*force, stage))}
    values = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in wanted.items())
    remedy = f"do that again with: gemsmith {stage} {run.path} {values} --force"
    if key in _LENGTH and len(used) == 1:
        if new is None or (old is not None and new < old):
            remedy = f"resume it as it is: gemsmith run {run.path}; or {remedy}"
        else:
            remedy = f"once it is trained, train on with: gemsmith train {run.path} {_LENGTH[key]} {new}"
    why = f"{key} is {json.dumps(old)} there and {json.dumps(new)} here, and {used[key]} has used it"
    remedy += "; or name another directory with --run"
    raise RunError(f"run directory {run.path}: belongs to another recipe: {why}; {remedy}")
