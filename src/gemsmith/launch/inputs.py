"""What a recipe reads of this machine, and where the launched one finds it instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import RecipeError
from gemsmith.launch.pictures import Pictures, find_pictures
from gemsmith.recipe import Derived, Recipe

_KEYS = ("checkpoint", "data.train", "data.eval", "data.template", "train.start_adapter", "hardware.catalogue")
_ROWS = ("data.train", "data.eval")
FOLDER = "inputs"
"""Below the folder that holds the launched recipe."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a launch brings along."""

    placed: tuple[Derived, ...] = ()
    """Keys of the recipe that name another place there."""
    copies: Mapping[str, str]
    """A local file or folder -> where it goes."""
    pictures: tuple[Pictures, ...] = ()
    weights_bucket: str | None = None
    """The bucket of the base, where it is mounted."""


def find_inputs(recipe: Recipe, root: str, *, mount: str | None) -> Inputs:
    """What the recipe reads of this machine, with the places that it gets below `root`.

    Raises RecipeError for a file that is not there, DataError as find_pictures. `mount`: where the machine sees the
    bucket of a base in one.
    """
    placed, copies, weights, pictures = [], {}, None, []
    places: dict[str, str] = {}
    for key in _KEYS:
        value = _value_at(recipe, key)
        if not isinstance(value, str):
            continue
        if value.startswith("gs://") and key == "checkpoint" and mount is not None:
            weights, _, folder = value.removeprefix("gs://").partition("/")
            placed.append(Derived(key, f"{mount}/{folder}", f"{value}, mounted read-only"))
        elif "://" not in value and Path(value).is_absolute():
            if value not in places:
                places[value] = f"{FOLDER}/{key.replace('.', '-')}/{Path(value).name}"
                found = _pictures(recipe, key, Path(value))
                pictures += [found] if found else []
                if not (found and Path(value).is_dir()):  # of a folder of photos there is nothing else to copy
                    copies[value] = f"{root}/launched/{places[value]}"
            placed.append(Derived(key, places[value], f"{value} of the machine that launched it"))
        elif "://" not in value and key not in ("checkpoint", *_ROWS):
            raise RecipeError(f"{key}: {value} is not there")
        elif "://" not in value and key != "checkpoint":
            raise RecipeError(f"{key}: {value} is not there; give a file, a folder or rows to make")
    if recipe.train.checkpoint_folder is not None and "://" not in recipe.train.checkpoint_folder:
        raise RecipeError(
            f"train.checkpoint_folder: {recipe.train.checkpoint_folder} is a folder of this machine; set it to null, "
            "saved steps then go to the launch's bucket"
        )
    return Inputs(placed=tuple(placed), copies=copies, pictures=tuple(pictures), weights_bucket=weights)


def _pictures(recipe: Recipe, key: str, path: Path) -> Pictures | None:
    if not path.exists():
        raise RecipeError(f"{key}: {path} is not there")
    return find_pictures(recipe.data, key, path) if key in _ROWS else None


def _value_at(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
