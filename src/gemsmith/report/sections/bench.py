"""The load test: what each length came to, every cell, and the server's own metrics beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemsmith.bench_records import BenchCell, BenchRecord, Saturation
from gemsmith.report import numbers
from gemsmith.report.findings import Findings, fastest_cell, saturation_lines
from gemsmith.report.load_charts import load_charts, load_of
from gemsmith.run import Run

MOST_OPEN = 12
"""Cells whose tables are open from the start; those of more are opened by the reader."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """What the server came to at one length of requests."""

    input_tokens: int
    output_tokens: int
    lightest: BenchCell
    """Under the lowest load."""
    fastest: BenchCell
    """With the most output tokens/s."""
    saturates: str | None
    """None without an SLO."""


def make(_run: Run, findings: Findings) -> dict[str, Any]:
    """Charts, lengths, and the cells by length and load."""
    bench = findings.bench
    if bench is None:
        return {"charts": [], "lengths": [], "cells": [], "fastest": None, "metrics": [], "most_open": MOST_OPEN}
    cells = sorted(bench.cells, key=lambda cell: (cell.input_tokens, cell.output_tokens, *load_of(cell)))
    return {
        "charts": load_charts(bench),
        "lengths": lengths(bench, cells),
        "cells": cells,
        "fastest": fastest_cell(bench),
        "metrics": [cell for cell in cells if cell.server or cell.e2e_ms],
        "saturations": saturation_lines(bench),
        "most_open": MOST_OPEN,
    }


def lengths(bench: BenchRecord, cells: Sequence[BenchCell]) -> list[Length]:
    """One for each length that completed a request; the search's own cells count only as the fastest."""
    found = []
    for key in dict.fromkeys((cell.input_tokens, cell.output_tokens) for cell in cells):
        row = [cell for cell in cells if (cell.input_tokens, cell.output_tokens) == key and cell.completed]
        fastest = fastest_cell(bench.model_copy(update={"cells": tuple(row)}))
        if fastest is None:
            continue
        saturation = next((each for each in bench.saturations if (each.input_tokens, each.output_tokens) == key), None)
        found.append(
            Length(
                input_tokens=key[0],
                output_tokens=key[1],
                lightest=row[0],
                fastest=fastest,
                saturates=None if saturation is None else _saturates(saturation),
            )
        )
    return found


def _saturates(found: Saturation) -> str:
    if found.held_at is None:
        return f"below {numbers.plain(found.exceeded_at or 0)}"
    if found.exceeded_at is None:
        return f"not up to {numbers.plain(found.held_at)}"
    return f"{numbers.plain(found.held_at)} to {numbers.plain(found.exceeded_at)}"
