"""TPU VMs: a queued resource whose startup script runs the stages and then deletes the node.

They run in a container, or in a Python of their own that uv makes from Gemsmith's wheel and locks. Google no longer
develops this API and has no TPU7x in it; v5e, v5p and v6e still come by it.
"""

from typing import Any

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.provider import Feature, LaunchRequest
from gemsmith.launch.render import render_files, render_template
from gemsmith.launch.upload import describe_slice, worker_command
from gemsmith.serve.command import RUNTIMES

FEATURES: frozenset[Feature] = frozenset({"wheel"})
FOLDER = "/dev/shm/gemsmith"  # in the host's memory: the boot disk is smaller than the weights of a large model


def gives(machine: Machine) -> bool:
    return machine.chip.name in RUNTIMES and machine.slices == 1


def accelerator_type(machine: Machine) -> str:
    """The API's name for a slice: v5p counts cores, two a chip."""
    numbers = {"v5e": f"v5litepod-{machine.chips}", "v5p": f"v5p-{2 * machine.chips}", "v6e": f"v6e-{machine.chips}"}
    return numbers[machine.chip.name]


def check(request: LaunchRequest) -> None:
    """Raises InputError without a zone."""
    if request.options.zone is None:
        there = ", ".join(price.region for price in request.machine.prices if price.provider == "gcp")
        where = f"{request.machine.name} has a price in {there}; zones that have it are listed by"
        command = "gcloud compute tpus accelerator-types list --zone ZONE --filter=type"
        raise InputError(f"--zone: is missing; {where}: {command}={accelerator_type(request.machine)}")


def render(request: LaunchRequest) -> dict[str, str]:
    script = render_template("startup.sh", request, folder=FOLDER, command=worker_command(request, folder=FOLDER))
    return render_files(request, "tpu-vm", values(request), {"startup.sh": script})


def values(request: LaunchRequest) -> dict[str, Any]:
    machine = request.machine
    return {
        "api": "tpu.googleapis.com",
        "accelerator": accelerator_type(machine),
        "runtime": RUNTIMES[machine.chip.name],
        "slice": describe_slice(machine),
    }
