"""Settings files as flat keys and values: JSON or YAML, or the folder of a run that holds some."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemsmith.errors import RecipeError
from gemsmith.system.files import regular_file
from gemsmith.system.json import read_json
from gemsmith.system.yaml import parse_yaml

FOLDER_FILES = (
    *("adapter_config.json", "training_args.json", "training_args.yaml", "training_args.yml"),
    *("sft_config.json", "sft_config.yaml", "trainer_state.json"),
)
STATE = "trainer_state.json"
PICKLE = "training_args.bin"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")
_TO_JSON = (
    "where you trust it, write its values with torch.load(FILE, weights_only=False).to_json_string() and give that JSON"
)


Settings = Mapping[str, Any]
"""One file's leaf keys in its order: `datasets[0].path` -> value."""


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
            raise RecipeError(
                f"{file}: max_steps is {steps!r}, where a run's state has its number of updates; leave the file out"
            )
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
