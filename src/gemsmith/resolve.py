"""What the user left out, filled in, each value with its reason; what cannot be, refused. No weights, no network."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemsmith.checkpoint.fetch import check_scheme, is_hub_id
from gemsmith.checkpoint.folder import name_variant, read_config
from gemsmith.errors import RecipeError
from gemsmith.files import expand_home
from gemsmith.lengths import check_answer, check_cells, check_lengths, check_served, derive_lengths
from gemsmith.recipe import TASK_KEYS, Derived, Recipe
from gemsmith.recipe_checks import check_served_adapter
from gemsmith.recipe_file import load_recipe, read_reasons
from gemsmith.recipe_keys import default_values, flatten, task_files, with_values
from gemsmith.sizing.limits import check_training
from gemsmith.stages import SERVED, STAGES
from gemsmith.zoo import VARIANTS, Variant, find_variant, lora_targets, read_variant, variant_of_hub_id
from gemsmith.zoo.variant import differing_fields
from gemsmith.zoo.vision import read_vision

_FILES = ("checkpoint", "data.train", "data.eval", "data.template", "train.start_adapter", "hardware.catalogue")
_DERIVED_AGAIN = (
    "data.max_length",
    "train.rows_per_step",
    "serve.max_model_len",
    "bench.input_tokens",
    "bench.output_tokens",
    "eval.max_tokens",
)


def resolve(recipe: Recipe) -> tuple[Recipe, list[Derived]]:
    """The recipe with every derivable value written out, and the list of those values with their reasons.

    A resolved recipe resolves to itself. Raises RecipeError or CheckpointError where a value cannot be derived or
    contradicts another; what a single stage could not do with them is told by `check_settings`.
    """
    derived: list[Derived] = []
    for key in (*_FILES, *_task_files(recipe)):
        _make_absolute(recipe, key, derived)
    _make_folder_absolute(recipe, derived)
    _make_datasets_absolute(recipe, derived)
    variant, reason = _find_model(recipe)
    if recipe.model is None:
        derived.append(Derived("model", variant.name, reason))
    lora_targets(variant, recipe.lora.targets)
    derived += derive_lengths(recipe, variant)
    recipe = with_values(recipe, derived)
    check_lengths(recipe, variant)
    rest = [*_rows_per_step(recipe), *_warmup(recipe)]
    return with_values(recipe, rest), derived + rest


def resolve_file(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Derived]]:
    """What `resolve` makes of the recipe in a file. Raises RecipeError also for what any of the stages could not do."""
    if not path.exists():
        raise RecipeError(
            f"{path}: is neither a recipe nor a run directory; give one of the two, such as recipes/demo.yaml"
        )
    recipe, derived = resolve(load_recipe(path, overrides))
    check_settings(recipe)
    return recipe, derived


def resolve_again(
    there: Recipe, file: Path, overrides: Sequence[str] = (), *, used: Callable[[str], bool]
) -> tuple[Recipe, list[Derived]]:
    """What `resolve` makes of the resolved recipe that is in a file, with other values for some keys.

    Such a recipe gives every key. What was derived in it, or is the default, is not the user's and gives way to what is
    set now: it is derived again, unless what was made with it stays (`used`) and the model is the same.
    """
    reasons = {item.key for item in read_reasons(file.read_text(encoding="utf-8"))}
    values, defaults = dict(flatten(there.model_dump(mode="json"))), default_values()
    another_model = any(override.partition("=")[0].strip() in ("checkpoint", "model") for override in overrides)
    ours = {key for key in _DERIVED_AGAIN if key in reasons or values[key] == defaults[key]}
    forget = {key for key in ours if another_model or not used(key)}
    if another_model and "model" in reasons:
        forget.add("model")
    return resolve(load_recipe(file, overrides, forget=forget))


def check_settings(recipe: Recipe, stages: Collection[str] = tuple(STAGES)) -> None:
    """Raises RecipeError where a resolved recipe asks one of the stages for what it cannot do, on whatever machine."""
    variant = recipe_variant(recipe)
    if "train" in stages:
        check_training(recipe, variant)
    if not set(SERVED).isdisjoint(stages):
        check_served(recipe, variant)
        check_served_adapter(recipe, variant)
    if "bench" in stages:
        check_cells(recipe, variant)
    if "eval" in stages:
        check_answer(recipe, variant)


def recipe_variant(recipe: Recipe) -> Variant:
    """The numbers of a resolved recipe's model; what takes pictures is the checkpoint's own, where that is here."""
    folder = Path(recipe.checkpoint)
    if recipe.model not in VARIANTS:
        return read_variant(read_config(folder))
    variant = find_variant(recipe.model)
    return replace(variant, vision=read_vision(read_config(folder))) if (folder / "config.json").is_file() else variant


def _find_model(recipe: Recipe) -> tuple[Variant, str]:
    check_scheme(recipe.checkpoint)
    folder = expand_home(recipe.checkpoint)
    given = None if recipe.model in (None, "custom") else find_variant(recipe.model)
    if folder.is_dir():
        found = name_variant(read_variant(read_config(folder)))
        if given and (differences := differing_fields(given, found)):
            raise RecipeError(
                f"model: {given.name} was given, but checkpoint {folder} is {found.name} "
                f"({', '.join(differences[:3])}); leave model out"
            )
        return found, "read from the checkpoint's config.json"
    if given:
        return given, "given"
    if named := variant_of_hub_id(recipe.checkpoint):
        return named, "known from the hub id"
    if is_hub_id(recipe.checkpoint) or "://" in recipe.checkpoint:
        raise RecipeError(
            f"model: is missing and {recipe.checkpoint} is not here to read it from; set model, such as "
            "model=gemma4-31b"
        )
    raise RecipeError(
        f"checkpoint: {recipe.checkpoint!r} is neither a folder, nor a hub id (owner/name), nor gs://bucket/folder"
    )


def _task_files(recipe: Recipe) -> list[str]:
    """The keys that name a Python file as a task; those in a recipe's file are absolute by now."""
    named = task_files(dict(flatten(recipe.model_dump(mode="json"))))
    return [key for key in named if key in TASK_KEYS]


def _make_absolute(recipe: Recipe, key: str, derived: list[Derived]) -> None:
    value = _value_at(recipe, key)
    if not isinstance(value, str) or "://" in value or Path(value).is_absolute():
        return
    path = expand_home(value)
    if path.exists():
        derived.append(Derived(key, os.path.abspath(path), f"{value}, seen from the folder the run was started in"))


def _make_folder_absolute(recipe: Recipe, derived: list[Derived]) -> None:
    folder = recipe.train.checkpoint_folder
    if folder is not None and "://" not in folder and not Path(folder).is_absolute():
        reason = f"{folder}, seen from the folder the run was started in"
        derived.append(Derived("train.checkpoint_folder", str(expand_home(folder).resolve()), reason))


def _make_datasets_absolute(recipe: Recipe, derived: list[Derived]) -> None:
    tasks = tuple(
        task.model_copy(update={"dataset": str(expand_home(task.dataset).resolve())}) if task.dataset else task
        for task in recipe.eval.tasks
    )
    if tasks != recipe.eval.tasks:
        derived.append(Derived("eval.tasks", tasks, "datasets seen from the folder the run was started in"))


def _rows_per_step(recipe: Recipe) -> Iterator[Derived]:
    """Rows from train.tokens_per_step, where it is given.

    Raises RecipeError where it is not a whole number of rows, or rows say otherwise.
    """
    train, length = recipe.train, recipe.data.max_length
    if train.tokens_per_step is None:
        return
    rows, rest = divmod(train.tokens_per_step, length)
    if rest or not rows:
        raise RecipeError(
            f"train.tokens_per_step: {train.tokens_per_step} was given; it must be a multiple of data.max_length, "
            f"{length}"
        )
    if "rows_per_step" in train.model_fields_set and train.rows_per_step != rows:
        raise RecipeError(
            f"train.tokens_per_step: {train.tokens_per_step} is {rows} rows of {length}, train.rows_per_step is "
            f"{train.rows_per_step}; "
            "set one of them"
        )
    if train.rows_per_step != rows:
        yield Derived("train.rows_per_step", rows, "train.tokens_per_step / data.max_length")


def _warmup(recipe: Recipe) -> Iterator[Derived]:
    """The reason for warm-up that is left open; its number is known once the data stage has counted the steps."""
    if "warmup_steps" not in recipe.optimizer.model_fields_set and recipe.optimizer.warmup_ratio is None:
        yield Derived("optimizer.warmup_steps", None, "a tenth of all steps, at most 100; training says how many")


def _value_at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
