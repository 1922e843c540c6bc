"""Files of settings, the rows that became of them, and `gemsmith port` in this process.

In settings/ lie settings as the projects publish them, in our own words.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemsmith.cli import main

SMALL = Path(__file__).parent / "settings" / "small_axolotl.yaml"


@pytest.fixture
def write() -> Callable[..., Path]:
    def write(folder: Path, settings: dict[str, Any], name: str = "settings.yaml") -> Path:
        file = folder / name
        text = json.dumps(settings, indent=2) if file.suffix == ".json" else yaml.safe_dump(settings, sort_keys=False)
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def of() -> Callable[[list[Any], str], Any]:
    def of(rows: list[Any], key: str) -> Any:
        return next(row for row in rows if row.key == key)

    return of


@pytest.fixture
def run() -> Callable[..., int]:
    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as stopped:
            main(["port", *map(str, arguments)])
        return int(stopped.value.code or 0)

    return run


@pytest.fixture
def text() -> Callable[[Path, str], Path]:
    def text(file: Path, content: str) -> Path:
        file.write_text(content, encoding="utf-8")
        return file

    return text


@pytest.fixture
def settings(text: Callable[[Path, str], Path]) -> Callable[..., Path]:
    """Writes a small file of Axolotl's, changed: `settings(folder, optimizer="lion_8bit")`."""

    def settings(folder: Path, **changed: object) -> Path:
        return text(folder / "settings.yaml", yaml.safe_dump(yaml.safe_load(SMALL.read_text()) | changed))

    return settings
