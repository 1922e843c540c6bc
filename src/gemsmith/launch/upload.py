"""What every target's files have: uploads before anything is created, the machine's command, its size and cost."""

import json
from pathlib import Path

from gemsmith.checkpoints.folder import is_hub_id
from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.commands import steps_of
from gemsmith.launch.provider import READERS_OF_MERGED, Command, LaunchRequest
from gemsmith.launch.shards import PACKED, ImageShards
from gemsmith.system.format import size
from gemsmith.system.version import __version__

LOCKS = ("train.lock", "tpu.lock", "gcs.lock", "torch.lock")
WHEEL = f"gemsmith-{__version__}-py3-none-any.whl"
GB = 10**9
PROGRAM_BYTES = 16 * GB
"""Python and its libraries, rows, a few images, and a layer at a time of what is loaded or merged; assumed."""
WEIGHT_BYTES = 2  # a parameter, in bfloat16
SAVED_BYTES = 12  # a trained parameter and its two moments, in float32
ADAPTER_BYTES = 4
_WORTH_SAYING_BYTES = GB // 10


def check_wheel(folder: Path) -> None:
    """Raises InputError unless the folder has the wheel of this version, no other wheel, and the locks."""
    make = "make build/wheel in Gemsmith's sources makes such a folder"
    if not folder.is_dir():
        raise InputError(f"--wheel {folder}: is no folder; {make}")
    wheels = sorted(path.name for path in folder.glob("*.whl"))
    if wheels != [WHEEL]:
        found = f"has {', '.join(wheels)}" if wheels else "has no wheel"
        raise InputError(f"--wheel {folder}: {found}; it must have {WHEEL} alone; {make}")
    if missing := [name for name in LOCKS if not (folder / name).is_file()]:
        raise InputError(f"--wheel {folder}: has no {missing[0]}; {make}")


def upload_steps(request: LaunchRequest) -> list[tuple[str, Command]]:
    """Reason and command of each copy to the bucket; the recipe last, since the machine begins with it."""
    launched, wheel, steps = f"{request.root}/launched", request.options.wheel, list[tuple[str, Command]]()
    for local, remote in request.inputs.copies.items():
        steps += steps_of("upload", "copy", {"local": local, "parent": remote.rpartition("/")[0]})
    for images in request.inputs.images:
        known = {"images": _describe(images), "list": images.list_file, "folder": images.folder}
        steps += steps_of("upload", "images", known | {"packed": f"{PACKED}/{images.place}", "launched": launched})
    if wheel is not None:
        files = [str(wheel / name) for name in (WHEEL, *LOCKS)]
        copy = ("gcloud", "storage", "cp", *files, f"{request.root}/wheel/")
        steps.append(("Gemsmith's wheel and its locks, which uv installs there.", copy))
    return [*steps, *steps_of("upload", "recipe", {"launched": launched})]


def upload_lines(request: LaunchRequest) -> list[str]:
    """What of this machine goes to the bucket, a line each."""
    lines = []
    for local in map(Path, request.inputs.copies):
        files = local.rglob("*") if local.is_dir() else [local]
        lines.append(f"uploads {local} ({size(sum(file.stat().st_size for file in files if file.is_file()))})")
    return [*lines, *(f"uploads {_describe(images)}" for images in request.inputs.images)]


def _describe(found: ImageShards) -> str:
    count = len(found.sums)
    return f"{count:,} image{'s' * (count > 1)} ({size(found.total_bytes)}) that {found.key} names, of {found.folder}"


def worker_command(request: LaunchRequest, *, folder: str) -> Command:
    """What the machine runs: the stages, with the run directory kept in the bucket."""
    return (
        *("gemsmith", "launch", "worker", request.root, "--folder", f"{folder}/{request.options.name}"),
        *("--stages", ",".join(request.options.stages)),
        *(("--asked", json.dumps({"rows": rows, **request.options.sampling})) if (rows := request.inputs.rows) else ()),
    )


def timed_command(request: LaunchRequest, *, folder: str) -> Command:
    """The same with an end: TERM after the bill's time, which the command's start begins, and 2 minutes later KILL."""
    seconds = str(request.bill.timeout_s.value)
    return ("timeout", "--signal=TERM", "--kill-after=120", seconds, *worker_command(request, folder=folder))


def disk_bytes(request: LaunchRequest) -> dict[str, int]:
    """What the machine holds beside the chip -> bytes."""
    train, checkpoint, stages = request.recipe.train, request.recipe.checkpoint, request.options.stages
    weights = WEIGHT_BYTES * request.plan.parameters
    held = {"the program": PROGRAM_BYTES}
    if (images := sum(each.total_bytes for each in request.inputs.images)) >= _WORTH_SAYING_BYTES:
        held["images"] = images
    # From the hub, or copied from a bucket that the target does not mount.
    if is_hub_id(checkpoint) or checkpoint.startswith("gs://"):
        held["the base"] = weights
    if "train" in stages:
        # One more is being written while those to keep are there; the best may be beside them.
        steps = train.save_total_limit + 1 + (train.keep == "best")
        held["saved steps"] = steps * SAVED_BYTES * request.plan.trained_parameters
    if "export" in stages or not READERS_OF_MERGED.isdisjoint(stages):
        adapter = ADAPTER_BYTES * request.plan.trained_parameters if train.method == "lora" else 0
        held["merged weights"] = weights + adapter
    return held


def format_footprint(held: dict[str, int]) -> str:
    """The items and their sum, largest first.

    >>> format_footprint({"a": 2_000_000_000, "b": 30_000_000_000})
    '32 GB: b 30, a 2'
    """
    largest = sorted(held.items(), key=lambda item: -item[1])
    return f"{sum(held.values()) / GB:.0f} GB: " + ", ".join(f"{what} {count / GB:.2g}" for what, count in largest)


def describe_slice(machine: Machine) -> str:
    """How large each of its slices is, such as `8 chips on 2 hosts`."""
    chips, hosts = machine.chips // machine.slices, machine.hosts // machine.slices
    return f"{chips} chip{'s' * (chips > 1)} on {hosts} host{'s' * (hosts > 1)}"


def cost_lines(request: LaunchRequest) -> list[str]:
    """What the launch is, and what it can cost, for the head of a file."""
    options, bill = request.options, request.bill
    machines = [each.machine.name for each in (request, *request.others)]
    hours = float(bill.timeout_s.value) / 3600
    planned = (
        "Not estimated: training is not among the stages."
        if "train" not in options.stages
        else f"Estimated: {bill.hours[0]:.3g} to {bill.hours[1]:.3g} h of training, "
        f"{bill.usd[0]:,.2f} to {bill.usd[1]:,.2f} USD."
        if bill.hours and bill.usd
        else "How long training takes is not known before the rows are read."
    )
    return [
        f"{options.name}: {', '.join(options.stages)} of {request.recipe.model} on "
        f"{f'{options.tasks} x ' * (options.tasks > 1)}{' or '.join(machines)} in "
        f"{options.zone or options.region}; {'up to ' * (len(machines) > 1)}{bill.usd_per_hour:.2f} USD/h"
        f"{' spot' if options.spot else ''} ({bill.price}).",
        planned,
        f"At most {bill.max_usd:,.2f} USD for the machine: {hours:.3g} h x {bill.attempts} "
        f"attempt{'s' * (bill.attempts > 1)}; {bill.uncounted}bucket, image and network come on top.",
    ]
