"""Gemsmith: one recipe to plan, fine-tune, export, serve and compare Gemma 4 on TPU and GPU.

    recipe = gemsmith.Recipe.load("my.yaml").override({"lora.rank": 8})
    gemsmith.plan_recipe(recipe).machines                      # what fits, how long, what it costs
    records = gemsmith.run(recipe, "runs/my")                  # what `gemsmith run my.yaml` does
    records["train"].steps[-1].loss                            # or gemsmith.open_run("runs/my").records
    gemsmith.load_model(gemsmith.open_run("runs/my"), "merged").generate("Hi!")
    gemsmith.merge("google/gemma-4-31B-it", "my-lora", "tuned")

They import what they need when they are called. None has the name of a part, such as `gemsmith.plan`.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gemsmith.system.version import __version__

if TYPE_CHECKING:
    from gemsmith.recipe.schema import Recipe
    from gemsmith.runs.plan_records import PlanRecord
    from gemsmith.runs.records import ExportRecord, Record, TrainStep
    from gemsmith.runs.run import Run
    from gemsmith.verify.local_model import LocalModel

__all__ = ["Recipe", "__version__", "load_model", "merge", "open_run", "plan_recipe", "run"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "Recipe":
        raise AttributeError(f"module 'gemsmith' has no attribute {name!r}")
    from gemsmith.recipe.schema import Recipe

    return Recipe


def plan_recipe(recipe: "Recipe") -> "PlanRecord":
    """What the recipe needs on each of its machines: memory, time and cost, by formula. Nothing is written or fetched.

    Raises RecipeError for a recipe that some stage could not run.
    """
    from gemsmith.plan.stage import plan_only
    from gemsmith.runs.resolve import check_settings, resolve

    resolved, _ = resolve(recipe)
    check_settings(resolved)
    return plan_only(resolved)


def run(
    recipe: "Recipe",
    path: Path | str,
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callable[["TrainStep"], object]] = (),
    stages: Sequence[str] | None = None,
) -> dict[str, "Record"]:
    """Runs the stages that are not complete in the run directory `path`; returns each one's record by its name.

    `rows` in memory are trained on in place of data.train, from a file in the run directory named by their hash.
    `callbacks` are called with each training step once it is logged. Without `stages` it does what `gemsmith run` does.
    The run directory is locked meanwhile. Raises GemsmithError, also where processes train that call none.
    """
    from gemsmith.errors import DataError
    from gemsmith.pipeline import run_stage, run_stages
    from gemsmith.runs.plan_records import PlanRecord
    from gemsmith.runs.resolve import check_settings, resolve
    from gemsmith.runs.run import open_run, read_record
    from gemsmith.runs.stages import check_stage_names
    from gemsmith.system.files import write_text
    from gemsmith.system.locks import locked
    from gemsmith.train.stage import is_later_host

    folder, text = Path(path), ""
    check_stage_names(stages or (), "stages:")
    if rows is not None:
        try:
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
        except (TypeError, ValueError) as error:
            raise DataError(f"rows: are not JSON ({error}); give texts, numbers, lists and dicts") from None
        file = folder.absolute() / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        recipe = recipe.override({"data.train": str(file)})
    resolved, derived = resolve(recipe)
    check_settings(resolved)
    # Of the processes of one training, the first writes there for all.
    with contextlib.nullcontext() if is_later_host() else locked(folder):
        opened = replace(open_run(folder, resolved, derived), callbacks=tuple(callbacks))
        if rows is not None:
            write_text(file, text)
        records = run_stages(opened) if stages is None else [run_stage(opened, stage) for stage in stages]
        if records and isinstance(records[0], PlanRecord):
            records[0] = read_record(opened, PlanRecord)  # which is made again after data
    return {record.stage: record for record in records}


def open_run(path: Path | str) -> "Run":
    """A run directory that is there, for reading: recipe, records, where its files are. Raises RunError without one."""
    from gemsmith.runs.run import Run, find_run

    return Run(path=Path(path), recipe=find_run(Path(path)))


def load_model(run: "Run", weights: Literal["base", "adapter", "merged"] = "merged") -> "LocalModel":
    """A model of the run in this process, by transformers and PEFT, on the GPU or else the CPU: see its `generate`.

    Raises RunError where the run has not exported the weights.
    """
    from gemsmith.verify.local_model import load_local_model

    return load_local_model(run, weights)


def merge(base: str, adapter: Path | str, out: Path | str, *, force: bool = False) -> "ExportRecord":
    """Writes a PEFT adapter and its base with it merged in, as `gemsmith export --base --adapter --out` does.

    Raises InputError where they do not fit together, before anything is written.
    """
    from gemsmith.export.stage import export_peft
    from gemsmith.pipeline import print_warnings_of

    record = export_peft(base, Path(adapter), Path(out), force=force)
    print_warnings_of(record)
    return record
