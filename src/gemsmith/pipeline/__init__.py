"""All stages in order.

Each is skipped where its record is complete, and knows the others only by the files they left.
"""

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemsmith.errors import GemsmithError, InputError, RunError, VersionError
from gemsmith.pipeline.preflight import refuse_problems
from gemsmith.recipe.schema import eval_tasks
from gemsmith.runs.plan_records import PlanRecord
from gemsmith.runs.records import DataRecord, Record, TrainRecord
from gemsmith.runs.run import Run, commit_recipe, is_up_to_date, read_record
from gemsmith.runs.stages import SERVED, STAGES, check_stage_names, depends_on

if TYPE_CHECKING:
    from rich.console import Console

    from gemsmith.serve.stage import Servers


def select_stages(until: str | None = None, skip: Collection[str] = ()) -> tuple[str, ...]:
    """The stages up to and including `until`, by default all, without those in `skip`. Raises InputError."""
    check_stage_names(skip, "--skip")
    check_stage_names([until] if until else [], "--until")
    names = list(STAGES)
    selected = tuple(stage for stage in names[: names.index(until) + 1 if until else None] if stage not in skip)
    if not selected:
        raise InputError(f"--skip {', '.join(skip)}: leaves no stage to run; leave one of them out")
    return selected


def run_stages(run: Run, stages: Sequence[str] = tuple(STAGES), *, force: bool = False) -> list[Record]:
    """Runs the stages that are not complete, with `force` all, and writes the report; returns the records in order.

    What can be known to fail is told before the first stage. Where one fails after training, there is a report.
    """
    from gemsmith.system.console import open_console  # here and below: planning needs no terminal

    console = open_console()
    if "eval" in stages and not eval_tasks(run.recipe):
        stages = [stage for stage in stages if stage != "eval"]
        console.print("eval     ", end="")
        console.print("left out: data.eval names no held-out rows", style="dim")
    with _open_servers(run) as servers:
        if not (force and "data" in stages):
            _refuse_changed_rows(run)
        to_run = [stage for stage in stages if force or not is_up_to_date(run, stage)]
        _refuse_missing_records(run, stages, to_run)
        served = ", ".join(stage for stage in to_run if stage in SERVED)
        for problem in refuse_problems(run, to_run):  # before hours of training for what comes after it
            console.print("warning: ", style="yellow", end="")
            console.print(f"{served} will not run here, the stages before will: {problem}")
        try:
            records = _run_each(run, servers, stages, console, force=force)
        except GemsmithError:
            if run.record_file("train").exists():
                try:
                    console.print(f"report   of what there is: {_write_report(run)}")
                except (GemsmithError, OSError) as error:
                    console.print(f"report   not written: {error}")
            raise
    if len(records) == len(stages):
        _write_report(run)
    return records


def _refuse_missing_records(run: Run, stages: Sequence[str], to_run: Collection[str]) -> None:
    """Raises InputError where a stage needs the record of one left out, and there is none that will still be true."""
    for stage in stages:
        for needed in (*STAGES[stage].upstream, *(["verify"] if stage in SERVED else [])):
            if needed not in stages and (
                any(depends_on(needed, each) for each in to_run) or not is_up_to_date(run, needed)
            ):
                why = f"{stage} needs its record, and {run.record_file(needed)} is missing or would be out of date"
                raise InputError(f"--skip {needed}: {why}; run {needed}, too, or add --skip {stage}")


def _run_each(
    run: Run, servers: "Servers", stages: Sequence[str], console: "Console", *, force: bool = False
) -> list[Record]:
    """The records in order, up to that of a training on several hosts."""
    records: list[Record] = []
    for stage in stages:
        if not force and is_up_to_date(run, stage):
            console.print(f"{stage:8} ", end="")
            console.print("complete, kept", style="dim")
        else:
            console.print(stage, style="bold")
            record = _call(run, stage, servers, force=force)
            # A plan alone replaces nothing that the earlier recipe made.
            if force and (stage != "plan" or len(stages) == 1):
                commit_recipe(run)
            if isinstance(record, TrainRecord) and record.hosts > 1:
                rest = f"the other stages need only one: gemsmith run {run.path}"
                console.print(f"trained on {record.hosts} hosts; {rest}")
                return [*records, record]
            if stage == "data" and (planned := _plan_again(run)) and stages[0] == "plan":
                records[0] = planned
        records.append(read_record(run, STAGES[stage].record))
    return records


def _plan_again(run: Run) -> Record | None:
    """The plan of as many steps as there are now, where there is a plan; what it compiled is not compiled again."""
    if not is_up_to_date(run, "plan"):
        return None
    compiled = any(machine.compiled for machine in read_record(run, PlanRecord).machines)
    if compiled and read_record(run, DataRecord).images:  # whose step has another shape by now
        return None
    limits = importlib.import_module("gemsmith.plan.aot.compile").Limits() if compiled else None
    return _call(run, "plan", None, limits=limits)


def _write_report(run: Run) -> Path:
    path: Path = importlib.import_module("gemsmith.report.page").report(run)
    return path


def run_stage(run: Run, stage: str, *, force: bool = False, skip_verify_check: bool = False, **more: Any) -> Record:
    """Runs one stage, unless its record is complete; `force` does it again: where that fails, the earlier one stays.

    `skip_verify_check`: merged weights are served whatever verify says of them. `more` is for the stage's own function.
    """
    if not (force and stage == "data"):
        _refuse_changed_rows(run)
    for upstream in STAGES[stage].upstream:
        read_record(run, STAGES[upstream].record)
        if not is_up_to_date(run, upstream):
            remedy = f"run first: gemsmith {upstream} {run.path}"
            raise RunError(f"{run.record_file(upstream)}: was made from other settings; {remedy}")
    if not force and is_up_to_date(run, stage):
        trains_on = ", --steps +N trains on" if stage == "train" else ""
        from gemsmith.system.console import open_console

        open_console().print(f"{stage} is complete in {run.path}; --force does it again{trains_on}")
        return read_record(run, STAGES[stage].record)
    refuse_problems(run, [stage])
    with contextlib.ExitStack() as stack:
        opened = _open_servers(run, skip_verify_check=skip_verify_check) if stage in SERVED else None
        servers = stack.enter_context(opened) if opened else None
        record = _call(run, stage, servers, force=force, **more)
    if stage == "data":
        _plan_again(run)
    if force:
        commit_recipe(run)
    return record


def _call(run: Run, stage: str, servers: "Servers | None", *, force: bool = False, **more: Any) -> Record:
    options = {"train": {"restart": True}, "eval": {"force": True}}.get(stage, {}) if force else {}
    function: Callable[..., Any] = pkgutil.resolve_name(STAGES[stage].function)
    record: Record = function(run, *([servers] if stage in SERVED else []), **options, **more)
    print_warnings_of(record, told=run.told)
    return record


def print_warnings_of(record: Record, *, told: Collection[str] = ()) -> None:
    """Prints a record's warnings on stderr, the critical ones first, but for those told already."""
    from gemsmith.system.console import print_warnings

    left = (warning for warning in record.warnings if warning not in told)
    print_warnings(record.stage, left, critical=record.critical_warnings)


def _open_servers(run: Run, *, skip_verify_check: bool = False) -> "Servers":
    from gemsmith.serve.stage import Servers

    return Servers(run, skip_verify_check=skip_verify_check)


def _refuse_changed_rows(run: Run) -> None:
    """Raises RunError where the dataset is no longer what the data stage has read; one that is gone is not missed.

    A damaged record says nothing of it: the data stage is then done again, and whatever needs the record says so.
    """
    data = run.recipe.data
    if not all(Path(source).exists() for source in data.sources):
        return
    try:
        read = read_record(run, DataRecord).provenance.inputs_sha256.get("data.train")
    except VersionError:
        raise
    except RunError:
        return
    from gemsmith.data.dataset import source_sha256

    if read not in (None, source_sha256(data.train, data.format)):
        what = f"{', '.join(data.sources) or data.train} has changed since {run.record_file('data')} was made from it"
        raise RunError(f"data.train: {what}; put it back, or name another run directory with --run")
