"""The datasets of a source as data.train and data.eval.

Gemsmith reads local files of messages, or of prompt and response.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemsmith.errors import RecipeError, suggest
from gemsmith.importers.table import Row, Rule, SourceConfig, idle, is_on, number, plain, read_as, row, to_do
from gemsmith.system.files import expanduser
from gemsmith.system.json import read_json

PLACEHOLDER = "rows.jsonl"
_READABLE = (".jsonl", ".parquet")


def hub_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a dataset's name: a local file is taken as it is, one of the hub must be saved first."""
    if value is None:
        return row(reading, key, value, "none", "not set")
    if "data.train" in reading.overridden:
        return row(reading, key, value, "set", "--set data.train names another")
    name = str(value)
    if is_readable(name):
        return row(reading, key, value, "mapped", "rows must be messages, or prompt and response", data__train=name)
    train = prepared(name)
    return row(
        reading,
        key,
        value,
        "to do",
        f"save its rows as messages, or as prompt and response, in {train}",
        data__train=train,
    )


def split_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of the split that is trained on."""
    return row(
        reading,
        key,
        value,
        "none" if value in (None, "train") else "to do",
        f"take the split {value}" if value else "not set",
    )


def is_readable(name: str) -> bool:
    """Whether Gemsmith reads a dataset of that name as it is: a file of its kinds, or a folder that is there."""
    return "://" not in name and (Path(name).suffix in _READABLE or expanduser(name).is_dir())


def prepared(name: str, *, part: str = "") -> str:
    """The file that the user is to make from a dataset: `mlabonne/FineTome-100k` -> `FineTome-100k.jsonl`."""
    stem = re.sub(
        r"[^\w.-]+",
        "-",
        Path(name.rstrip("/")).name.removesuffix(".jsonl").removesuffix(".json").removesuffix(".parquet"),
    )
    return f"{stem or 'rows'}{part}.jsonl"


def path_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of one of several datasets.

    What the recipe names is the file itself, or the one that is to be made of all of them.
    """
    if "data.train" in reading.overridden:
        return row(reading, key, value, "set", "--set data.train names another")
    first, name = str(reading.value("datasets[0].path")), _only_file(reading)
    several = "datasets[1].path" in reading.given
    kept = (
        name is not None and not several and is_readable(name) and not _conversions(reading) and not _held_out(reading)
    )
    kinds = [value for key, value in reading.given.items() if _KIND.fullmatch(key)]
    form = "prompt-response" if kinds and all(map(_is_alpaca, kinds)) else "messages"
    known = {"data.format": form} if kinds else {}
    if kept:
        return row(reading, key, value, "mapped", "", **{"data.train": name}, **known)
    train = prepared(name or first)
    shape = {"prompt-response": "prompt and response"}.get(
        form, "messages" if kinds else "messages, or prompt and response"
    )
    why = f"save its rows as {shape}{', with those of the other datasets,' if several else ''} in {train}"
    return row(reading, key, value, "to do", why, **{"data.train": train}, **known)


def test_path_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of a dataset that is held out."""
    if value is None or "data.eval" in reading.overridden:
        return row(
            reading, key, value, "set" if value else "none", "--set data.eval names another" if value else "not set"
        )
    first = str(reading.value("test_datasets[0].path"))
    if "test_datasets[1].path" not in reading.given and is_readable(first) and not _conversions(reading):
        return row(reading, key, value, "mapped", "", **{"data.eval": first})
    target = prepared(first, part="-eval")
    return row(
        reading, key, value, "to do", f"save its rows, as those of data.train, in {target}", **{"data.eval": target}
    )


def held_out_rule(train_key: str) -> Rule:
    """The rule for a share or number of the rows that is held out of training."""

    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if not is_on(value):
            return row(reading, key, value, "none", "nothing held out")
        held_out = read_as(number, key, value, reading)
        if {"data.train", "data.eval"} <= reading.overridden:
            return row(reading, key, value, "set", "--set data.train and data.eval name others")
        target = prepared(_names(reading.value(train_key) or PLACEHOLDER)[0], part="-eval")
        amount = f"{held_out * 100:g} % of" if held_out < 1 else f"{held_out:g} of"
        return row(
            reading,
            key,
            value,
            "to do",
            f"move {amount} the rows out of data.train into {target}",
            **{"data.eval": target},
        )

    return rule


def factory_dataset_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of LLaMA-Factory's datasets: names in its dataset_info.json, which is read where it is there."""
    if value is None or "data.train" in reading.overridden:
        return row(
            reading, key, value, "set" if value else "none", "--set data.train names another" if value else "not set"
        )
    names = _names(value)
    entries = _described(reading, names)
    changed = any(is_on(reading.value(name)) for name in ("val_size", "max_samples"))
    if (
        len(names) == 1
        and entries
        and not changed
        and _is_ours(entries[0])
        and is_readable(str(entries[0].get("file_name")))
    ):
        file = str(Path(str(reading.value("dataset_dir"))) / str(entries[0]["file_name"]))
        return row(
            reading,
            key,
            value,
            "mapped",
            "messages, by dataset_info.json",
            **{"data.train": file, "data.format": "messages"},
        )
    train = prepared(names[0] if len(names) == 1 else "rows")
    pairs = bool(entries) and all(_is_pair(entry) for entry in entries)
    shape = "prompt (instruction, new line, input) and response (output)" if pairs else "messages"
    why = f"save the rows that dataset_info.json describes under {', '.join(names)} as {shape} in {train}"
    form = "prompt-response" if pairs else "messages"
    return row(reading, key, value, "to do", why, **{"data.train": train, "data.format": form})


def _described(reading: SourceConfig, names: list[str]) -> list[Mapping[str, Any]]:
    """The datasets' entries in dataset_info.json, or none where that does not exist.

    Raises RecipeError for a name that is not in it.
    """
    file = expanduser(str(reading.value("dataset_dir"))) / "dataset_info.json"
    try:
        entries = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read as JSON ({error})") from None
    for name in names:
        if not isinstance(entries, dict) or not isinstance(entries.get(name), dict):
            raise RecipeError(f"{reading.file}: dataset {name} is not in {file}{suggest(name, entries)}")
    return [entries[name] for name in names]


def _is_ours(entry: Mapping[str, Any]) -> bool:
    """Whether the rows are {"messages": [{"role", "content"}]} as they are.

    The tags' defaults are sharegpt's from and value.
    """
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    given = entry.get("tags") or {}
    return (
        entry.get("formatting") in ("sharegpt", "openai")
        and (entry.get("columns") or {}) == {"messages": "messages"}
        and all(given.get(name) == tag for name, tag in tags.items())
    )


def _is_pair(entry: Mapping[str, Any]) -> bool:
    return entry.get("formatting", "alpaca") == "alpaca" and not {"history", "system", "tools"} & set(
        entry.get("columns") or {}
    )


def factory_eval_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    """The row of LLaMA-Factory's datasets that are held out."""
    if not value or "data.eval" in reading.overridden:
        return row(
            reading, key, value, "set" if value else "none", "--set data.eval names another" if value else "not set"
        )
    target = prepared(_names(value)[0], part="-eval")
    return row(reading, key, value, "to do", f"save their rows as messages in {target}", **{"data.eval": target})


def _names(value: Any) -> list[str]:
    return [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]


_KIND = re.compile(r"datasets\[\d+\]\.type")
_CHAT_KINDS = ("chat_template", "messages")


def _is_alpaca(value: Any) -> bool:
    return str(value).startswith("alpaca")


def _held_out(reading: SourceConfig) -> bool:
    return is_on(reading.value("val_set_size"))


def _conversions(reading: SourceConfig) -> list[str]:
    """The keys of Axolotl's datasets that ask for other rows than the file has."""
    rules = {
        key: DATASET_RULES.get(re.sub(r"^datasets\[\d+\]\.", "", key))
        for key in reading.given
        if key.startswith("datasets[")
    }
    return [
        key
        for key, rule in rules.items()
        if rule is not None and rule(key, reading.given[key], reading).status in ("to do", "differs")
    ]


def _kind_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    if value is None or value in _CHAT_KINDS:
        return row(reading, key, value, "none", "messages, rendered by the chat template, as Gemsmith does")
    if str(value).startswith("sharegpt"):
        return row(
            reading,
            key,
            value,
            "to do",
            "from and value become role and content; human and gpt become user and assistant",
        )
    if _is_alpaca(value):
        why = (
            "Alpaca's own text around instruction and output; Gemsmith renders prompt and response by Gemma's chat "
            "template"
        )
        return row(reading, key, value, "differs", why)
    return row(
        reading,
        key,
        value,
        "differs",
        "another form of row than chat_template; Gemsmith renders messages by Gemma's chat template",
    )


def _files_rule(key: str, value: Any, reading: SourceConfig) -> Row:
    if value is None or _only_file(reading) is not None:
        return row(reading, key, value, "none", "the file that path's row names" if value else "not set")
    return row(reading, key, value, "to do", "take the rows of these files")


def _only_file(reading: SourceConfig) -> str | None:
    """The one file that the first dataset is."""
    files, path = reading.value("datasets[0].data_files"), str(reading.value("datasets[0].path"))
    if files is None:
        return path
    names = files if isinstance(files, list) else [files]
    return str(names[0]) if path in ("json", "parquet", "arrow") and len(names) == 1 else None


def _called(name: str, what: str) -> Rule:
    def rule(key: str, value: Any, reading: SourceConfig) -> Row:
        if value in (None, name):
            return row(reading, key, value, "none", "as Gemsmith's rows")
        return row(reading, key, value, "to do", f"rename {value} to {name} in {what}")

    return rule


DATASET_RULES: Mapping[str, Rule] = {
    "type": _kind_rule,
    "type.*": plain(otherwise="text of its own around the rows; Gemsmith renders messages by Gemma's chat template"),
    "split": split_rule,
    "name": to_do("take that configuration of the dataset"),
    "data_files": _files_rule,
    "ds_type": idle("the kind of file"),
    "revision": to_do("take that revision of the dataset"),
    "shards": to_do("take only a part of the rows"),
    "shards_idx": to_do("take only that part of the rows"),
    "preprocess_shards": idle("how rows are prepared"),
    "trust_remote_code": idle("how rows are fetched"),
    "field_messages": _called("messages", "each row"),
    "message_property_mappings.role": _called("role", "each message"),
    "message_property_mappings.content": _called("content", "each message"),
    "message_property_mappings.*": to_do("has no counterpart in Gemsmith's rows; take it out of them"),
    "message_field_role": _called("role", "each message"),
    "message_field_content": _called("content", "each message"),
    "message_field_training": plain(otherwise="rows say which turns are trained; Gemsmith trains every answer"),
    "message_field_training_detail": plain(
        otherwise="rows say which letters are trained; Gemsmith trains every answer"
    ),
    "conversation": plain(otherwise="another template than Gemma 4's"),
    "chat_template": plain("gemma4", "gemma4_unified", "tokenizer_default", otherwise="another model's template"),
    "roles": to_do("roles become system, user and assistant"),
    "roles.*": to_do("roles become system, user and assistant"),
    "roles_to_train": plain(["assistant"], ["gpt"], ["model"], otherwise="other turns than the answers are trained"),
    "train_on_eos": plain("turn", otherwise="other ends of turns are trained; Gemsmith trains each answer's own"),
    "drop_system_message": to_do("take the system messages out of the rows"),
    "field_tools": to_do("rows with tools have no counterpart; leave them out"),
    "field_thinking": to_do("rows with thoughts have no counterpart; leave them out"),
}
