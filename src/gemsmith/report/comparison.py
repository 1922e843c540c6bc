"""Run directories read as the sides of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from gemsmith.compare.run_side import side_of_run, with_floor
from gemsmith.compare.side import Side
from gemsmith.errors import InputError, VersionError
from gemsmith.hardware import load_catalogue, machines_with
from gemsmith.report.findings import Findings, find_notices, read_findings
from gemsmith.run import Run, find_run, read_record, unproven_keys
from gemsmith.stages import STAGES

_READ = ("data", "train", "export", "bench", "eval")
"""Stages whose numbers are compared; of the plan prices alone are."""


def read_sides(folders: Sequence[Path], *, trained_on: Sequence[str] = (), served_on: Sequence[str] = ()) -> list[Side]:
    """A side for each run directory, under its name, or its path where two have the same.

    `trained_on`, `served_on`: MACHINE for all runs, or NAME=MACHINE for one. Raises RunError for a folder that is no
    run, VersionError for a record that another version wrote, InputError for a machine that its plan does not have.
    """
    names = _names(folders)
    trained, served = (
        _named(option, given, names) for option, given in (("trained-on", trained_on), ("served-on", served_on))
    )
    return [
        read_side(folder, name, trained_on=trained.get(name), served_on=served.get(name))
        for name, folder in zip(names, folders, strict=True)
    ]


def read_side(folder: Path, name: str, *, trained_on: str | None = None, served_on: str | None = None) -> Side:
    """One of them; what is missing or cannot be read is a line of it, never an error but of another version."""
    run = Run(path=folder, recipe=find_run(folder))
    _refuse_other_versions(run)
    findings = read_findings(run)
    for option, machine in (("trained-on", trained_on), ("served-on", served_on)):
        planned = [plan.name for plan in findings.plan.machines] if findings.plan else []
        if machine is not None and machine not in planned:
            raise InputError(
                f"--{option} {machine}: the plan of {name} does not have it; it has {', '.join(planned) or 'none'}; "
                f"add it to hardware.machines and run: gemsmith plan {folder}"
            )
    if trained_on is not None and findings.train is not None:
        _refuse_other_devices(run, findings.train.origin.machine.accelerators, name, trained_on)
    side = side_of_run(
        name,
        str(folder),
        run.recipe,
        findings.records(),
        missing=_missing(findings, run),
        trained_on=trained_on,
        served_on=served_on,
        stale=findings.stale,
        unproven=unproven_keys(run, [record for stage, record in findings.records().items() if stage in _READ]),
    )
    return with_floor(side, run.recipe, findings.bench)


def _names(folders: Sequence[Path]) -> list[str]:
    names = [folder.resolve().name for folder in folders]
    names = [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name}: is given twice; name each run once")
    return names


def _named(option: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Run -> machine."""
    machines: dict[str, str] = {}
    for text in given:
        name, equals, machine = text.rpartition("=")
        if equals and name not in names:
            raise InputError(f"--{option} {text}: {name} is not one of the runs; these are {', '.join(names)}")
        machines |= {name: machine} if equals else dict.fromkeys(names, machine)
    return machines


def _refuse_other_versions(run: Run) -> None:
    for stage in STAGES.values():
        if run.record_file(stage.record.stage).exists():
            try:
                read_record(run, stage.record)
            except VersionError:
                raise
            except InputError:
                pass  # damaged, which the page says


def _refuse_other_devices(run: Run, devices: Sequence[str], name: str, machine: str) -> None:
    """A price of chips that training has not seen would make a cost that nobody pays."""
    having = [found.name for found in machines_with(load_catalogue(run.recipe.hardware.catalogue), devices, [machine])]
    if having and machine not in having:
        has = f"{len(devices)} x {devices[0]}" if devices else "no accelerator"
        raise InputError(
            f"--trained-on {machine}: the train record of {name} has {has}, so it was trained on {' or '.join(having)}"
        )


def _missing(findings: Findings, run: Run) -> tuple[str, ...]:
    absent = [stage for stage in findings.problems if not run.record_file(stage).exists()]
    lines = [f"no record of {', '.join(absent)}; gemsmith run {run.path} makes them."] if absent else []
    lines += [line for stage, line in findings.problems.items() if stage not in absent]
    lines += findings.left_out.values()
    lines += [notice.text for notice in find_notices(findings) if notice.grave]
    if findings.stale:
        lines.append(f"made from other settings than the recipe there now: {', '.join(findings.stale)}.")
    machines = findings.plan.machines if findings.plan else ()
    priced = [machine.name for machine in machines if machine.price or machine.price_spot]
    trained_on = findings.train.machine if findings.train else None
    if findings.plan and (not priced or trained_on not in (None, *priced)):
        of = f" of {trained_on}, which trained; add it to hardware.machines" if priced else ""
        lines.append(f"plan.json says no price of an hour{of}, so there is no cost; run: gemsmith plan {run.path}")
    return tuple(lines)
