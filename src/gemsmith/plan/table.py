"""The plan as a table on the terminal, in plain text: importing a library for it would take a tenth of the start."""

import sys
from collections.abc import Sequence
from typing import TextIO

from gemsmith.characters import spell_out
from gemsmith.recipe import Mesh
from gemsmith.records import MachinePlan, PlanRecord

GIB = 2**30
HEADINGS = ("machine", "mesh", "fits", "GiB/chip", "step s", "hours", "USD")
_WORDS = 3  # columns of words stand to the left, those of numbers to the right


def print_plan(record: PlanRecord, file: TextIO | None = None) -> None:
    """Prints the machines, then what the numbers rest on, to stdout or a file."""
    print(spell_out("\n".join(plan_lines(record))), file=file or sys.stdout)


def plan_lines(record: PlanRecord) -> list[str]:
    """The table, at most 80 columns wide, and below it a line for each note and assumption."""
    trained = f"{_count(record.trained_parameters)} trained of {_count(record.parameters)} parameters"
    per = f"{record.steps:,} steps" if record.steps is not None else f"hours and USD per {record.priced_steps:,} steps"
    meshes = [machine.mesh for machine in record.machines]
    axes = [axis for axis in Mesh.model_fields if axis in ("fsdp", "tp") or any(mesh[axis] > 1 for mesh in meshes)]
    rows = [HEADINGS, *(_cells(machine, axes) for machine in record.machines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        f"{record.model}: {trained}",
        f"{record.tokens_per_step:,} tokens a step; {per}; mesh is {' x '.join(axes)}",
        "",
    ]
    lines += ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    lines += ["", *(f"{machine.name}: {note}" for machine in record.machines for note in machine.notes)]
    return [*lines, "", *(f"- {assumption}" for assumption in record.assumptions)]


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if column < _WORDS else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _cells(machine: MachinePlan, axes: Sequence[str]) -> tuple[str, ...]:
    return (
        machine.name,
        "x".join(str(machine.mesh[axis]) for axis in axes),
        "yes" if machine.fits else "no",
        f"{machine.hbm_bytes_per_chip / GIB:.1f}/{machine.hbm_limit_bytes_per_chip / GIB:.1f}",
        _range(machine.step_s if machine.fits else None),
        _range(machine.hours),
        _range(machine.usd),
    )


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def _range(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{_short(values[0])}-{_short(values[1])}"


def _short(value: float) -> str:
    """Three digits, and no more than whole numbers need.

    >>> _short(0.04321), _short(12.34), _short(1234.5)
    ('0.043', '12.3', '1,234')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"
