"""What would stop a run on this machine: every check of every stage, one after the other, each with what it found.

Nothing is written to a run directory. Of a checkpoint that is elsewhere only configuration and tokenizer are fetched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from gemsmith.arch import VARIANTS
from gemsmith.checkpoints import Checkpoint, open_checkpoint
from gemsmith.errors import USERS_ERRNOS, GemsmithError, InputError, MachineError, explain_os_error
from gemsmith.hardware import find_machine, load_catalog, machines_with
from gemsmith.plan.stage import plan_only
from gemsmith.recipe.checks import eval_share
from gemsmith.recipe.load import load_recipe
from gemsmith.recipe.schema import Train, eval_tasks
from gemsmith.runs.resolve import check_settings, resolve_file
from gemsmith.runs.run import Run, check_directory, resolve_run
from gemsmith.runs.stages import SERVED
from gemsmith.system.console import open_console
from gemsmith.system.format import memory, size
from gemsmith.system.sandbox import find_sandbox
from gemsmith.tasks import SOURCES

Guard = Callable[[], AbstractContextManager[None]]


class Finding(NamedTuple):
    state: Literal["ok", "fails", "skipped"]
    check: str
    detail: str
    """What was found; where it fails, the error's own line with its remedy."""


class _SkippedError(Exception):
    """Nothing to check; the message says why."""


def examine(source: Path, path: Path | None, overrides: Sequence[str], guard: Guard) -> Iterator[Finding]:
    """A finding for each check of the recipe, or of the recipe in a run directory, as each is made.

    `path` is the run directory of a recipe, by default that of `gemsmith run`.

    `guard` is entered around each and makes an InputError of a library that is not installed.
    """
    file, found = source / "recipe.yaml" if source.is_dir() else source, list[Run]()

    def read() -> str:
        place = source if source.is_dir() else path or Path("runs") / source.stem
        found.append(Run(path=place, recipe=load_recipe(file, overrides)))
        in_run = source.is_dir()
        recipe, derived = resolve_run(source, overrides) if in_run else resolve_file(file, overrides, stages=())
        found[0] = Run(path=place, recipe=recipe)
        return f"{file}: {recipe.model}, {len(derived)} values derived"

    recipe = _check("recipe", read, guard)
    yield recipe
    if not found:
        return
    (run,), opened = found, list[Checkpoint]()

    def open_base() -> str:
        variant = VARIANTS.get(run.recipe.model or "")
        checkpoint = open_checkpoint(run.recipe.checkpoint, variant=variant, weights=False)
        opened.append(checkpoint)
        if not checkpoint.places:
            return f"{checkpoint.source}: reached; the first stage fetches its weights"
        files = {place.file for place in checkpoint.places.values()}
        weights = size(sum(file.stat().st_size for file in files))
        return f"{checkpoint.folder}: {len(checkpoint.places)} tensors, {weights} in {len(files)} files"

    yield _check("checkpoint", open_base, guard)
    # A share of data.train is rows of it once it is derived.
    shared = ("rows", "scoring") if eval_share(run.recipe.data) is not None else ()
    told: dict[str, str] = {}
    for name, check in _CHECKS.items():
        if recipe.state == "fails" and name in (*_RESOLVED, *shared):
            yield Finding("skipped", name, "needs a recipe that passes")
            continue
        finding = _check(name, partial(check, run, opened[0] if opened else None), guard)
        if finding.state == "fails" and (first := told.setdefault(finding.detail, name)) != name:
            finding = Finding("skipped", name, f"fails as {first} does")
        yield finding


def _check(name: str, check: Callable[[], str], guard: Guard) -> Finding:
    try:
        with guard():
            return Finding("ok", name, check())
    except _SkippedError as reason:
        return Finding("skipped", name, str(reason))
    except GemsmithError as error:
        return Finding("fails", name, str(error))
    except OSError as error:
        return Finding("fails", name, explain_os_error(error) if error.errno in USERS_ERRNOS else str(error))


def _opened(checkpoint: Checkpoint | None) -> Checkpoint:
    if checkpoint is None:
        raise _SkippedError("needs a checkpoint that passes")
    return checkpoint


def _tokenizer(run: Run, checkpoint: Checkpoint | None) -> str:
    from gemsmith.data.chat_template import find_template
    from gemsmith.data.stage import check_tokenizer

    found = _opened(checkpoint)
    check_tokenizer(found)
    return f"its ids fit the model; chat template: {find_template(found.folder, run.recipe.data).source}"


def _rows(run: Run, checkpoint: Checkpoint | None) -> str:
    from gemsmith.data.dataset import find_source_files
    from gemsmith.data.stage import count_usable

    for source in run.recipe.data.sources if checkpoint is None else ():
        find_source_files(source, run.recipe.data.format)
    kept, dropped = count_usable(run.recipe, _opened(checkpoint))
    left_out = "".join(f", {count:,} left out: {reason}" for reason, count in dropped.items())
    return f"data.train: {kept:,} rows are read and rendered{left_out}"


def _scoring(run: Run, _: Checkpoint | None) -> str:
    from gemsmith.evals.tasks import check_tasks

    if not (tasks := eval_tasks(run.recipe)):
        raise _SkippedError("data.eval names no held-out rows")
    check_tasks(run)
    return f"questions are read, scorers are here: {', '.join(task.task for task in tasks)}"


def _sandbox(run: Run, _: Checkpoint | None) -> str:
    if not (running := [task for task in eval_tasks(run.recipe) if task.task in SOURCES]):
        raise _SkippedError("no task runs generated code")
    sandbox = find_sandbox(unsafe=all(task.unsafe for task in running))
    return sandbox.bubblewrap or "none, as eval.tasks asks for with unsafe"


def _settings(stages: Sequence[str], run: Run, _: Checkpoint | None) -> str:
    check_settings(run.recipe, stages)
    return f"settings of {', '.join(stages)} go together"


def _backend(run: Run, _: Checkpoint | None) -> str:
    from gemsmith.train.stage import check_training

    check_training(run)
    return f"{run.recipe.train.backend} is installed{', train.init_adapter fits' * bool(run.recipe.train.init_adapter)}"


def _devices(run: Run, _: Checkpoint | None) -> str:
    devices = _accelerators(run)
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


def _flags(run: Run, _: Checkpoint | None) -> str:
    if run.recipe.train.backend != "tunix":
        raise _SkippedError("train.backend trl has none")
    from gemsmith.train.stage import ask_xla

    ask_xla(run.recipe.train)
    _accelerators(run)
    from gemsmith.train.jax.compile import check_flags

    count = check_flags(run.recipe.train)
    return f"XLA takes {count} of {count}"


def _memory(run: Run, _: Checkpoint | None) -> str:
    recipe, catalog = run.recipe, load_catalog(run.recipe.hardware.catalog)
    for name in recipe.hardware.machines:
        find_machine(catalog, name)
    devices = _accelerators(run)
    if not (here := machines_with(catalog, devices, recipe.hardware.machines)):
        raise _SkippedError(f"{', '.join(devices)}: in no machine of the catalog; add it in hardware.catalog")
    (machine,) = plan_only(recipe, here[0].name).machines
    if not machine.fits:
        fix = f"; what fits: gemsmith plan RECIPE --machine {machine.name} --fix FILE" if machine.fix else ""
        raise MachineError(f"{machine.name}: {'; '.join(machine.notes[:2])}{fix}")
    needed, limit = memory(machine.hbm_bytes_per_chip), memory(machine.hbm_limit_bytes_per_chip)
    return f"estimated: training takes {needed} of {limit} on {machine.name}"


def _disk(run: Run, checkpoint: Checkpoint | None) -> str:
    from gemsmith.export.merge import check_space, merged_bytes

    # One that is not here is fetched once and merged once, in bfloat16.
    there = checkpoint is not None and bool(checkpoint.places)
    need_bytes = merged_bytes(_opened(checkpoint)) if there else 2 * 2 * plan_only(run.recipe).parameters
    check_space(run.path, need_bytes)
    check_directory(run)
    return f"{run.path}: {size(need_bytes)} are needed for merged weights, and free"


def _vllm(run: Run, _: Checkpoint | None) -> str:
    from gemsmith.serve.settings import check_imports, find_vllm
    from gemsmith.serve.vllm_checks import refuse_engine

    engine = find_vllm(run.recipe.serve.python)
    refuse_engine(engine)
    check_imports(engine)
    return f"{engine.package} {engine.version} of {engine.python}"


def _server(run: Run, checkpoint: Checkpoint | None) -> str:
    from gemsmith.serve.container import refuse_open_server
    from gemsmith.serve.server import listener
    from gemsmith.serve.settings import api_headers, refuse_without_template
    from gemsmith.serve.stage import make_settings

    settings = make_settings(run)
    refuse_open_server(settings, has_key=bool(api_headers()))
    if checkpoint is not None:
        refuse_without_template(checkpoint.folder, settings)
    with listener(settings.host, settings.port or 0):
        return f"{settings.host}, {f'port {settings.port}' if settings.port else 'a free port'}"


_CHECKS: dict[str, Callable[[Run, Checkpoint | None], str]] = {
    "tokenizer": _tokenizer,
    "rows": _rows,
    "training": partial(_settings, ["train"]),
    "backend": _backend,
    "XLA flags": _flags,
    "devices": _devices,
    "memory": _memory,
    "disk": _disk,
    "vLLM": _vllm,
    "serving": partial(_settings, SERVED),
    "server": _server,
    "scoring": _scoring,
    "sandbox": _sandbox,
}
_RESOLVED = ("training", "backend", "memory", "disk", "serving")
"""Checks that need the values that are derived from a recipe."""


def print_findings(findings: Iterator[Finding]) -> None:
    """Prints a line for each on stdout as it comes. Raises InputError where one of them fails."""
    console, states = open_console(stderr=False), list[str]()
    styles = {"ok": "green", "fails": "bold red", "skipped": "dim"}
    for state, check, detail in findings:
        states.append(state)
        console.print(f"{state:8} ", style=styles[state], end="")
        console.print(f"{check:11} {' '.join(detail.split())}")
    if failed := states.count("fails"):
        raise InputError(f"{failed} of {len(states)} checks fail; mend these, and run gemsmith doctor again")
