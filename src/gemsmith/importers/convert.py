"""`gemsmith port`: a recipe from the settings of a GPU recipe, and a table of what became of every key."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemsmith.arch import find_variant, variant_of_hub_id
from gemsmith.errors import InputError, RecipeError, some
from gemsmith.importers import projects
from gemsmith.importers.datasets import PLACEHOLDER
from gemsmith.importers.models import find_base
from gemsmith.importers.table import Row, Rule, Setting, SourceConfig, is_on, key_table, read_defaults, unknown
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.load import build_recipe, dump_recipe
from gemsmith.recipe.schema import Recipe, ResolvedValue, Train
from gemsmith.runs.resolve import place_recipe
from gemsmith.system.characters import escape_control_chars, escape_control_chars_json
from gemsmith.system.console import open_console
from gemsmith.system.files import regular_file, write_text
from gemsmith.system.json import read_json
from gemsmith.system.yaml import parse_yaml

BASE_KEYS = ("base_model_name_or_path", "model_name_or_path", "base_model")
NOWHERE = "(in no file)"
_ESSENTIAL = (
    *("lora.rank", "lora.alpha", "lora.targets", "optimizer.learning_rate"),
    *("train.global_batch_size", "data.max_length", "data.packing"),
)
STATE = "trainer_state.json"
FOLDER_FILES = (
    *("adapter_config.json", "training_args.json", "training_args.yaml", "training_args.yml"),
    *("sft_config.json", "sft_config.yaml", STATE),
)
PICKLE = "training_args.bin"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")
_TO_JSON = (
    "where you trust it, write its values with torch.load(FILE, weights_only=False).to_json_string() and give that JSON"
)
Settings = Mapping[str, Any]  # one file's leaf keys in its order: `datasets[0].path` -> value


@dataclass(frozen=True, kw_only=True)
class Ported:
    """The recipe, its values that a source gave or that were derived, and a row for each key of each file."""

    recipe: Recipe
    derived: Sequence[ResolvedValue]
    rows: Sequence[Row]

    @property
    def differences(self) -> list[Row]:
        """The rows by which the recipe would train differently."""
        return [row for row in self.rows if row.status == "differs"]


def port(
    sources: Sequence[Path], *, overrides: Sequence[str] = (), devices: int | None = None, steps: int | None = None
) -> Ported:
    """The recipe that the files of one run amount to; `devices` and `steps` are what files seldom say.

    Raises RecipeError where a file cannot be read, is of no known project, or asks for something else.
    """
    files, found_steps = read_settings(sources)
    # The keys that --set gives, and those that they are parts of: data.train.task gives data.train.
    keys = [override.partition("=")[0].strip().split(".") for override in overrides]
    overridden = frozenset(
        ".".join(parts[:depth]) for parts in keys for depth in range(min(2, len(parts)), len(parts) + 1)
    )
    readings = _readings(files, overrides, devices=devices, steps=steps or found_steps, overridden=overridden)
    given = [(Setting(key, value, config), rules) for config, rules in readings for key, value in config.given.items()]
    rows = [find_rule(setting.key, rules)(setting) for setting, rules in given]
    rows += _default_rows(readings, _values(rows))
    full = "train.method=full" in overrides or _values(rows).get("train.method") == "full"
    rows = [*_without_adapter(rows)] if full else rows
    rows += _missing_rows(_values(rows), overridden | {key for key in _ESSENTIAL if full and key.startswith("lora.")})
    values = _values(rows)
    if "checkpoint" not in values.keys() | overridden:
        remedy = "add --set checkpoint=google/gemma-4-31B-it, or the one that was trained"
        raise RecipeError(f"{sources[0]}: names no base model; {remedy}")
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        reduce(lambda section, parent: section.setdefault(parent, {}), parents, nested)[last] = value
    recipe = build_recipe(nested, overrides, source=str(sources[0]))
    for place, row in enumerate(rows):
        if row.sets and row.sets.keys() <= overridden:
            rows[place] = replace(row, status="set", why=f"--set {', '.join(row.sets)} decides", sets={})
    return Ported(recipe=recipe, derived=_derived(rows, overridden), rows=rows)


def read_settings(sources: Sequence[Path]) -> tuple[dict[str, Settings], int | None]:
    """Each file's settings by its name, and the updates that a folder's trainer_state.json says. Raises RecipeError."""
    found: dict[str, Settings] = {}
    steps: int | None = None
    for file in [file for source in sources for file in _files(source)]:
        values = _read(file)
        if file.name != STATE:
            pairs = list(leaves(values))
            names = [name for name, _ in pairs]
            if twice := [name for name in names if names.count(name) > 1]:
                raise RecipeError(f"{file}: {twice[0]} is given twice, nested and dotted; keep one")
            if file.name in found:
                raise RecipeError(f"{file.name}: two files of that name were given; give the files of one run")
            found[file.name] = dict(pairs)
            continue
        steps = values.get("max_steps")
        if not isinstance(steps, int) or steps < 1:
            why = f"max_steps is {steps!r}, where a run's state has its number of updates"
            raise RecipeError(f"{file}: {why}; leave the file out")
    if not found:
        remedy = "give the adapter_config.json or the training arguments too"
        raise RecipeError(f"{sources[0]}: holds no settings but {STATE}; {remedy}")
    return found, steps


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path; lists of plain values are leaves themselves.

    >>> dict(leaves({"lora_r": 8, "datasets": [{"path": "a"}], "fsdp": {}}))
    {'lora_r': 8, 'datasets[0].path': 'a', 'fsdp': {}}
    """
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list) and values and all(isinstance(item, Mapping) for item in values):
        for number, item in enumerate(values):
            yield from leaves(item, f"{prefix}[{number}]")
    else:
        yield prefix, values


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    files = [source / name for name in FOLDER_FILES if (source / name).is_file()]
    if not files:
        remedy = "give a file"
        if (source / PICKLE).exists():
            remedy = f"{PICKLE} is there, but is a pickle, which runs code when it is read: {_TO_JSON}"
        raise RecipeError(f"{source}: is a folder without {', '.join(FOLDER_FILES[:2])} or the like; {remedy}")
    return files


def _read(file: Path) -> Mapping[str, Any]:
    if file.suffix in _PICKLES:
        raise RecipeError(f"{file}: is a pickle, which runs code when it is read, so it is not; {_TO_JSON}")
    try:
        text = regular_file(file, most_bytes=2**27).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        remedy = "give an adapter_config.json, training arguments, an Axolotl or LLaMA-Factory YAML"
        raise RecipeError(f"{file}: does not exist; {remedy}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: is not text in UTF-8; give JSON or YAML") from None
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read ({error.strerror or error})") from None
    if not text.strip():
        raise RecipeError(f"{file}: is empty; give JSON or YAML with settings")
    try:
        is_json = file.suffix == ".json" or text.lstrip().startswith("{")
        values = read_json(file) if is_json else parse_yaml(text, str(file))
    except json.JSONDecodeError as error:
        raise RecipeError(f"{file} line {error.lineno}, column {error.colno}: is not JSON ({error.msg})") from None
    except ValueError as error:
        raise RecipeError(f"{file}: is not JSON ({error})") from None
    if not isinstance(values, dict) or not values:
        raise RecipeError(f"{file}: holds no mapping of keys to values; give JSON or YAML with settings")
    return values


def _readings(
    files: Mapping[str, Settings],
    overrides: Sequence[str],
    *,
    devices: int | None,
    steps: int | None,
    overridden: frozenset[str],
) -> list[tuple[SourceConfig, Mapping[str, Rule]]]:
    found = [_project(file, values) for file, values in files.items()]
    adapters = found.count(projects.PEFT)
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    backend = given.get("train.backend")
    variant = None  # that target modules are matched against
    names = ((f"{file}: {key}", values.get(key)) for file, values in files.items() for key in BASE_KEYS)
    if "model" in given:
        variant = find_variant(given["model"])
    elif "checkpoint" in given:
        variant = find_base(given["checkpoint"], "--set checkpoint").variant
    elif base := next(((name, where) for where, name in names if name is not None), None):
        variant = find_base(*base).variant
    readings = []
    for (file, values), project in zip(files.items(), found, strict=True):
        elsewhere = adapters > (project == projects.PEFT)
        left_out = read_defaults("trl_lora") if elsewhere else {}
        config = SourceConfig(
            file=file,
            project=project.name,
            given=values,
            devices=devices,
            steps=steps,
            overridden=overridden,
            defaults={key: value for key, value in project.defaults.items() if key not in left_out},
            variant=variant,
            adapter_elsewhere=elsewhere,
            backend=backend if backend in BACKENDS else Train.model_fields["backend"].default,
        )
        readings.append((config, project.rules))
    return readings


def _project(file: str, values: Settings) -> projects.Project:
    """Whose settings a file holds. Raises RecipeError for those of no known project."""
    keys, told_by = {re.split(r"[.\[]", key)[0] for key in values}, key_table()["told_by"]
    if "peft_type" in keys or {"r", "lora_alpha", "target_modules"} <= keys:
        return projects.PEFT
    if "base_model" in keys:
        return projects.AXOLOTL
    if keys & set(told_by["llama_factory"].split()):
        return projects.LLAMA_FACTORY
    known = [key for key in keys if find_rule(key, projects.TRL.rules) is not unknown]
    other = next((what for key, what in told_by["no_recipe"].items() if key in keys), None)
    if other or 2 * len(known) < len(keys):
        few = ", ".join(sorted(keys)[:4])
        why = other or f"its keys ({few}) are not of PEFT, TRL, TrainingArguments, Axolotl or LLaMA-Factory"
        remedy = "give an adapter_config.json, training arguments, or an Axolotl or LLaMA-Factory YAML"
        raise RecipeError(f"{file}: {why}; {remedy}")
    if not keys & set(told_by["trl"].split()):
        return projects.TRAINER
    defaults = dict(projects.TRL.defaults)
    if "model_name_or_path" in keys:
        defaults |= read_defaults("trl_model") | (read_defaults("trl_lora") if is_on(values.get("use_peft")) else {})
    return projects.TRL._replace(defaults=defaults)


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule of a key: its own, or its section's `section.*`, or that of names that begin alike, `wandb_*`."""
    plain = re.sub(r"\[\d+\]", "[]", key)
    if plain in rules:
        return rules[plain]
    parts = plain.split(".")
    for depth in range(len(parts), 0, -1):
        if rule := rules.get(".".join(parts[:depth]) + ".*"):
            return rule
    begins = [name for name in rules if name.endswith("*") and plain.startswith(name[:-1])]
    return rules[max(begins, key=len)] if begins else unknown


def _default_rows(readings: Sequence[tuple[SourceConfig, Mapping[str, Rule]]], values: Mapping[str, Any]) -> list[Row]:
    """Rows for defaults whose value the recipe takes, or without which it would train differently."""
    rows: list[Row] = []
    settled = set(values)
    for config, rules in readings:
        for key in [key for key in config.defaults if key not in config.given]:
            row = find_rule(key, rules)(Setting(key, config.defaults[key], config))
            open_keys = {name: value for name, value in row.sets.items() if name not in settled}
            if open_keys or (not row.sets and row.status in ("differs", "set")):
                rows.append(replace(row, sets=open_keys))
                settled |= open_keys.keys()
    return rows


def _without_adapter(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows where every weight is trained: keys of an adapter say nothing."""
    for row in rows:
        if not any(name.startswith("lora.") for name in row.sets):
            yield row
        elif row.given:
            yield replace(row, status="none", why="every weight is trained, and there is no adapter", sets={})


def _missing_rows(values: Mapping[str, Any], overridden: frozenset[str]) -> Iterator[Row]:
    """What a recipe needs and no file says."""
    known = values.keys() | overridden
    missing = partial(Row, file=NOWHERE, value=None, status="to do", given=False)
    if "data.train" not in known:
        why = "the rows: put them there, or name them by --set data.train=FILE"
        yield missing(key="data.train", why=why, sets={"data.train": PLACEHOLDER})
    if unsaid := [key for key in _ESSENTIAL if key not in known]:
        why = "Gemsmith's defaults; give the run's other file too (adapter or training arguments), or --set them"
        why += "; without an adapter: --set train.method=full" if "lora.rank" in unsaid else ""
        yield missing(key=", ".join(unsaid), why=why)
    checkpoint = str(values.get("checkpoint", ""))
    if variant_of_hub_id(checkpoint) and not checkpoint.lower().endswith("-it") and "data.template" not in known:
        why = f"{checkpoint} ships no chat template: set it to the chat_template.jinja of {checkpoint}-it"
        yield missing(key="data.template", why=why)


def _values(rows: Iterable[Row]) -> dict[str, Any]:
    """The recipe's keys and values that rows set. Raises RecipeError where two rows do not agree."""
    values: dict[str, Any] = {}
    origins: dict[str, Row] = {}
    for row in rows:
        for name, value in row.sets.items():
            if name in values and values[name] != value:
                first = f"{values[name]!r} by {origins[name].file}: {origins[name].key}"
                second = f"{value!r} by {row.file}: {row.key}"
                raise RecipeError(f"{name}: {first}, {second}; give the files of one run")
            values[name] = value
            origins.setdefault(name, row)
    return values


def _derived(rows: Sequence[Row], overridden: frozenset[str]) -> list[ResolvedValue]:
    """The comments behind the recipe's values, each on one line."""
    reasons: dict[str, tuple[Any, list[str]]] = {}
    for row in rows:
        for name, value in row.sets.items():
            alone = not row.given or (row.status == "derived" and row.key in row.why)
            origin = row.why if alone else f"{row.key}{f': {row.why}' if row.why else ''}"
            reasons.setdefault(name, (value, []))[1].append(origin)
    for name in overridden:
        reasons[name] = (None, ["--set"])
    return [
        ResolvedValue(name, value, " ".join("; ".join(dict.fromkeys(why)).split()))
        for name, (value, why) in reasons.items()
    ]


_ORDER = ("differs", "to do", "mapped", "derived", "set", "none")
_STYLES = {"differs": "bold red", "to do": "yellow", "none": "dim"}
_NAMES = {"none": "no counterpart"}
_WIDEST = 48
_NAMED = 8


def print_table(ported: Ported, console: Console) -> None:
    """Prints a row for each key, those that need eyes first, and counts."""
    files = {row.file for row in ported.rows if row.file != NOWHERE}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "key", "value", "in the recipe", "why"):
        table.add_column(title, overflow="fold")
    for row in _sorted(ported.rows):
        cells = (
            _NAMES.get(row.status, row.status),
            row.key if len(files) == 1 or not row.given else f"{row.file}: {row.key}",
            _short(row.value) if row.given else "(not given)",
            ", ".join(f"{name}: {_short(value)}" for name, value in row.sets.items()),
            row.why,
        )
        style = _STYLES.get(row.status, "")
        table.add_row(*(Text(escape_control_chars(cell), style=style) for cell in cells))
    console.print(table)
    counts = {status: sum(row.status == status for row in ported.rows) for status in _ORDER}
    line = ", ".join(f"{count} {_NAMES.get(status, status)}" for status, count in counts.items() if count)
    console.print(f"{sum(row.given for row in ported.rows)} keys of {', '.join(sorted(files))}: {line}")


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: _ORDER.index(row.status))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def port_files(
    sources: Sequence[Path],
    out: Path | None,
    overrides: Sequence[str],
    *,
    print_json: bool,
    allow_differences: bool,
    **known: int | None,
) -> None:
    """Writes the recipe to `out` or stdout; raises InputError, and writes none, where it would train differently."""
    if out is not None and out.exists():
        raise InputError(f"--out {out}: already exists; name another file, or delete it")
    ported = port(sources, overrides=overrides, **known)
    if print_json:
        rows = [vars(row) | {"status": _NAMES.get(row.status, row.status)} for row in _sorted(ported.rows)]
        differences = [f"{row.file}: {row.key}" for row in ported.differences]
        document = {"differences": differences, "rows": rows, "recipe": ported.recipe.model_dump(mode="json")}
        click.echo(escape_control_chars_json(json.dumps(document, indent=1, ensure_ascii=False, default=str)))
    else:
        console = open_console(stderr=out is None, soft_wrap=False)
        if not console.is_terminal:  # wide enough to copy from
            console.width = 200
        print_table(ported, console)
    if ported.differences and not allow_differences:
        names = list(dict.fromkeys(row.key for row in ported.differences))
        remedy = "no recipe was written; --allow-differences writes it all the same"
        raise InputError(f"the recipe would train differently from its source in {some(names, _NAMED)}; {remedy}")
    text = dump_recipe(place_recipe(ported.recipe, out.parent if out else Path()), ported.derived)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
        click.echo(escape_control_chars(f"{out} written; next: gemsmith plan {out}"), err=True)
    elif not print_json:
        click.echo(text, nl=False)
