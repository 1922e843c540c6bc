"""What would stop a run: every check of every stage, in one list for doctor, plan, run and launch.

Nothing is written to a run directory. Of a checkpoint that is elsewhere doctor fetches configuration and tokenizer.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, NamedTuple

from gemsmith.arch import VARIANTS
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint
from gemsmith.errors import USERS_ERRNOS, GemsmithError, InputError, MachineError, as_one, explain_os_error, raise_all
from gemsmith.hardware import find_machine, load_catalog, machines_with
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.checks import eval_share
from gemsmith.recipe.load import load_recipe, plain_values, task_files
from gemsmith.recipe.schema import Train, eval_tasks, sources_of
from gemsmith.runs.resolve import check_settings, recipe_variant, resolve_file
from gemsmith.runs.run import Run, check_directory, is_up_to_date, resolve_run
from gemsmith.runs.stages import SERVED, STAGES
from gemsmith.system.files import expanduser, is_system_folder
from gemsmith.system.format import memory, size
from gemsmith.system.sandbox import find_sandbox
from gemsmith.tasks import SOURCES, is_prompt_file, is_task_file

Guard = Callable[[], AbstractContextManager[None]]
Depth = Literal["names", "here", "all"]
"""What is asked: on any machine, the recipe and the names in it; here, what a run begins with; or what doctor does."""
_DEPTHS: tuple[Depth, ...] = ("names", "here", "all")


class Finding(NamedTuple):
    state: Literal["ok", "fails", "skipped"]
    check: str
    detail: str  # what was found; where it fails, the error's own line with its remedy


class _SkippedError(Exception):
    """Nothing to check; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a check is asked about; `stages` are those that are to run."""

    run: Run
    stages: Collection[str] = tuple(STAGES)
    depth: Depth = "all"
    checkpoint: Checkpoint | None = None


class Preflight(NamedTuple):
    find: Callable[[Case], str]
    stages: Collection[str]  # those that it would stop
    depth: Depth  # from which depth on it is asked
    resolved: bool = False  # whether it needs the values that are derived from a recipe


def find_problems(run: Run, stages: Collection[str], depth: Depth = "here") -> dict[str, tuple[str, InputError]]:
    """What is known to stop these stages before one has begun, by its line: the check's name, and the error.

    A stage that is complete is not to be among them: what it has read may be gone.
    """
    case, found = Case(run=run, stages=stages, depth=depth), dict[str, tuple[str, InputError]]()
    for name, check in CHECKS.items():
        if set(check.stages).isdisjoint(stages) or _DEPTHS.index(check.depth) > _DEPTHS.index(depth):
            continue
        try:
            check.find(case)
        except _SkippedError:
            continue
        except InputError as error:
            for problem in error.problems:
                found.setdefault(str(problem), (name, problem))
    return found


def refuse_problems(run: Run, stages: Collection[str], depth: Depth = "here") -> list[str]:
    """Raises InputError with all that find_problems finds, but for a vLLM that is missing; what is said of that."""
    found = find_problems(run, stages, depth).values()
    if problems := [error for name, error in found if name != _VLLM]:
        raise as_one(problems)
    return [str(error) for _, error in found]


def refuse_before(run: Run, stages: Collection[str], *, force: bool) -> None:
    """Raises the same before there is a run directory, where the recipe or a name in it is to blame for any of it."""
    to_run = [stage for stage in stages if force or not is_up_to_date(run, stage)]
    if found := find_problems(run, to_run, "names"):
        found |= find_problems(run, to_run)
        raise as_one([error for name, error in found.values() if name != _VLLM])


def plan_warnings(run: Run) -> list[str]:
    """All that would stop a run on any machine. Raises it where settings do, of which there is no plan."""
    found = find_problems(run, tuple(STAGES), "names")
    if not {"training", "serving"}.isdisjoint(name for name, _ in found.values()):
        raise as_one([error for _, error in found.values()])
    return list(found)


def examine(source: Path, path: Path | None, overrides: Sequence[str], guard: Guard) -> Iterator[Finding]:
    """Findings of each check of the recipe, or of the recipe in a run directory, as each is made.

    `path` is the run directory of a recipe, by default that of `gemsmith run`.
    `guard` is entered around each and makes an InputError of a library that is not installed.
    """
    in_run, found = source.is_dir(), list[Run]()
    file, place = (source / "recipe.yaml", source) if in_run else (source, path or Path("runs") / source.stem)

    def read() -> str:
        found.append(Run(path=place, recipe=load_recipe(file, overrides)))
        recipe, derived = resolve_run(source, overrides) if in_run else resolve_file(file, overrides, stages=())
        found[0] = Run(path=place, recipe=recipe)
        return f"{file}: {recipe.model}, {len(derived)} values derived"

    yield from (read_recipe := _check("recipe", read, guard))
    if not found:
        return
    (run,), opened = found, list[Checkpoint]()

    def open_base() -> str:
        opened.append(checkpoint := _open_base(run))
        if not checkpoint.places:
            return f"{checkpoint.source}: reached; the first stage fetches its weights"
        files = {place.file for place in checkpoint.places.values()}
        weights = size(sum(file.stat().st_size for file in files))
        return f"{checkpoint.folder}: {len(checkpoint.places)} tensors, {weights} in {len(files)} files"

    yield from (opened_base := _check("checkpoint", open_base, guard))
    told = {base.detail: base.check for base in opened_base}
    case = Case(run=run, checkpoint=opened[0] if opened else None)
    # A share of data.train is rows of it once it is derived.
    shared = ("rows", "scoring") if eval_share(run.recipe.data) is not None else ()
    for name, check in CHECKS.items():
        if read_recipe[0].state == "fails" and (check.resolved or name in shared):
            yield Finding("skipped", name, "needs a recipe that passes")
            continue
        for finding in _check(name, partial(check.find, case), guard):
            first = told.setdefault(finding.detail, name) if finding.state == "fails" else name
            yield finding if first == name else Finding("skipped", name, f"fails as {first} does")


def _check(name: str, check: Callable[[], str], guard: Guard) -> list[Finding]:
    try:
        with guard():
            return [Finding("ok", name, check())]
    except _SkippedError as reason:
        return [Finding("skipped", name, str(reason))]
    except GemsmithError as error:
        return [Finding("fails", name, str(problem)) for problem in error.problems]
    except OSError as error:
        return [Finding("fails", name, explain_os_error(error) if error.errno in USERS_ERRNOS else str(error))]


def _open_base(run: Run) -> Checkpoint:
    return open_checkpoint(run.recipe.checkpoint, variant=VARIANTS.get(run.recipe.model or ""), weights=False)


def _files(case: Case) -> str:
    """Of names alone it is asked whether something is there; whatever loads what is not says so, and runs nothing."""
    recipe, stages, reads = case.run.recipe, {*case.stages}, case.depth != "names"
    data, train, checks = recipe.data, recipe.train, list[Callable[[], object]]()

    def ask(place: str, function: str, *arguments: object, always: bool = False) -> None:
        elsewhere = "://" in place or place.startswith("hub:")
        if always or not (elsewhere or os.path.exists(expanduser(place))):
            # Named with a colon: without one a library that the module lacks passes for a name that is not there.
            checks.append(partial(resolve_name(f"gemsmith.{function}"), *arguments))

    light = not reads and data.format != "image-folder"  # where it is the same, and imported in 5 ms, not in 160
    find, form = ("data.reader:find_files", []) if light else ("data.dataset:find_source_files", [data.format])
    for source in data.sources if "data" in stages else ():
        ask(source, find, source, *form, always=reads)
    if ("eval" in stages or (train.eval_steps and "data" in stages)) and eval_share(data) is None:
        for source in sources_of(data.eval):
            ask(source, find, source, *form)
    if data.template and stages & {"data", *SERVED}:
        ask(data.template, "data.chat_template:check_template", data.template, always=reads)
    if train.init_adapter and "train" in stages:
        config, variant = f"{train.init_adapter}/adapter_config.json", recipe_variant(recipe)
        ask(config, "train.inputs:load_init_adapter", recipe, variant)
    for key, file in task_files(plain_values(recipe)).items():
        if is_task_file(file) and ("data" if key == "data.train.task" else "eval") in stages:
            ask(file, f"tasks:find_{'generator' if key.startswith('data.') else 'scorer'}", file)
    for entry in recipe.eval.tasks if "eval" in stages else ():
        if is_prompt_file(entry.prompt):
            ask(str(entry.prompt), "evals.tasks:prompt_of", entry, always=True)
        if entry.dataset:
            ask(entry.dataset, "tasks:source_questions", entry.task, entry.dataset, "")
    if reads and stages & {"data", "train", "export", "verify", "eval"}:
        ask(recipe.checkpoint, "checkpoints.folder:check_source", recipe.checkpoint, always=True)
    if "train" in stages:
        checks.append(partial(_checkpoint_folder, train))
    raise_all(checks)
    return "those that the recipe names are there"


def _checkpoint_folder(train: Train) -> None:
    if train.checkpoint_folder and is_system_folder(train.checkpoint_folder):
        remedy = "name a folder of your own, or leave it out"
        raise InputError(f"train.checkpoint_folder: {train.checkpoint_folder} is the system's; {remedy}")


def _opened(case: Case) -> Checkpoint:
    if case.checkpoint is None:
        raise _SkippedError("needs a checkpoint that passes")
    return case.checkpoint


def _tokenizer(case: Case) -> str:
    from gemsmith.data.chat_template import find_template
    from gemsmith.data.stage import check_tokenizer

    found = _opened(case)
    check_tokenizer(found)
    return f"its ids fit the model; chat template: {find_template(found.folder, case.run.recipe.data).source}"


def _rows(case: Case) -> str:
    from gemsmith.data.stage import count_usable, describe_dropped

    recipe = case.run.recipe
    kept, dropped = count_usable(recipe, _opened(case))
    return f"data.train: {kept:,} rows are read and rendered{describe_dropped(dropped, recipe.data)}"


def _scoring(case: Case) -> str:
    from gemsmith.evals.tasks import check_tasks

    if not (tasks := eval_tasks(case.run.recipe)):
        raise _SkippedError("data.eval names no held-out rows")
    check_tasks(case.run)
    return f"questions are read, scorers are here: {', '.join(task.task for task in tasks)}"


def _sandbox(case: Case) -> str:
    if not (running := [task for task in eval_tasks(case.run.recipe) if task.task in SOURCES]):
        raise _SkippedError("no task runs generated code")
    sandbox = find_sandbox(unsafe=all(task.unsafe for task in running))
    return sandbox.bubblewrap or "none, as eval.tasks asks for with unsafe"


def _settings(names: Collection[str], case: Case) -> str:
    asked = names if case.depth == "names" else [stage for stage in names if stage in case.stages]
    check_settings(case.run.recipe, asked)
    return f"settings of {', '.join(names)} go together"


def _backend(case: Case) -> str:
    from gemsmith.train.stage import check_training

    check_training(case.run)
    train = case.run.recipe.train
    return f"{train.backend} is installed{', train.init_adapter fits' * bool(train.init_adapter)}"


def _devices(case: Case) -> str:
    devices = _accelerators(case.run)
    return ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)) or "the CPU alone"


def _accelerators(run: Run) -> tuple[str, ...]:
    """As the backend sees them; what is imported here stays, so it is done when it is asked for."""
    if run.recipe.train.backend == "trl":
        from gemsmith.train.torch import distributed as torch

        return torch.find_accelerators()
    from gemsmith.train.stage import ask_xla

    ask_xla(Train())
    from gemsmith.train.jax import distributed as jax
    from gemsmith.train.jax.upstream import count_tpu_hosts

    if (hosts := count_tpu_hosts()) > 1:
        raise _SkippedError(f"a TPU slice of {hosts} hosts, whose devices are there once all have started")
    jax.check_accelerator()
    return jax.find_accelerators()


def _flags(case: Case) -> str:
    from gemsmith.train.stage import ask_xla

    if (train := case.run.recipe.train).backend != "tunix":
        raise _SkippedError("train.backend trl has none")
    ask_xla(train)
    if case.depth != "all":
        return "XLA takes them"
    _accelerators(case.run)
    from gemsmith.train.jax.compile import check_flags

    count = check_flags(train)
    return f"XLA takes {count} of {count}"


def _memory(case: Case) -> str:
    recipe, catalog = case.run.recipe, load_catalog(case.run.recipe.hardware.catalog)
    for name in recipe.hardware.machines:
        find_machine(catalog, name)
    devices = _accelerators(case.run)
    if not (here := machines_with(catalog, devices, recipe.hardware.machines)):
        raise _SkippedError(f"{', '.join(devices)}: in no machine of the catalog; add it in hardware.catalog")
    (machine,) = plan_only(recipe, here[0].name).machines
    if not machine.fits:
        fix = f"; what fits: gemsmith plan RECIPE --machine {machine.name} --fix FILE" if machine.fix else ""
        raise MachineError(f"{machine.name}: {'; '.join(machine.notes[:2])}{fix}")
    needed, limit = memory(machine.hbm_bytes_per_chip), memory(machine.hbm_limit_bytes_per_chip)
    return f"estimated: training takes {needed} of {limit} on {machine.name}"


def _disk(case: Case) -> str:
    from gemsmith.export.merge import check_space, merged_bytes

    # One that is not here is fetched once and merged once, in bfloat16.
    run, base = case.run, case.checkpoint
    if base is None and Path(run.recipe.checkpoint).is_dir():
        base = _open_base(run)
    need_bytes = merged_bytes(base) if base and base.places else 2 * 2 * plan_only(run.recipe).parameters
    check_space(run.path, need_bytes)
    if case.depth == "all":
        check_directory(run)
    return f"{run.path}: {size(need_bytes)} are needed for merged weights, and free"


def _vllm(case: Case) -> str:
    from gemsmith.serve.settings import check_imports, find_vllm
    from gemsmith.serve.vllm_checks import refuse_engine

    _skip_without_earlier(case)
    engine = find_vllm(case.run.recipe.serve.python)
    refuse_engine(engine)
    if case.depth == "all":
        check_imports(engine)
    return f"{engine.package} {engine.version} of {engine.python}"


def _server(case: Case) -> str:
    from gemsmith.serve.container import refuse_open_server
    from gemsmith.serve.server import listener
    from gemsmith.serve.settings import api_headers, refuse_without_template
    from gemsmith.serve.stage import make_settings

    _skip_without_earlier(case)
    settings, checkpoint = make_settings(case.run), case.checkpoint
    refuse_open_server(settings, has_key=bool(api_headers()))
    if checkpoint is not None:
        refuse_without_template(checkpoint.folder, settings)
    with listener(settings.host, settings.port or 0):
        return f"{settings.host}, {f'port {settings.port}' if settings.port else 'a free port'}"


def _skip_without_earlier(case: Case) -> None:
    """A stage that is served says so itself, before it does anything."""
    if set(case.stages) <= set(SERVED):
        raise _SkippedError("no stage comes before it")


_VLLM = "vLLM"
CHECKS: dict[str, Preflight] = {
    "files": Preflight(_files, tuple(STAGES), "names"),
    "tokenizer": Preflight(_tokenizer, ["data"], "all"),
    "rows": Preflight(_rows, ["data"], "all"),
    "training": Preflight(partial(_settings, ["train"]), tuple(STAGES), "names", resolved=True),
    "backend": Preflight(_backend, ["train"], "here", resolved=True),
    "XLA flags": Preflight(_flags, ["train"], "here"),
    "devices": Preflight(_devices, ["train"], "all"),
    "memory": Preflight(_memory, ["train"], "all", resolved=True),
    "disk": Preflight(_disk, ["export"], "here", resolved=True),
    _VLLM: Preflight(_vllm, SERVED, "here"),
    "serving": Preflight(partial(_settings, SERVED), tuple(STAGES), "names", resolved=True),
    "server": Preflight(_server, SERVED, "here"),
    "scoring": Preflight(_scoring, ["eval"], "here"),
    "sandbox": Preflight(_sandbox, ["eval"], "all"),
}


def print_findings(findings: Iterator[Finding]) -> None:
    """Prints a line for each on stdout as it comes. Raises InputError where one of them fails."""
    from gemsmith.system.console import open_console

    console, states = open_console(stderr=False), list[str]()
    styles = {"ok": "green", "fails": "bold red", "skipped": "dim"}
    for state, check, detail in findings:
        states.append(state)
        console.print(f"{state:8} ", style=styles[state], end="")
        console.print(f"{check:11} {' '.join(detail.split())}")
    if failed := states.count("fails"):
        raise InputError(f"{failed} of {len(states)} checks fail; mend these, and run gemsmith doctor again")
