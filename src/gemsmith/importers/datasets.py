"""The datasets of a source as data.train and data.eval: local files of the forms that rows may have."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemsmith.data.reader import kind_of_file
from gemsmith.errors import RecipeError, suggest
from gemsmith.importers.table import Row, Rule, Setting, SourceConfig, if_set, is_on, number, read_rules
from gemsmith.system.files import expanduser
from gemsmith.system.json import read_json

PLACEHOLDER = "rows.jsonl"
_FORMS = {"chat_template": "messages", "messages": "messages", "sharegpt": "sharegpt", "alpaca": "alpaca",
          "completion": "text"}  # fmt: skip
"""Axolotl's types of datasets -> data.format."""
_TRAIN_IS_SET = "--set data.train names another"
_EVAL_IS_SET = "--set data.eval names another"


@if_set
def hub_rule(setting: Setting) -> Row:
    """The row of a dataset's name: a local file is taken as it is, one of the hub must be saved first."""
    if "data.train" in setting.config.overridden:
        return setting.overridden(_TRAIN_IS_SET)
    name = str(setting.value)
    if is_readable(name):
        return setting.mapped({"data.train": name}, "by its columns; a template around them is not taken over")
    train = prepared(name)
    return setting.to_do(f"save its rows as messages, or as prompt and response, in {train}", {"data.train": train})


def is_readable(name: str) -> bool:
    """Whether Gemsmith reads a dataset of that name as it is: a file of its kinds, or a folder that is there."""
    return "://" not in name and (bool(kind_of_file(Path(name))) or expanduser(name).is_dir())


def prepared(name: str, *, part: str = "") -> str:
    """The file that the user is to make from a dataset: `mlabonne/FineTome-100k` -> `FineTome-100k.jsonl`."""
    stem = Path(name.rstrip("/")).name
    for suffix in (".jsonl", ".json", ".parquet"):
        stem = stem.removesuffix(suffix)
    stem = re.sub(r"[^\w.-]+", "-", stem)
    return f"{stem or 'rows'}{part}.jsonl"


def path_rule(setting: Setting) -> Row:
    """The row of one of several datasets: the recipe names the file itself, or one that is to be made of all."""
    config = setting.config
    if "data.train" in config.overridden:
        return setting.overridden(_TRAIN_IS_SET)
    name = _only_file(config)
    several = "datasets[1].path" in config.given
    types = (key for key in config.given if re.fullmatch(r"datasets\[\d+\]\.type", key))
    kinds = {_FORMS.get(str(config.given[key])) for key in types}
    form = kinds.pop() if len(kinds) == 1 else None
    known = {"data.format": form} if form else {}
    if name is not None and is_readable(name) and not several and not _asks_for_other_rows(config):
        return setting.mapped({"data.train": name} | known)
    train = prepared(name or str(config.value("datasets[0].path")))
    shape = f"rows of data.format {form}" if form else "rows of one form, such as messages"
    why = f"save its rows as {shape}{', with those of the other datasets,' if several else ''} in {train}"
    return setting.to_do(why, {"data.train": train} | known)


@if_set
def test_path_rule(setting: Setting) -> Row:
    config = setting.config
    if "data.eval" in config.overridden:
        return setting.overridden(_EVAL_IS_SET) if setting.value else setting.ignored("not set")
    first = str(config.value("test_datasets[0].path"))
    if "test_datasets[1].path" not in config.given and is_readable(first) and not _asks_for_other_rows(config):
        return setting.mapped({"data.eval": first})
    target = prepared(first, part="-eval")
    return setting.to_do(f"save its rows, as those of data.train, in {target}", {"data.eval": target})


def held_out_rule(train_key: str) -> Rule:
    """The rule for a share or number of the rows that is held out of training."""

    def row_of(setting: Setting) -> Row:
        if not is_on(setting.value):
            return setting.ignored("nothing held out")
        held_out = setting.read(number)
        if {"data.train", "data.eval"} <= setting.config.overridden:
            return setting.overridden("--set data.train and data.eval name others")
        if held_out < 1:
            return setting.mapped({"data.eval": f"{held_out * 100:g}%"}, "by a hash of each row, not drawn")
        target = prepared(_names(setting.config.value(train_key) or PLACEHOLDER)[0], part="-eval")
        return setting.to_do(f"move {held_out:g} of the rows out of data.train into {target}", {"data.eval": target})

    return row_of


@if_set
def factory_dataset_rule(setting: Setting) -> Row:
    """The row of LLaMA-Factory's datasets: names in its dataset_info.json, which is read where it is there."""
    config = setting.config
    if "data.train" in config.overridden:
        return setting.overridden(_TRAIN_IS_SET) if setting.value else setting.ignored("not set")
    names = _names(setting.value)
    entries = _described(config, names)
    found = _read_as(entries[0]) if len(names) == 1 and entries else None
    if found and not config.is_on("max_samples"):
        file = str(Path(str(config.value("dataset_dir"))) / str(entries[0]["file_name"]))
        return setting.mapped({"data.train": file} | found, f"{found['data.format']}, by dataset_info.json")
    train = prepared(names[0] if len(names) == 1 else "rows")
    pairs = bool(entries) and all(
        entry.get("formatting", "alpaca") == "alpaca"
        and not {"history", "system", "tools"} & {*(entry.get("columns") or ())}
        for entry in entries
    )
    form = "alpaca" if pairs else "messages"
    why = f"save the rows that dataset_info.json describes under {', '.join(names)} as {form} in {train}"
    return setting.to_do(why, {"data.train": train, "data.format": form})


def _described(config: SourceConfig, names: list[str]) -> list[Mapping[str, Any]]:
    """The datasets' entries in dataset_info.json, none where it is not there. Raises RecipeError for others' names."""
    file = expanduser(str(config.value("dataset_dir"))) / "dataset_info.json"
    try:
        entries = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read as JSON ({error})") from None
    for name in names:
        if not isinstance(entries, dict) or not isinstance(entries.get(name), dict):
            raise RecipeError(f"{config.file}: dataset {name} is not in {file}{suggest(name, entries)}")
    return [entries[name] for name in names]


def _read_as(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """data.format, and data.columns where they have other names, of rows that are read as they are; None of others."""
    columns, tags = ({**(entry.get(key) or {})} for key in ("columns", "tags"))
    names = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    form = "alpaca"
    if entry.get("formatting", "alpaca") != "alpaca":
        said = [tags.get(tag) for tag in ("role_tag", "content_tag", "user_tag", "assistant_tag")]
        roles = ["role", "content", "user", "assistant"]
        form = "messages" if said == roles else "sharegpt"
        if said not in (roles, [None] * 4) or {"system_tag", "function_tag", "observation_tag"} & {*tags}:
            return None
        names = {"messages": "messages"} if form == "messages" else {"messages": "conversations", "system": "system"}
    if not {*columns} <= {*names} or not is_readable(str(entry.get("file_name"))):
        return None
    renamed = {names[name]: str(theirs) for name, theirs in columns.items() if theirs != names[name]}
    return {"data.format": form} | ({"data.columns": renamed} if renamed else {})


def factory_eval_rule(setting: Setting) -> Row:
    if not setting.value:
        return setting.ignored("not set")
    if "data.eval" in setting.config.overridden:
        return setting.overridden(_EVAL_IS_SET)
    target = prepared(_names(setting.value)[0], part="-eval")
    return setting.to_do(f"save their rows as messages in {target}", {"data.eval": target})


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


def _asks_for_other_rows(config: SourceConfig) -> bool:
    """Whether a key of Axolotl's datasets asks for other rows than the file has."""
    for key, value in config.given.items():
        rule = DATASET_RULES.get(re.sub(r"^datasets\[\d+\]\.", "", key)) if key.startswith("datasets[") else None
        if key.endswith(".type") and str(value) in _FORMS:
            continue
        if rule is not None and rule(Setting(key, value, config)).status in ("to do", "differs"):
            return True
    return False


@if_set
def files_rule(setting: Setting) -> Row:
    if _only_file(setting.config) is not None:
        return setting.ignored("the file that path's row names" if setting.value else "not set")
    return setting.to_do("take the rows of these files")


def _only_file(config: SourceConfig) -> str | None:
    """The one file that the first dataset is."""
    files, path = config.value("datasets[0].data_files"), str(config.value("datasets[0].path"))
    if files is None:
        return path
    names = files if isinstance(files, list) else [files]
    return str(names[0]) if path in ("json", "parquet", "arrow") and len(names) == 1 else None


DATASET_RULES: Mapping[str, Rule] = read_rules("datasets") | {"data_files": files_rule}
