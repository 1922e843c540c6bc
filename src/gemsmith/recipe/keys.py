"""The recipe's dotted keys, such as lora.rank: which there are, and the value at one."""

from collections.abc import Iterator
from typing import Any

from gemsmith.recipe.schema import TASK_KEYS, Recipe
from gemsmith.recipe.section import Says, Section


def recipe_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, Says]]:
    """Every key that a recipe may give, in the order of the schema, and what it and its section say of it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from recipe_keys(field.annotation, f"{prefix}{name}.")
        else:
            said = [item for item in field.metadata if isinstance(item, Says)]
            stages = next((item.stages for item in said if item.stages), section.stages)
            path, compiled = any(item.path for item in said), all(item.compiled for item in said)
            yield f"{prefix}{name}", Says(stages, path, compiled)


KEYS = dict(recipe_keys())
PATHS = tuple(name for name, key in KEYS.items() if key.path)
"""Keys that may name a file or folder of this machine which a run reads."""
FILE_KEYS = (*PATHS, "train.checkpoint_folder", "serve.python", *TASK_KEYS)
"""Those that may name any, beside those in entries of LISTS."""
LISTS = {"eval.tasks": ("task", "dataset", "prompt"), "data.train": ("path",), "data.eval": ("path",)}


def value_at(values: Any, key: str) -> Any:
    """What stands at a dotted key of a recipe, or of nested mappings: all of it at "", None where a part is missing."""
    for part in key.split(".") if key else ():
        if isinstance(values, list | tuple):
            values = values[int(part)] if part.isdigit() and int(part) < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else getattr(values, part, None)
    return values


def recipe_schema() -> dict[str, Any]:
    """The JSON schema that editors check a recipe with."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
