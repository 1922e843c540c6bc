"""What a recipe reads of this machine, and where the launched one finds it instead."""

import json
from pathlib import Path
from typing import Any

from gemsmith.errors import RecipeError
from gemsmith.recipe import Derived, Recipe

_KEYS = ("checkpoint", "data.train", "data.eval", "data.template", "train.start_adapter", "hardware.catalogue")
FOLDER = "inputs"
"""Below the folder that holds the launched recipe."""


def move_inputs(recipe: Recipe, root: str, *, mount: str | None) -> tuple[list[Derived], dict[str, str], str | None]:
    """Changed keys of the recipe, the local files to copy with the addresses that they get, and the mounted bucket.

    Raises RecipeError for a file that is not there. `mount`: where the machine sees the bucket of a base in one.
    """
    placed, copies, weights = [], {}, None
    for key in _KEYS:
        value = _value_at(recipe, key)
        if not isinstance(value, str):
            continue
        if value.startswith("gs://") and key == "checkpoint" and mount is not None:
            weights, _, folder = value.removeprefix("gs://").partition("/")
            placed.append(Derived(key, f"{mount}/{folder}", f"{value}, mounted read-only"))
        elif "://" not in value and Path(value).is_absolute():
            where = f"{FOLDER}/{key.replace('.', '-')}/{Path(value).name}"
            if not Path(value).exists():
                raise RecipeError(f"{key}: {value} is not there")
            if key.startswith("data.") and _names_pictures(Path(value)):
                raise RecipeError(
                    f"{key}: rows of {value} name pictures by their paths on this machine, which are not copied; "
                    "give a folder of photos by class (data.format: image-folder), or rows with the pictures' bytes"
                )
            copies[value] = f"{root}/launched/{where}"
            placed.append(Derived(key, where, f"{value} of the machine that launched it"))
        elif "://" not in value and key not in ("checkpoint", "data.train", "data.eval"):
            raise RecipeError(f"{key}: {value} is not there")
        elif "://" not in value and key != "checkpoint":
            raise RecipeError(f"{key}: {value} is not there; give a file, a folder or rows to make")
    if recipe.train.checkpoint_folder is not None and "://" not in recipe.train.checkpoint_folder:
        raise RecipeError(
            f"train.checkpoint_folder: {recipe.train.checkpoint_folder} is a folder of this machine; set it to null, "
            "saved steps then go to the launch's bucket"
        )
    return placed, copies, weights


def _value_at(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _names_pictures(file: Path) -> bool:
    """Whether the first row of a file of JSON lines has a picture that is given by its path."""
    if file.suffix not in (".jsonl", ".json") or not file.is_file():
        return False
    with file.open("rb") as lines:
        try:
            row = json.loads(lines.readline())
        except ValueError:
            return False  # the data stage says what is wrong with it
    if not isinstance(row, dict):
        return False
    return any(_is_path(row.get(key)) for key in ("image", "images")) or _has_path(row.get("messages"))


def _is_path(value: Any) -> bool:
    return isinstance(value, str) or _has_path(value) or (isinstance(value, list) and any(map(_is_path, value)))


def _has_path(value: Any) -> bool:
    """Whether messages, or their parts, have a picture with a path."""
    if isinstance(value, list):
        return any(map(_has_path, value))
    return isinstance(value, dict) and ("path" in value or _has_path(value.get("content")))
