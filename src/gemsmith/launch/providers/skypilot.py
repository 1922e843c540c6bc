"""SkyPilot: a managed job that takes whichever of the machines that fit it gets, and starts again after a preemption.

SkyPilot lives in an environment of its own: only its command line is used.
"""

import shlex
from typing import Any

from gemsmith.hardware import Machine
from gemsmith.launch.commands import in_artifact_registry, registry_of
from gemsmith.launch.provider import Feature, LaunchRequest, WithReason
from gemsmith.launch.render import render_files, render_template
from gemsmith.launch.request import is_googles
from gemsmith.launch.upload import GB, disk_bytes, format_footprint, timed_command
from gemsmith.serve.command import RUNTIMES

FEATURES: frozenset[Feature] = frozenset({"any machine"})
FOLDER = "/tmp/gemsmith"
TPUS = ("v5p", "v6e")  # SkyPilot's names are tpu-v5p-8, of cores, and tpu-v6e-8, of chips
GPUS = {"rtx-pro-6000": "RTXPRO6000", "h100": "H100"}
SYSTEM_BYTES = 100 * GB  # of the disk, for the system and the image; assumed


def gives(machine: Machine) -> bool:
    known = machine.chip.name in TPUS or machine.chip.name in GPUS
    alone = machine.hosts == machine.slices == 1 and not machine.name.startswith("cloud-run")
    return known and alone and is_googles(machine)


def check(request: LaunchRequest) -> None:
    """Nothing that its machines cannot do."""
    del request


def render(request: LaunchRequest) -> dict[str, str]:
    held, image = disk_bytes(request), str(request.image.value)
    disk_gb = -(-(SYSTEM_BYTES + sum(held.values())) // (50 * GB)) * 50
    task = render_template(
        "task.yaml",
        request,
        machines=[_resources(each) for each in (request, *request.others)],
        disk_gb=WithReason(disk_gb, f"100 for system and image, held at most {format_footprint(held)}"),
        registry=registry_of(image) if in_artifact_registry(image) else None,
        command=shlex.join(timed_command(request, folder=FOLDER)),
    )
    return render_files(request, "sky", values(request), {"task.yaml": task})


def _resources(request: LaunchRequest) -> dict[str, str | None]:
    """A machine by SkyPilot's names, and where it is."""
    machine, chip, options = request.machine, request.machine.chip, request.options
    cores = 2 * machine.chips if chip.name == "v5p" else machine.chips
    return {
        "infra": "/".join(filter(None, ("gcp", options.region, options.zone))),
        "accelerators": f"{GPUS[chip.name]}:{machine.chips}" if chip.kind == "gpu" else f"tpu-{chip.name}-{cores}",
        "runtime": None if chip.kind == "gpu" else RUNTIMES[chip.name],
    }


def values(_request: LaunchRequest) -> dict[str, Any]:
    return {"api": "compute.googleapis.com"}
