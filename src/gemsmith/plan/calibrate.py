"""What trainings and load tests measured on a machine say of it, as rows of the user's own catalog."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from gemsmith.errors import RunError
from gemsmith.hardware import Machine, load_catalog, machines_with
from gemsmith.hardware.catalog import read_rows
from gemsmith.hardware.model import on_chips, step_cost
from gemsmith.hardware.model.step_time import share_reached
from gemsmith.plan.serving import read_shares
from gemsmith.recipe.backends import Remat
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.records import Computer, TrainRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, find_run, host_info, read_record
from gemsmith.system.files import write_text
from gemsmith.train.logging import timed_steps

LEAST_STEPS = 10  # beside the first, which warms up
UNSTEADY = 1.5
"""The slowest tenth of steps over the fastest, beyond which they tell what else the machine did; the demo's on a shared
machine have 1.46 (benchmarks/records/demo/train.json)."""
DRIFT = 1.25  # the same of the medians of a training's halves, which have 1.13 there
WHAT = {"matmuls": "measured", "decode": "served_decode", "prefill": "served_prefill"}
"""What reaches a share -> how the catalog's keys of it begin."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a run, or all runs together, say of a machine by training or by serving."""

    machine: str
    shares: Mapping[str, Sequence[float]]
    """By WHAT: of the peak for matmuls, of the roofline for the others; of all runs the lowest and the highest."""
    source: str
    date: str

    def row(self) -> dict[str, Any]:
        """The keys of the machine's row in the catalog."""
        ends: dict[str, Any] = {}
        for what, (low, high) in self.shares.items():
            ends |= {f"{WHAT[what]}_low": low, f"{WHAT[what]}_high": high}
        about = "measured" if "matmuls" in self.shares else "served"
        return ends | {f"{about}_source": self.source, f"{about}_date": self.date}

    def say(self) -> str:
        """The line on the terminal."""
        reached = ", ".join(
            f"{what} reached {100 * low:.3g} to {100 * high:.3g} % of the {'peak' if what == 'matmuls' else 'roofline'}"
            for what, (low, high) in self.shares.items()
        )
        return f"{self.machine}: {reached} ({self.source}, {self.date})"


def calibrate(folders: Sequence[Path], file: Path) -> list[Calibration]:
    """Writes what the runs in these folders measured to the catalog `file`, beside the rows that are there.

    Trainings and load tests, of each run what it has. A machine that is calibrated again has its new values only.
    Raises RunError for a run that says nothing of a machine of the catalog; then nothing is written.
    """
    reached: dict[tuple[str, ...], list[Calibration]] = {}
    for folder in folders:
        for said in _measured(folder):
            reached.setdefault((said.machine, *said.shares), []).append(said)
    found = []
    for runs in reached.values():
        every = {what: [share for run in runs for share in run.shares[what]] for what in runs[0].shares}
        ends = {what: (round(min(shares), 4), round(max(shares), 4)) for what, shares in every.items()}
        source, date = "; ".join(run.source for run in runs), max(run.date for run in runs)
        found.append(Calibration(machine=runs[0].machine, shares=ends, source=source, date=date))
    rows = {section: named for section, named in (read_rows(file) if file.exists() else {}).items() if named}
    for each in found:
        machines = rows.setdefault("machines", {})
        machines[each.machine] = machines.get(each.machine, {}) | each.row()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.safe_dump(rows, sort_keys=False, width=120))
    return found


def _measured(folder: Path) -> list[Calibration]:
    """What the run says, for each row of the catalog that its machines are."""
    run = Run(path=folder, recipe=find_run(folder))
    there = [kind for kind in (TrainRecord, BenchRecord) if run.record_file(kind.stage).exists()]
    if not there:
        raise RunError(f"--calibrate {folder}: has no train.json and no bench.json; run first: gemsmith run {folder}")
    train = read_record(run, TrainRecord) if TrainRecord in there else None
    bench = read_record(run, BenchRecord) if BenchRecord in there else None
    if bench is None or bench.images is None:
        return [*(_trained(run, train) if train else []), *(_served(run, bench, train) if bench else [])]
    if train is None:
        raise RunError(
            f"--calibrate {folder}: bench.json is of requests with images, and serving is calibrated by "
            "text; run: gemsmith bench --force --set bench.images=false"
        )
    left_out = "; its load test, of requests with images, is left out"
    return [replace(each, source=each.source + left_out) for each in _trained(run, train)]


def _trained(run: Run, record: TrainRecord) -> list[Calibration]:
    seconds = [step.step_s for step in timed_steps(record.steps, record.resumed_at)]
    if len(seconds) < LEAST_STEPS:
        raise RunError(
            f"--calibrate {run.path}: has {len(seconds)} steps besides the first of each start; train at least "
            f"{LEAST_STEPS}"
        )
    fast, *_, slow = statistics.quantiles(seconds, n=10, method="inclusive")
    half = len(seconds) // 2
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    if slow > UNSTEADY * fast or max(first, second) > DRIFT * min(first, second):
        raise RunError(
            f"--calibrate {run.path}: steps took {min(seconds):.3g} to {max(seconds):.3g} s, {fast:.3g} to {slow:.3g} "
            f"without a tenth at either end, {first:.3g} s at the median of the first half and {second:.3g} of the "
            "second: not how fast the machine is; train again while it does nothing else"
        )
    source = (
        f"median of {len(seconds):,} steps of {run.path.resolve().name} ({record.model}): "
        f"{statistics.median(seconds):.4g} s, {fast:.4g} to {slow:.4g} without the fastest and slowest tenth"
    )
    found, date = [], record.provenance.started[:10]
    for machine in _machines(run, record.provenance.machine, "was trained"):
        work = on_chips(step_cost(run.recipe, recipe_variant(run.recipe)), machine.chip.kind, run.recipe)
        work = replace(work, remat=cast(Remat, record.remat))
        shares = []
        for step_s in (slow, fast):
            share = share_reached(work, machine, Mesh(**record.mesh), step_s)
            if share is None or share > 1:
                raise RunError(
                    f"--calibrate {run.path}: a step took {step_s:.3g} s, shorter than {machine.name} can be by its "
                    "row in the catalog; give its chip a higher flops_per_s or hbm_bytes_per_s in hardware.catalog"
                )
            shares.append(share)
        found.append(Calibration(machine=machine.name, shares={"matmuls": shares}, source=source, date=date))
    return found


def _served(run: Run, record: BenchRecord, train: TrainRecord | None) -> list[Calibration]:
    # A load test's own record does not have the accelerators; that of a training on the same computer has.
    there, packages = record.provenance.machine, record.provenance.versions.items()
    if not any("vllm" in package and "cpu" in f"{package} {version}" for package, version in packages):
        tested, there = there, train.provenance.machine if train else there
        if not there.accelerators or not tested.is_computer_of(there):
            raise RunError(
                f"--calibrate {run.path}: bench.json does not tell which accelerators served, and train.json is of no "
                "training with accelerators on the same computer; calibrate with a run that was trained where it was "
                "load-tested"
            )
    found, date = [], record.provenance.started[:10]
    for machine in _machines(run, there, "was load-tested"):
        shares = read_shares(run.path, run.recipe, record, machine)
        model = recipe_variant(run.recipe).name
        vllm = (record.server and record.server.version) or record.endpoint.get("vllm", "of no known version")
        source = f"{len(shares['decode'])} loads of {run.path.resolve().name} ({model}, vLLM {vllm})"
        found.append(Calibration(machine=machine.name, shares=shares, source=source, date=date))
    return found


def _machines(run: Run, there: Computer, what: str) -> list[Machine]:
    """Those of the catalog with the devices of the run; `cpu` is this computer. Raises RunError of none."""
    here, devices = host_info(), there.accelerators
    machines = machines_with(load_catalog(run.recipe.hardware.catalog), devices)
    if not machines:
        raise RunError(
            f"--calibrate {run.path}: {what} on {len(devices)} x {devices[0]}, which no machine of the catalog "
            "is; add it, its chip with device_kinds, in hardware.catalog"
        )
    if not devices and (there.processor, there.cores) != (here.processor, here.cores):
        raise RunError(
            f"--calibrate {run.path}: {what} on another computer ({there.processor}, {there.cores} cores; this one: "
            f"{here.processor}, {here.cores}); calibrate there"
        )
    return machines
