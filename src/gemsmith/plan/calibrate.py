"""What trainings measured on a machine say of it, as rows of the user's own catalogue."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import yaml

from gemsmith.errors import RunError
from gemsmith.execution import Remat
from gemsmith.files import write_text
from gemsmith.hardware import Machine, load_catalogue, machines_with
from gemsmith.hardware.catalogue import read_rows
from gemsmith.plan.time import share_reached
from gemsmith.provenance import this_machine
from gemsmith.recipe import Mesh, Recipe
from gemsmith.records import Origin, TrainRecord
from gemsmith.resolve import recipe_variant
from gemsmith.run import Run, find_run, read_record
from gemsmith.sizing import on_chips, work_of
from gemsmith.train.timed import timed_steps

LEAST_STEPS = 10
"""Beside the first, which warms up."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the runs on one machine came to."""

    machine: str
    low: float
    """Share of the chips' peak that matmuls reached in the slowest run."""
    high: float
    source: str
    date: str


def calibrate(folders: Sequence[Path], file: Path) -> list[Calibration]:
    """Writes what the runs in these folders measured to the catalogue `file`, beside the rows that are there.

    A machine that is calibrated again has its new values only. Raises RunError for a run that says nothing of a machine
    of the catalogue; then nothing is written.
    """
    reached: dict[str, list[tuple[float, str, str]]] = {}
    for folder in folders:
        for name, *said in _measured(folder):
            reached.setdefault(name, []).append(tuple(said))  # type: ignore[arg-type]
    found = [_calibration(name, runs) for name, runs in reached.items()]
    rows = {section: named for section, named in (read_rows(file) if file.exists() else {}).items() if named}
    for each in found:
        machines = rows.setdefault("machines", {})
        machines[each.machine] = machines.get(each.machine, {}) | {
            "measured_low": each.low,
            "measured_high": each.high,
            "measured_source": each.source,
            "measured_date": each.date,
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.safe_dump(rows, sort_keys=False, width=120))
    return found


def _calibration(machine: str, runs: Sequence[tuple[float, str, str]]) -> Calibration:
    shares = [share for share, _, _ in runs]
    return Calibration(
        machine=machine,
        low=round(min(shares), 4),
        high=round(max(shares), 4),
        source="; ".join(source for _, source, _ in runs),
        date=max(date for _, _, date in runs),
    )


def _measured(folder: Path) -> list[tuple[str, float, str, str]]:
    """Machine, share of the peak, source and date, for each row of the catalogue that the run's machine is."""
    run = Run(path=folder, recipe=find_run(folder))
    record = read_record(run, TrainRecord)
    seconds = [step.step_s for step in timed_steps(record.steps, record.resumed_at)]
    if len(seconds) < LEAST_STEPS:
        raise RunError(
            f"--calibrate {folder}: has {len(seconds)} steps beside the first of each start; train at least "
            f"{LEAST_STEPS}"
        )
    machines = machines_with(load_catalogue(run.recipe.hardware.catalogue), record.origin.machine.accelerators)
    _refuse_unknown(folder, record.origin, machines)
    step_s = statistics.median(seconds)
    source = f"median of {len(seconds):,} steps of {folder.resolve().name} ({record.model}): {step_s:.4g} s"
    return [
        (machine.name, _share(folder, run.recipe, record, machine, step_s), source, record.origin.started[:10])
        for machine in machines
    ]


def _refuse_unknown(folder: Path, origin: Origin, machines: Sequence[Machine]) -> None:
    """Raises RunError unless the run's machine is in the catalogue, where `cpu` is this computer."""
    there, here = origin.machine, this_machine()
    devices = there.accelerators
    if not machines:
        raise RunError(
            f"--calibrate {folder}: was trained on {len(devices)} x {devices[0]}, which no machine of the catalogue "
            "is; add it, its chip with device_kinds, in hardware.catalogue"
        )
    if not devices and (there.processor, there.cores) != (here.processor, here.cores):
        raise RunError(
            f"--calibrate {folder}: was trained on another computer ({there.processor}, {there.cores} cores; this one: "
            f"{here.processor}, {here.cores}); calibrate there"
        )


def _share(folder: Path, recipe: Recipe, record: TrainRecord, machine: Machine, step_s: float) -> float:
    work = replace(
        on_chips(work_of(recipe, recipe_variant(recipe)), machine.chip.kind, recipe), remat=cast(Remat, record.remat)
    )
    share = share_reached(work, machine, Mesh(**record.mesh), step_s)
    if share is None or share > 1:
        raise RunError(
            f"--calibrate {folder}: a step took {step_s:.3g} s, shorter than {machine.name} can be by its row in the "
            "catalogue; give its chip a higher flops_per_s or hbm_bytes_per_s in hardware.catalogue"
        )
    return share
