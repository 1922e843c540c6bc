"""The plan as a table on the terminal."""

from typing import IO

from gemsmith.records import MachinePlan, PlanRecord

GIB = 2**30


def print_plan(record: PlanRecord, file: IO[str] | None = None) -> None:
    """Prints the machines, then what the numbers rest on, to stdout or a file."""
    from rich.console import Console  # imported here, so that importing the stage stays quick
    from rich.table import Table

    console = Console(file=file, highlight=False)
    trained = f"{record.trained_parameters / 1e6:,.1f} M trained of {record.parameters / 1e9:,.2f} B"
    per = f"{record.steps:,} steps" if record.steps is not None else f"per {record.priced_steps:,} steps"
    console.print(f"{record.model}: {trained}, {record.tokens_per_step:,} tokens a step, {per}", style="bold", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))  # a frame would cost the width that the numbers need at 80 columns
    table.add_column("machine", no_wrap=True)
    table.add_column("mesh", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for heading in ("GiB/chip", "step s", "hours", "USD"):
        table.add_column(heading, justify="right", no_wrap=True)
    for machine in record.machines:
        table.add_row(*_cells(machine), style=None if machine.fits else "dim")
    console.print(table)
    console.print("mesh: fsdp x tp; USD: on demand", style="dim")
    for machine in record.machines:
        for note in machine.notes:
            console.print(f"{machine.name}: {note}", style="dim", markup=False, soft_wrap=True)
    for assumption in record.assumptions:
        console.print(f"- {assumption}", markup=False, soft_wrap=True)


def _cells(machine: MachinePlan) -> list[str]:
    return [
        machine.name,
        f"{machine.mesh['fsdp']}x{machine.mesh['tp']}",
        "yes" if machine.fits else "no",
        f"{machine.hbm_bytes_per_chip / GIB:.1f}/{machine.hbm_limit_bytes_per_chip / GIB:.1f}",
        _range(machine.step_s if machine.fits else None),
        _range(machine.hours),
        _range(machine.usd),
    ]


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
