"""A Gemsmith recipe from the settings of a GPU recipe, and the table of what became of every key.

The table of what became of every key, for a terminal and as JSON.

`gemsmith port`: reads the files, prints the table, writes the recipe.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemsmith.arch import Variant, find_variant, variant_of_hub_id
from gemsmith.errors import InputError, RecipeError
from gemsmith.importers import axolotl, llama_factory, peft
from gemsmith.importers import hf_trainer as trainer
from gemsmith.importers.datasets import PLACEHOLDER
from gemsmith.importers.models import find_base
from gemsmith.importers.reader import Settings, read_settings
from gemsmith.importers.table import Row, Rule, SourceConfig, is_on, unknown
from gemsmith.recipe.backends import BACKENDS
from gemsmith.recipe.load import build_recipe, dump_recipe
from gemsmith.recipe.schema import Recipe, ResolvedValue, Train
from gemsmith.system.characters import escape_control_chars, escape_control_chars_json
from gemsmith.system.console import open_console
from gemsmith.system.files import write_text

BASE_KEYS = ("base_model_name_or_path", "model_name_or_path", "base_model")
NOWHERE = "(in no file)"
_ESSENTIAL = (
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "optimizer.learning_rate",
    "train.global_batch_size",
    "data.max_length",
    "data.packing",
)
_FACTORY_KEYS = {
    "finetuning_type", "stage", "cutoff_len", "lora_rank", "lora_target", "dataset_dir", "template",
    "neat_packing", "train_on_prompt",
    "quantization_bit",
}  # fmt: skip
_SFT_KEYS = {
    "max_length", "max_seq_length", "packing", "packing_strategy", "padding_free", "assistant_only_loss",
    "completion_only_loss",
    "dataset_text_field", "dataset_name", "model_name_or_path", "use_peft",
}  # fmt: skip
_NO_RECIPE = {
    "architectures": "a model's config.json",
    "checkpoint": "a recipe of Gemsmith's already",
    "distributed_type": "accelerate's settings, of which only the number of devices matters: give --devices",
    "center_rewards_coefficient": (
        "a reward model's training arguments, where Gemsmith does supervised fine-tuning only"
    ),
    "zero_optimization": "DeepSpeed's settings, which say how it runs and not what is learned",
}


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


@dataclass(frozen=True, kw_only=True)
class _Project:
    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]


def port(
    sources: Sequence[Path], *, overrides: Sequence[str] = (), devices: int | None = None, steps: int | None = None
) -> Ported:
    """The recipe that the files of one run amount to.

    `devices` and `steps` are what files seldom say: GPUs, and updates of the run.

    Raises RecipeError where a file cannot be read, is of no known project, or asks for something else than fine-tuning
    a Gemma 4.
    """
    files, found_steps = read_settings(sources)
    readings = _readings(files, overrides, devices, steps or found_steps)
    rows = [_row_of(key, value, reading, rules) for reading, rules in readings for key, value in reading.given.items()]
    values = _values(rows)
    rows += _default_rows(readings, values)
    values = _values(rows)
    overridden = _overridden(overrides)
    rows += _missing_rows(values, overridden)
    values = _values(rows)
    if "checkpoint" not in values.keys() | overridden:
        raise RecipeError(
            f"{sources[0]}: names no base model; add --set checkpoint=google/gemma-4-31B-it, or the one that was "
            "trained"
        )
    recipe = build_recipe(_nested(values), overrides, source=str(sources[0]))
    rows = [_as_set(row, overridden) for row in rows]
    return Ported(recipe=recipe, derived=_derived(rows, overrides), rows=rows)


def _readings(
    files: Sequence[Settings], overrides: Sequence[str], devices: int | None, steps: int | None
) -> list[tuple[SourceConfig, Mapping[str, Rule]]]:
    projects = [_project(file) for file in files]
    variant, adapters = _variant(files, overrides), sum(project.name == peft.PROJECT for project in projects)
    readings = []
    for file, project in zip(files, projects, strict=True):
        elsewhere = adapters > (project.name == peft.PROJECT)
        defaults = {
            key: value for key, value in project.defaults.items() if not (elsewhere and key in trainer.LORA_DEFAULTS)
        }
        reading = SourceConfig(
            file=file.file,
            project=project.name,
            given=file.values,
            defaults=defaults,
            devices=devices,
            steps=steps,
            variant=variant,
            overridden=_overridden(overrides),
            adapter_elsewhere=elsewhere,
            backend=_backend(overrides),
        )
        readings.append((reading, project.rules))
    return readings


def _backend(overrides: Sequence[str]) -> str:
    given = [value for key, _, value in (override.partition("=") for override in overrides) if key == "train.backend"]
    return next((name for name in given[-1:] if name in BACKENDS), Train.model_fields["backend"].default)


def _project(file: Settings) -> _Project:
    """Whose settings a file holds, by its keys. Raises RecipeError for those of no project known here."""
    keys = {re.split(r"[.\[]", key)[0] for key in file.values}
    if "peft_type" in keys or {"r", "lora_alpha", "target_modules"} <= keys:
        return _Project(name=peft.PROJECT, rules=peft.RULES, defaults=peft.DEFAULTS)
    if "base_model" in keys:
        return _Project(name=axolotl.PROJECT, rules=axolotl.RULES, defaults=axolotl.DEFAULTS)
    if keys & _FACTORY_KEYS:
        return _Project(name=llama_factory.PROJECT, rules=llama_factory.RULES, defaults=llama_factory.DEFAULTS)
    known = [key for key in keys if find_rule(key, trainer.RULES)]
    other = next((what for key, what in _NO_RECIPE.items() if key in keys), None)
    if other or 2 * len(known) < len(keys):
        why = (
            other
            or f"its keys ({', '.join(sorted(keys)[:4])}) are not of PEFT, TRL, TrainingArguments, Axolotl or "
            "LLaMA-Factory"
        )
        raise RecipeError(
            f"{file.file}: {why}; give an adapter_config.json, training arguments, or an Axolotl or LLaMA-Factory YAML"
        )
    if not keys & _SFT_KEYS:
        return _Project(name=trainer.PROJECT, rules=trainer.RULES, defaults=trainer.DEFAULTS)
    defaults = dict(trainer.SFT_DEFAULTS)
    if "model_name_or_path" in keys:
        defaults |= trainer.MODEL_DEFAULTS | (trainer.LORA_DEFAULTS if is_on(file.values.get("use_peft")) else {})
    return _Project(name=trainer.SFT_PROJECT, rules=trainer.RULES, defaults=defaults)


def _variant(files: Sequence[Settings], overrides: Sequence[str]) -> Variant | None:
    """The model that target modules are matched against. Raises RecipeError for a base that is no Gemma 4."""
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    if "model" in given:
        return find_variant(given["model"])
    if "checkpoint" in given:
        return find_base(given["checkpoint"], "--set checkpoint").variant
    names = ((file.file, key, file.values.get(key)) for file in files for key in BASE_KEYS)
    found = next(((file, key, name) for file, key, name in names if name is not None), None)
    return find_base(found[2], f"{found[0]}: {found[1]}").variant if found else None


def _overridden(overrides: Iterable[str]) -> frozenset[str]:
    """The recipe's keys that --set gives, and the keys that they are parts of: data.train.task gives data.train."""
    keys = [override.partition("=")[0].strip().split(".") for override in overrides]
    return frozenset(".".join(parts[:depth]) for parts in keys for depth in range(min(2, len(parts)), len(parts) + 1))


def _row_of(key: str, value: Any, reading: SourceConfig, rules: Mapping[str, Rule]) -> Row:
    return (find_rule(key, rules) or unknown)(key, value, reading)


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key: its own, or its section's `section.*`, or that of names that begin alike, `wandb_*`."""
    plain = re.sub(r"\[\d+\]", "[]", key)
    if plain in rules:
        return rules[plain]
    parents = plain.split(".")
    for depth in range(len(parts := parents) - 1, 0, -1):
        if rule := rules.get(".".join(parts[:depth]) + ".*"):
            return rule
    return next((rule for name, rule in rules.items() if name.endswith("_*") and plain.startswith(name[:-1])), None)


def _default_rows(readings: Sequence[tuple[SourceConfig, Mapping[str, Rule]]], values: Mapping[str, Any]) -> list[Row]:
    """Rows for what a file leaves to its project's defaults.

    Those whose value the recipe takes, or without which it would train differently.
    """
    rows: list[Row] = []
    settled = set(values)
    for reading, rules in readings:
        for key in [key for key in reading.defaults if key not in reading.given]:
            row = _row_of(key, reading.defaults[key], reading, rules)
            open_keys = {name: value for name, value in row.sets.items() if name not in settled}
            if open_keys or (not row.sets and row.status in ("differs", "set")):
                rows.append(replace(row, sets=open_keys))
                settled |= open_keys.keys()
    return rows


def _missing_rows(values: Mapping[str, Any], overridden: frozenset[str]) -> Iterator[Row]:
    """What a recipe needs and no file says."""

    def missing(key: str, why: str, **sets: Any) -> Row:
        return Row(file=NOWHERE, key=key, value=None, status="to do", why=why, sets=sets, given=False)

    known = values.keys() | overridden
    if "data.train" not in known:
        yield missing(
            "data.train",
            "the rows: put them there, or name them by --set data.train=FILE",
            **{"data.train": PLACEHOLDER},
        )
    if unsaid := [key for key in _ESSENTIAL if key not in known]:
        yield missing(
            ", ".join(unsaid),
            "Gemsmith's defaults; give the run's other file too (adapter or training arguments), or --set them",
        )
    checkpoint = str(values.get("checkpoint", ""))
    if variant_of_hub_id(checkpoint) and not checkpoint.lower().endswith("-it") and "data.template" not in known:
        yield missing(
            "data.template",
            f"{checkpoint} ships no chat template: set it to the chat_template.jinja of {checkpoint}-it",
        )


def _values(rows: Iterable[Row]) -> dict[str, Any]:
    """The recipe's keys and values that rows set. Raises RecipeError where two rows do not agree."""
    values: dict[str, Any] = {}
    origins: dict[str, Row] = {}
    for row in rows:
        for name, value in row.sets.items():
            if name in values and values[name] != value:
                first = origins[name]
                raise RecipeError(
                    f"{name}: {values[name]!r} by {first.file}: {first.key}, {value!r} by {row.file}: {row.key}; give "
                    "the files of one run"
                )
            values[name] = value
            origins.setdefault(name, row)
    return values


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return nested


def _as_set(row: Row, overridden: frozenset[str]) -> Row:
    """The row as decided by --set, where that gives every key of the recipe that it sets."""
    if not row.sets or not row.sets.keys() <= overridden:
        return row
    return replace(row, status="set", why=f"--set {', '.join(row.sets)} decides", sets={})


def _derived(rows: Sequence[Row], overrides: Sequence[str]) -> list[ResolvedValue]:
    """The comments behind the recipe's values."""
    reasons: dict[str, tuple[Any, list[str]]] = {}
    for row in rows:
        for name, value in row.sets.items():
            alone = not row.given or (row.status == "derived" and row.key in row.why)
            origin = row.why if alone else f"{row.key}{f': {row.why}' if row.why else ''}"
            reasons.setdefault(name, (value, []))[1].append(origin)
    for name in _overridden(overrides):
        reasons[name] = (None, ["--set"])
    return [
        ResolvedValue(name, value, _one_line("; ".join(dict.fromkeys(why)))) for name, (value, why) in reasons.items()
    ]


def _one_line(text: str) -> str:
    # A comment that dump_recipe writes ends with its line, and begins behind two spaces.
    return " ".join(text.split())


_ORDER = ("differs", "to do", "mapped", "derived", "set", "none")
_STYLES = {"differs": "bold red", "to do": "yellow", "none": "dim"}
_NAMES = {"none": "no counterpart"}
_WIDEST = 48


def print_table(ported: Ported, console: Console) -> None:
    """Prints a row for each key, those that need eyes first, and counts."""
    files = {row.file for row in ported.rows if row.file != NOWHERE}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", "key", "value", "in the recipe", "why"):
        table.add_column(title, overflow="fold")
    for row in _sorted(ported.rows):
        name = row.key if len(files) == 1 or not row.given else f"{row.file}: {row.key}"
        style = _STYLES.get(row.status, "")
        cells = [
            _NAMES.get(row.status, row.status),
            name,
            _short(row.value) if row.given else "(not given)",
            _recipe_part(row),
            row.why,
        ]
        table.add_row(*(Text(escape_control_chars(cell), style=style) for cell in cells))
    console.print(table)
    counts = {status: sum(row.status == status for row in ported.rows) for status in _ORDER}
    line = ", ".join(f"{count} {_NAMES.get(status, status)}" for status, count in counts.items() if count)
    console.print(f"{len([row for row in ported.rows if row.given])} keys of {', '.join(sorted(files))}: {line}")


def as_json(ported: Ported) -> str:
    """The recipe and its table."""
    rows = [
        {
            "file": row.file, "key": row.key, "value": row.value, "given": row.given, "status": _NAMES.get(row.status,
                                                            row.status),
            "sets": dict(row.sets), "why": row.why,
        }
        for row in _sorted(ported.rows)
    ]  # fmt: skip
    differences = [f"{row.file}: {row.key}" for row in ported.differences]
    document = {"differences": differences, "rows": rows, "recipe": ported.recipe.model_dump(mode="json")}
    return json.dumps(document, indent=1, ensure_ascii=False, default=str)


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: _ORDER.index(row.status))


def _recipe_part(row: Row) -> str:
    return ", ".join(f"{name}: {_short(value)}" for name, value in row.sets.items())


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


_NAMED = 8


def port_files(
    sources: Sequence[Path],
    out: Path | None,
    overrides: Sequence[str],
    *,
    json: bool,
    allow_differences: bool,
    **known: int | None,
) -> None:
    """Writes the recipe to `out`, or to stdout with the table on stderr.

    Raises InputError, and writes no recipe, where it would train differently and that is not allowed.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: already exists; name another file, or delete it")
    ported = port(sources, overrides=overrides, **known)
    text = dump_recipe(ported.recipe, ported.derived)
    if json:
        click.echo(escape_control_chars_json(as_json(ported)))
    else:
        console = open_console(stderr=out is None, soft_wrap=False)
        if not console.is_terminal:  # wide enough to copy from
            console.width = 200
        print_table(ported, console)
    if ported.differences and not allow_differences:
        raise InputError(_refusal(ported))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
        click.echo(escape_control_chars(f"{out} written; next: gemsmith plan {out}"), err=True)
    elif not json:
        click.echo(text, nl=False)


def _refusal(ported: Ported) -> str:
    names = list(dict.fromkeys(row.key for row in ported.differences))
    named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return (
        f"the recipe would train differently from its source in {named}; no recipe was written; --allow-differences "
        "writes it all the same"
    )
