"""All stages in order. Each is skipped where its record is complete, and knows the others only by the files they left."""

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from gemsmith.errors import RunError
from gemsmith.records import STAGES, Record, TrainRecord
from gemsmith.run import UPSTREAM, Run, confirm_recipe, is_complete, read_record

if TYPE_CHECKING:
    from gemsmith.serve.stage import Servers

# Stage -> module and function; imported one at a time, so that jax, torch and matplotlib are there only while they are needed.
_FUNCTIONS = {
    "plan": ("gemsmith.plan.stage", "plan"),
    "data": ("gemsmith.data.stage", "prepare_data"),
    "train": ("gemsmith.train.stage", "train"),
    "export": ("gemsmith.export.stage", "export"),
    "verify": ("gemsmith.export.verify", "verify"),
    "serve": ("gemsmith.serve.stage", "serve"),
    "bench": ("gemsmith.bench.stage", "bench"),
    "eval": ("gemsmith.evals.stage", "evaluate"),
}
_SERVED = ("serve", "bench", "eval")


def run_stages(run: Run) -> list[Record]:
    """Runs every stage that is not complete and writes the report; returns the records in order."""
    console = Console(stderr=True, highlight=False)
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        servers = _open_servers(run, stack)
        _refuse_changed_rows(run)
        for stage in STAGES:
            if stage == "eval" and run.recipe.data.eval is None:
                console.print("eval     [dim]left out: data.eval names no held-out rows[/]")
                continue
            if is_complete(run, stage):
                console.print(f"{stage:8} [dim]complete, kept[/]")
            else:
                console.print(f"[bold]{stage}[/]")
                record = _call(run, stage, servers)
                if isinstance(record, TrainRecord) and record.hosts > 1:
                    console.print(f"trained on {record.hosts} hosts; the other stages need only one: gemsmith run {run.path}")
                    return [*records, record]
            records.append(read_record(run, stage))
    importlib.import_module("gemsmith.report.stage").report(run)
    return records


def run_stage(run: Run, stage: str, *, force: bool = False) -> Record:
    """Runs one stage, unless its record is complete; `force` does it again. Where that fails, the earlier record and files stay."""
    if not (force and stage == "data"):
        _refuse_changed_rows(run)
    for upstream in UPSTREAM[stage]:
        read_record(run, upstream)
        if not is_complete(run, upstream):
            raise RunError(f"{run.record_file(upstream)}: was made from other settings; run first: gemsmith {upstream} {run.path}")
    if force and stage == "train":
        return _call(run, stage, None, fresh=True)
    if not force and is_complete(run, stage):
        Console(stderr=True, highlight=False).print(f"{stage} is complete in {run.path}; --force does it again")
        return cast(Record, read_record(run, stage))
    with contextlib.ExitStack() as stack:
        record = _call(run, stage, _open_servers(run, stack) if stage in _SERVED else None)
    if force:
        confirm_recipe(run)
    return record


def _call(run: Run, stage: str, servers: "Servers | None", **options: bool) -> Record:
    module, name = _FUNCTIONS[stage]
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    record: Record = function(run, servers) if stage in _SERVED else function(run, **options)
    return record


def _open_servers(run: Run, stack: contextlib.ExitStack) -> "Servers":
    from gemsmith.serve.stage import Servers

    return stack.enter_context(Servers(run))


def _refuse_changed_rows(run: Run) -> None:
    """Raises RunError where the dataset is no longer what the data stage has read; one that is gone by now is not missed."""
    source = run.recipe.data.train
    if not run.record_file("data").exists() or (isinstance(source, str) and not Path(source).exists()):
        return
    from gemsmith.data.rows import source_sha256

    read: str = read_record(run, "data").origin.made_from["data.train"]
    if source_sha256(source) != read:
        raise RunError(
            f"data.train: {source} has changed since {run.record_file('data')} was made from it; "
            f"put it back, or name another run directory with --run"
        )
