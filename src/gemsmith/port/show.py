"""The table of what became of every key, for a terminal and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemsmith.characters import spell_out
from gemsmith.port.stage import NOWHERE, Ported
from gemsmith.port.table import Row

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
        table.add_row(*(Text(spell_out(cell), style=style) for cell in cells))
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
