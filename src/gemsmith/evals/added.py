"""A task that the command line adds to those of a recipe."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsmith.errors import InputError
from gemsmith.recipe.load import load_recipe
from gemsmith.recipe.schema import EvalTask, eval_tasks
from gemsmith.system.files import expanduser


def add_task(source: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> str:
    """The override of eval.tasks that adds a task, by its options' names, to those of a recipe or run directory.

    One that is there is not added again. Raises InputError for options that are not for a run.
    """
    if "answers" in given:
        raise InputError("--answers: goes without SOURCE, for answers that exist already; leave one out")
    if missing := [f"--{name}" for name in ("task", "dataset") if name not in given]:
        raise InputError(f"{missing[0]} is missing; {', '.join(f'--{name}' for name in given)} must come with it")
    recipe = load_recipe(source / "recipe.yaml" if source.is_dir() else source, overrides)
    task = EvalTask(**dict(given) | {"dataset": str(expanduser(given["dataset"]).resolve())})
    tasks = [one.model_dump(exclude_none=True, exclude_defaults=True) for one in eval_tasks(recipe)]
    added = task.model_dump(exclude_none=True, exclude_defaults=True)
    return f"eval.tasks={json.dumps([*tasks, *([] if added in tasks else [added])])}"
