"""Recipes from YAML and back: loaded, overridden, checked in the recipe's own words, dumped with reasons."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from gemsmith.arch import HUB_ID
from gemsmith.errors import RecipeError, as_one, suggest
from gemsmith.recipe.checks import SHARE, check_recipe
from gemsmith.recipe.keys import FILE_KEYS, KEYS, LISTS, value_at
from gemsmith.recipe.schema import TASK_KEYS, Data, GeneratedData, Mesh, Recipe, ResolvedValue, RowSource
from gemsmith.system.characters import one_line, yaml_line
from gemsmith.system.files import expanduser
from gemsmith.system.yaml import parse_yaml, read_yaml
from gemsmith.tasks import is_prompt_file, is_task_file


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values.

    >>> dict(_flatten({"lora": {"rank": 8}, "seed": 0}))
    {'lora.rank': 8, 'seed': 0}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain_values(recipe: Recipe) -> dict[str, Any]:
    """The dotted keys of a recipe and their values, as JSON and YAML have them."""
    return dict(_flatten(recipe.model_dump(mode="json")))


def task_files(keys: Mapping[str, Any]) -> dict[str, str]:
    """Those of the dotted keys that name a Python file as a task, or a text file as its prompt, with the file.

    >>> task_files({"eval.scorer": "exact", "eval.tasks": [{"task": "regex"}, {"task": "/a/mine.py"}]})
    {'eval.tasks.1.task': '/a/mine.py'}
    """
    named = {key: keys.get(key) for key in TASK_KEYS}
    for number, entry in enumerate(keys.get("eval.tasks") or ()):
        named |= {f"eval.tasks.{number}.{name}": entry.get(name) for name in ("task", "prompt")}
    return {key: str(file) for key, file in named.items() if is_task_file(file) or is_prompt_file(file)}


def differing_keys(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two recipes differ, with both values."""
    return differing_values(plain_values(one), plain_values(other))


def differing_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The same of two recipes' dotted keys with their values."""
    return {key: (one.get(key), other.get(key)) for key in sorted({*one, *other}) if one.get(key) != other.get(key)}


def with_values(recipe: Recipe, values: Iterable[tuple[str, Any] | ResolvedValue]) -> Recipe:
    """The recipe with these values; what was set in it and what was left to its default can still be told apart."""
    for item in values:
        key, value = item[:2]
        while key:
            parent, _, name = key.rpartition(".")
            key, value = parent, value_at(recipe, parent).model_copy(update={name: value})
        recipe = value
    return recipe


def default_values() -> dict[str, Any]:
    """The value of every dotted key that a recipe need not give."""
    values = plain_values(Recipe(checkpoint="x", data=Data(train="x")))
    return {key: value for key, value in values.items() if key not in ("checkpoint", "data.train")}


def load_recipe(path: Path | str, overrides: Sequence[str] = (), *, forget: Collection[str] = ()) -> Recipe:
    """The recipe in a YAML file, without the keys to forget, with `key=value` overrides; checked, or a RecipeError."""
    path = Path(path)
    values = read_yaml(path, f"recipe {path}")
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {path}: must be a mapping with at least checkpoint and data.train")
    for key in forget:
        parent, _, name = key.rpartition(".")
        if isinstance(section := value_at(values, parent), dict):
            section.pop(name, None)
    # Each key that may name a file or folder.
    entries = {key: value for key in LISTS if isinstance(value := value_at(values, key), list)}
    listed = (f"{key}.{number}.{name}" for key in entries for number in range(len(entries[key])) for name in LISTS[key])
    astray = []
    for key in (*FILE_KEYS, *listed):
        parent, _, name = key.rpartition(".")
        place = value_at(values, parent)
        if not isinstance(place, dict) or name not in place:
            continue
        given, found = place[name], absolute_path(key, place[name], path.parent)
        here = absolute_path(key, given, Path())
        if here and os.path.exists(here) and not (found and os.path.exists(found)):
            astray.append((key, given, found or given, here))
        place[name] = found or given
    recipe = build_recipe(values, overrides, source=f"recipe {path}")
    if unseen := [
        RecipeError(
            f"{key}: {given} is not there as seen from the recipe's folder, from which its paths count "
            f"({os.path.abspath(path.parent / given)}), but from the folder that this was started in ({here}); "
            f"write the latter into the recipe, or give it by --set {key}=…"
        )
        for key, given, found, here in astray
        if value_at(recipe, key) == found  # no override gives another
    ]:
        raise as_one(unseen)
    return recipe


def absolute_path(key: str, value: Any, folder: Path) -> str | None:
    """The file or folder that a key's value names, relative ones as seen from a folder.

    None for others: rows to make, a share, a task or prompt of Gemsmith's own, an address, a hub id without a folder.
    """
    if not isinstance(value, str) or not value or "://" in value or value.startswith("hub:"):
        return None
    path = folder / expanduser(value)
    task = key.endswith((".task", ".scorer")) and not is_task_file(value)
    task |= key.endswith(".prompt") and not is_prompt_file(value)
    hub_id = key == "checkpoint" and HUB_ID.fullmatch(value) and not os.path.exists(path)
    return None if task or hub_id or (key == "data.eval" and SHARE.fullmatch(value)) else os.path.abspath(path)


def build_recipe(values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "recipe") -> Recipe:
    """A recipe from plain values, with overrides applied and every key checked."""
    merged = json.loads(json.dumps(values, default=str))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {override!r}: must be key=value, such as lora.rank=16")
        try:
            value = parse_yaml(text, key)
        except RecipeError:
            raise RecipeError(f"--set {override!r}: the value is not YAML; quote it") from None
        *parents, last = key.strip().split(".")
        place = merged
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[last] = value
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        raise as_one([RecipeError(f"{source}: {problem}") for problem in _problems(error)]) from None
    for key, value in plain_values(recipe).items():
        if "\\u0000" in json.dumps(value).replace("\\\\", ""):
            raise RecipeError(f"{source}: {key}: {value!r} was given, it must hold no NUL, which no file's name has")
    check_recipe(recipe)
    return recipe


def dump_recipe(recipe: Recipe, derived: Sequence[ResolvedValue] = (), *, exclude_unset: bool = False) -> str:
    """The recipe as YAML that loads to the same recipe, each derived value followed by its reason as a comment."""
    reasons = {item.key: item.reason for item in derived}
    unused = {"lora"} if recipe.train.method == "full" else set()  # at its defaults there
    values = recipe.model_dump(mode="json", exclude_unset=exclude_unset, exclude=unused)
    return "\n".join(_yaml_lines(values, reasons)) + "\n"


def read_reasons(text: str) -> list[ResolvedValue]:
    """The derived values of a dumped recipe, from the comments behind them."""
    derived: list[ResolvedValue] = []
    path: list[str] = []
    for line in text.splitlines():
        key, _, rest = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [key]
        value, mark, reason = rest.rpartition("  # ")
        if mark:
            derived.append(ResolvedValue(".".join(path), parse_yaml(value, key), reason))
    return derived


_IN_YAML = {
    "too_short": "it must name at least one",
    "tuple_type": "it must be a list, such as [a, b]",
    "model_type": "it must be a mapping of keys to values",
    "dict_type": "it must be a mapping of keys to values",
}
"""What pydantic says in Python's words."""
_KINDS: dict[str, Any] = {"GeneratedData": GeneratedData, "Mesh": Mesh, "tuple[RowSource, ...]": tuple[RowSource, ...]}
"""What pydantic calls a kind of value, where there may be several."""
_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "num_train_epochs": "train.epochs",
    "batch_size": "train.global_batch_size",
    "gradient_checkpointing": "train.remat",
    "max_seq_length": "data.max_length",
}
"""What other trainers call a key -> the key."""


def _problems(error: ValidationError) -> Iterator[str]:
    """Of each key the most telling of pydantic's complaints, in our words.

    A value that may be of two kinds gets a complaint for each: the one that went deepest knew what was meant. A list
    that is empty without its bad items is not told beside them.
    """
    by_key = defaultdict[str, list[Any]](list)
    problems = error.errors(include_url=False)
    for problem in problems:
        place = problem["loc"]
        if not any(place == other["loc"][: len(place)] for other in problems if other["loc"] != place):
            by_key[".".join(takewhile(lambda part: not _is_kind(part), map(str, place)))].append(problem)
    for of_key in by_key.values():
        yield _in_our_words(max(of_key, key=lambda item: (item["type"] == "extra_forbidden", len(item["loc"]))))


def _is_kind(part: str) -> bool:
    """Whether it is what pydantic calls a kind of value, and no key's name."""
    of_python = ("str", "constrained-str", "int", "float", "constrained-float", "bool", "[key]")
    return part in (*_KINDS, *of_python) or part.startswith(("literal[", "tuple["))


def _in_our_words(problem: Any) -> str:
    place = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        model: Any = Recipe
        for part in place[:-1]:
            # A number is the place in a list, whose items are all of one kind.
            model = _KINDS.get(part) or (get_args(model)[0] if part.isdigit() else model.model_fields[part].annotation)
        allowed, key = [*model.model_fields], ".".join(part for part in place if part not in _KINDS)
        elsewhere = {name.rpartition(".")[2]: name for name in KEYS}
        meant = _OTHER_NAMES.get(place[-1]) or elsewhere.get(place[-1])
        near = f" (did you mean {meant}?)" if meant else suggest(place[-1], allowed)
        return f"unknown key {key}{near}; allowed there: {', '.join(allowed)}"
    key = ".".join(part for part in place if not _is_kind(part))
    if problem["type"] == "missing":
        return f"{key} is missing; it must be given"
    if place[-1] == "bool":  # the first of the kinds that an option of XLA may have
        message = "it must be true or false, a number, a text or null"
    else:
        message = _IN_YAML.get(problem["type"]) or problem["msg"][0].lower() + problem["msg"][1:]
    if problem["type"] == "literal_error":
        if key in TASK_KEYS or re.fullmatch(r"eval\.tasks\.\d+\.task", key):
            message += ", or a Python file such as ./my_task.py"
        message += suggest(str(problem["input"]), re.findall("'([^']*)'", problem["ctx"]["expected"]))
    return f"{key}: {problem['input']!r} was given, {message}"


def _yaml_lines(
    values: Mapping[str, Any], reasons: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_yaml_key(key)}:"
            yield from _yaml_lines(value, reasons, f"{prefix}{key}.", indent + "  ")
            continue
        reason = reasons.get(prefix + key)
        comment = f"  # {one_line(reason)}" if reason else ""
        text = yaml_line(value)
        if isinstance(value, float):
            # PyYAML reads 1e-08 as text: YAML 1.1 wants a point in it.
            text = repr(value)
            text = text if "e" not in text or "." in text else text.replace("e", ".0e")
        # One line a value, so that a reason can follow it; JSON's scalars and lists are YAML's.
        yield f"{indent}{_yaml_key(key)}: {text}{comment}"


@cache
def _yaml_key(key: str) -> str:
    """The key in quotes where YAML would else take it for something: yes, 1, a: b."""
    return key if re.fullmatch(r"[A-Za-z]\w*", key) and parse_yaml(key, key) == key else yaml_line(key)
