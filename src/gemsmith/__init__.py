"""Gemsmith: one recipe to plan, fine-tune, export, serve and compare Gemma 4 on TPU and GPU.

    recipe = gemsmith.load_recipe("my.yaml", ["lora.rank=16"])
    gemsmith.plan_recipe(recipe).machines            # what fits, how long, what it costs; nothing is written
    records = gemsmith.run_recipe("my.yaml")         # what `gemsmith run my.yaml` does
    gemsmith.open_run("runs/my").recipe              # a run directory that is there, to read
    gemsmith.read_records(gemsmith.open_run("runs/my"))["train"].steps[-1].loss

Functions whose names are those of parts (`gemsmith.runs.run`, `gemsmith.plan`) would be lost as soon as the part is
imported, so these have two words. They import what they need when they are called.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemsmith.system.version import __version__

if TYPE_CHECKING:
    from gemsmith.recipe.schema import Recipe
    from gemsmith.runs.plan_records import PlanRecord
    from gemsmith.runs.records import Record
    from gemsmith.runs.run import Run

__all__ = ["__version__", "load_recipe", "open_run", "plan_recipe", "read_records", "run_recipe"]


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> "Recipe":
    """The recipe in a YAML file, with `key=value` overrides applied and every key checked.

    Raises RecipeError, which says in one line what was given and what is allowed.
    """
    from gemsmith.recipe.load import load_recipe

    return load_recipe(path, overrides)


def plan_recipe(recipe: "Recipe") -> "PlanRecord":
    """What the recipe needs on each of its machines: memory, time and cost, by formula. Nothing is written or fetched.

    Raises RecipeError for a recipe that some stage could not run.
    """
    from gemsmith.plan.stage import plan_only
    from gemsmith.runs.resolve import check_settings, resolve

    resolved, _ = resolve(recipe)
    check_settings(resolved)
    return plan_only(resolved)


def run_recipe(
    source: Path | str,
    *,
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    stages: Sequence[str] | None = None,
) -> dict[str, "Record"]:
    """Runs the stages that are not complete, and returns each stage's record by its name.

    `source` is a recipe or a run directory; `path` the run directory, by default runs/ and the recipe's name. Without
    `stages` it does what `gemsmith run` does, and writes report.html. The run directory is locked meanwhile. Raises
    GemsmithError.
    """
    from gemsmith.errors import InputError, suggest
    from gemsmith.pipeline import run_stage, run_stages
    from gemsmith.runs.run import open_source
    from gemsmith.runs.stages import STAGES
    from gemsmith.system.locks import locked
    from gemsmith.train.stage import is_later_host

    if unknown := [name for name in stages or () if name not in STAGES]:
        allowed = f"{suggest(unknown[0], list(STAGES))}; allowed: {', '.join(STAGES)}"
        raise InputError(f"stages: {unknown[0]!r} was given{allowed}")
    with contextlib.ExitStack() as stack:

        def lock(folder: Path) -> None:
            # Of the processes of one training, the first writes there for all.
            if not is_later_host():
                stack.enter_context(locked(folder))

        run = open_source(Path(source), None if path is None else Path(path), overrides, lock=lock)
        records = run_stages(run) if stages is None else [run_stage(run, stage) for stage in stages]
    return {record.stage: record for record in records}


def open_run(path: Path | str) -> "Run":
    """A run directory that is there, for reading: its recipe and where its files are. Raises RunError."""
    from gemsmith.runs.run import Run, find_run

    return Run(path=Path(path), recipe=find_run(Path(path)))


def read_records(run: "Run") -> dict[str, "Record"]:
    """The records that a run has so far, by stage. Raises RunError for one that is damaged."""
    from gemsmith.runs.run import read_record
    from gemsmith.runs.stages import STAGES

    return {name: read_record(run, stage.record) for name, stage in STAGES.items() if run.record_file(name).exists()}
