"""The plan as a table on the terminal, in plain text: importing a library for it would take a tenth of the start."""

from collections.abc import Iterator, Sequence

from gemsmith.plan.fix import KEYS
from gemsmith.plan.machine import PROCESS, RUNTIME, SET_MESH, describe_changes
from gemsmith.plan.serving import describe_cold_start
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.plan_records import MachinePlan, PlanRecord, ServingPlan
from gemsmith.runs.records import Range

GIB = 2**30
HEADINGS = ("machine", "mesh", "fits", "memory, GiB/chip", "hours", "USD", "USD/M tok")
SERVING_HEADINGS = ("machine", "dtype", "tp", "memory", "at once", "prefill ms", "token ms", "out tok/s", "USD/M out")
BAR = 8  # letters that a chip's memory is wide
PARTS = {
    "frozen weights": ("W", "weights", "s1"),
    "adapters": ("A", "adapters, moments, gradients", "s2"),
    "trained weights": ("A", "trained weights, moments, gradients", "s2"),
    "moments": ("A", "adapters, moments, gradients", "s2"),
    "gradients": ("A", "adapters, moments, gradients", "s2"),
    "saved activations": ("S", "saved activations", "s3"),
    PROCESS: ("r", "the runtime's", "line-strong"),
    RUNTIME: ("r", "the runtime's", "line-strong"),
}
"""A part of the memory -> its letter in the bar, what the page shows it as, and the color there."""
OTHER = ("L", "the layer or loss at hand", "s4")  # the same of all other parts
LEGEND = (
    "memory: W frozen weights, A what is trained with moments and gradients, S saved activations,\n"
    "L the layer or loss at hand, r the runtime's, . free, > more than there is"
)
DETAILED = 3  # with more machines than this, notes are left to --json
_WORDS = 4  # columns of words stand to the left, those of numbers to the right


def plan_lines(record: PlanRecord) -> list[str]:
    """The table, at most 80 columns wide, and below it a line for each note and assumption."""
    trained, parameters = (
        f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
        for number in (record.trained_parameters, record.parameters)
    )
    meshes = [machine.mesh for machine in record.machines]
    axes = [axis for axis in Mesh.model_fields if axis in ("fsdp", "tp") or any(mesh[axis] > 1 for mesh in meshes)]
    lines = [
        f"{record.model}: {trained} trained of {parameters} parameters",
        f"{record.tokens_per_step:,} positions a step; hours and USD for {record.priced}; mesh is {' x '.join(axes)}",
        "",
    ]
    rows = [
        (
            machine.name,
            "x".join(str(machine.mesh[axis]) for axis in axes),
            "yes" if machine.fits else "no",
            f"{bar_of(machine)} {machine.hbm_bytes_per_chip / GIB:.0f}/{machine.hbm_limit_bytes_per_chip / GIB:.0f}",
            *map(_range, (machine.hours, machine.usd, machine.usd_per_million_tokens)),
        )
        for machine in record.machines
    ]
    lines += [*_aligned([HEADINGS, *rows]), "", *LEGEND.splitlines(), ""]
    unfit: dict[str, list[str]] = {}
    for machine in (machine for machine in record.machines if not machine.fits):
        why = f"{machine.exceeded_by} exceed the memory" if machine.exceeded_by else machine.notes[0]
        if (fix := machine.fix) is None:
            unfit.setdefault(why, []).append(machine.name)
            continue
        usd = f"{_range(fix.usd)} USD" if fix.usd else "no price"
        lines.append(
            f"{machine.name}: {why}; fits with {describe_changes(fix.changes)}: "
            f"{fix.hbm_bytes_per_chip / GIB:.1f} GiB, {_range(fix.hours)} h, {usd}"
        )
    for why, names in unfit.items():
        lines.append(f"{', '.join(names)}: {why}; no change of {', '.join(KEYS)} was found that fits")
    if len(record.machines) <= DETAILED:
        lines += [f"{machine.name}: {note}" for machine in record.machines for note in machine.notes]
    else:
        lines += _noted_lines(record)
        lines.append("Prices, speeds and their sources for each machine: --json, or fewer machines with --machine.")
    return [*lines, "", *(f"- {assumption}" for assumption in record.assumptions)]


def serving_lines(record: PlanRecord) -> list[str]:
    """A table of what serving comes to for each length, the cheapest first by the upper ends."""
    lines = [f"{record.model} served by vLLM, with as many requests at once as fit; estimated"]
    for load in dict.fromkeys(row.load for row in record.serving):
        fitting = [row for row in record.serving if row.load == load and row.fits]
        cells = [
            (
                row.machine,
                {"bfloat16": "bf16", "float32": "fp32"}.get(row.weight_dtype or "", row.weight_dtype or ""),
                f"{row.tensor_parallel}x{row.copies}",
                f"{(row.weights_bytes_per_chip or 0) / GIB:.0f}+{(row.kv_room_bytes_per_chip or 0) / GIB:.0f}",
                f"{row.requests:,}",
                *(_range(seconds, 1e3) for seconds in (row.prefill_s, row.decode_step_s)),
                *map(_range, (row.output_tokens_per_s, row.usd_per_million_tokens)),
            )
            for row in sorted(fitting, key=serving_cost)
        ]
        lines += ["", load, "", *_aligned([SERVING_HEADINGS, *cells])]
    if refused := dict.fromkeys(f"{row.machine}: {row.why}" for row in record.serving if row.why):
        lines += ["", *refused]
    if record.serving_warnings:
        lines += ["", *(f"warning: {warning}" for warning in record.serving_warnings)]
    lines.append("")
    for name, tests in {row.machine: row.measured for row in record.serving if row.measured}.items():
        lines.append(f"- {name}: the range that load tests measured there, and 15 % each way: {tests}")
    starts = {row.machine: row.cold_start_s for row in record.serving if row.fits}
    for name, loads in starts.items() if len(starts) <= DETAILED else ():
        for load, parts in loads.items():
            lines += [f"- {name}: a cold start with --load {load} takes", f"  {describe_cold_start(parts)}"]
    lines.append("- memory: GiB a chip of weights, and left for keys and values; tp is tensor parallel x copies.")
    if not record.serving:
        lines.append(
            "- no machine has a row: of a CPU no speed is known before --calibrate with a run that has bench.json"
        )
    if any(row.images for row in record.serving):
        lines.append("- Images are embedded before their prompt, by each device whole; of that no speed was published.")
    return [
        *lines,
        "- Prefill as training's matmuls, on GPU up to 80 % of the peak; decode at 25-60 % of the roofline",
        "  on TPU, 50-97 % on GPU, as in load tests of the 31B (docs/how-to/plan.md). Batches are full.",
    ]


def serving_cost(row: ServingPlan) -> tuple[bool, float]:
    """A key to sort by: the cheapest, then those without a price, the fastest first."""
    usd, speed = row.usd_per_million_tokens, row.output_tokens_per_s
    return usd is None, usd[1] if usd else -(speed[1] if speed else 0)


def bar_of(machine: MachinePlan) -> str:
    """A chip's memory as a bar of letters, by part, the runtime's at its end."""
    limit = machine.hbm_limit_bytes_per_chip
    letters, held = "", 0
    for name, size in machine.parts.items():
        if name != RUNTIME:
            held += size
            letters += PARTS.get(name, OTHER)[0] * (min(BAR, round(BAR * held / limit)) - len(letters))
    if machine.exceeded_by is not None:
        return letters[: BAR - 1].ljust(BAR - 1, OTHER[0]) + ">"
    runtime = max(1, round(BAR * machine.parts.get(RUNTIME, 0) / limit))
    return letters[: BAR - runtime].ljust(BAR - runtime, ".") + PARTS[RUNTIME][0] * runtime


def _noted_lines(record: PlanRecord) -> Iterator[str]:
    """What the notes of many machines come to: a line for each kind of note, with the machines that it is about."""
    machines = record.machines
    if set_mesh := [machine.name for machine in machines if any(note.startswith(SET_MESH) for note in machine.notes)]:
        yield f"{SET_MESH} what the table shows on {', '.join(set_mesh)}; auto trains with tp 1: slower, or too large"
    if spot := [f"{machine.name} {_range(machine.usd_spot)}" for machine in machines if machine.usd_spot]:
        yield f"USD on spot, with preemptions as assumed below: {', '.join(spot)}"
    for machine in machines:
        yield from (f"{machine.name}: {note}" for note in machine.notes if machine.compiled and "compiled for" in note)
    if measured := [machine.name for machine in machines if machine.measured]:
        yield f"hours after what trainings measured there (--calibrate): {', '.join(measured)}"
    for doubt in dict.fromkeys(doubt for machine in machines for doubt in machine.price_doubts):
        yield f"prices {doubt}: {', '.join(machine.name for machine in machines if doubt in machine.price_doubts)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < _WORDS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _range(values: Range | None, unit: float = 1) -> str:
    return "-" if values is None else "-".join(_short(unit * value) for value in values)


def _short(value: float) -> str:
    """Three digits, and no more than whole numbers need.

    >>> _short(0.04321), _short(12.34), _short(1234.5)
    ('0.043', '12.3', '1,234')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"
