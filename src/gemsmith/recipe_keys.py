"""A recipe as dotted keys and their values, such as lora.rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemsmith.recipe import ADDED_LATER, TASK_KEYS, Data, Derived, Recipe
from gemsmith.tasks import is_task_file


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values.

    >>> dict(flatten({"lora": {"rank": 8}, "seed": 0}))
    {'lora.rank': 8, 'seed': 0}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def task_files(keys: Mapping[str, Any]) -> dict[str, str]:
    """Those of the dotted keys that name a Python file as a task, with the file.

    >>> task_files({"eval.scorer": "exact", "eval.tasks": [{"task": "regex"}, {"task": "/a/mine.py"}]})
    {'eval.tasks.1.task': '/a/mine.py'}
    """
    entries = enumerate(keys.get("eval.tasks") or ())
    named = {key: keys.get(key) for key in TASK_KEYS} | {f"eval.tasks.{n}.task": entry["task"] for n, entry in entries}
    return {key: str(file) for key, file in named.items() if is_task_file(file)}


def differing_keys(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two recipes differ, with both values."""
    left, right = (dict(flatten(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def with_values(recipe: Recipe, derived: Sequence[Derived]) -> Recipe:
    """The recipe with these values; what was set in it and what was left to its default can still be told apart."""
    for item in derived:
        recipe = _with_value(recipe, item.key.split("."), item.value)
    return recipe


def default_values() -> dict[str, Any]:
    """The value of every dotted key that a recipe need not give."""
    flat = flatten(Recipe(checkpoint="x", data=Data(train="x")).model_dump(mode="json"))
    return {key: value for key, value in flat if key not in ("checkpoint", "data.train")}


def later_defaults() -> dict[str, Any]:
    """Those of the keys in ADDED_LATER."""
    return {key: value for key, value in default_values().items() if key in ADDED_LATER}


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    key, *rest = path
    return section.model_copy(update={key: _with_value(getattr(section, key), rest, value) if rest else value})
