"""SkyPilot: a managed job that takes whichever of the machines that fit it gets, and starts again after a preemption.

SkyPilot lives in an environment of its own: only its command line is used.
"""

from typing import Any

from gemsmith.hardware import Machine
from gemsmith.launch.bill import default_region
from gemsmith.launch.checks import bucket_checks, first_checks
from gemsmith.launch.commented import render_script, render_yaml
from gemsmith.launch.held import GB, downloads_base, held_bytes, say_held
from gemsmith.launch.record import LaunchRecord
from gemsmith.launch.steps import cost_lines, here_command, upload_steps
from gemsmith.launch.target import Check, Chosen, Command, Request, Resource

MOUNTS_WEIGHTS = False
TAKES_ANY = True
TAKES_WHEEL = False
FOLDER = "/tmp/gemsmith"
TPUS = {"v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""Chip -> runtime image; SkyPilot's names are tpu-v5p-8, of cores, and tpu-v6e-8, of chips."""
GPUS = {"rtx-pro-6000": "RTXPRO6000", "h100": "H100"}
SYSTEM_BYTES = 100 * GB
"""Of the disk, for the system and the image; assumed."""


def gives(machine: Machine) -> bool:
    known = machine.chip.name in TPUS or machine.chip.name in GPUS
    return known and machine.hosts == machine.slices == 1 and not machine.name.startswith("cloud-run")


def check(request: Request) -> None:
    """Nothing that its machines cannot do."""
    del request


def render(request: Request) -> dict[str, str]:
    launch = ("sky", "jobs", "launch", "--name", request.name, "--detach-run", "--yes", "task.yaml")
    secret = ("--secret", "HF_TOKEN") if request.secret is not None else ()
    reason = "A managed job; SkyPilot's own controller, a small machine, starts it again after a preemption."
    if secret:
        reason += "\nHF_TOKEN is taken from this shell's environment."
    steps = [*upload_steps(request), (reason, (*launch[:-1], *secret, launch[-1]))]
    return {
        "recipe.yaml": request.recipe_text,
        "task.yaml": render_yaml(_task(request), heading=cost_lines(request)),
        "submit.sh": render_script(steps, heading=cost_lines(request)),
    }


def _task(request: Request) -> dict[str, Any]:
    timeout = request.bill.timeout_s
    command = " ".join(here_command(request, folder=FOLDER))
    resources = {
        "any_of": [_machine(request, machine) for machine in (request.machine, *request.others)],
        "image_id": Chosen(f"docker:{request.image.value}", request.image.reason),
        "use_spot": Chosen(request.spot, "--spot; what is preempted goes on elsewhere from the bucket"),
        "disk_size": Chosen(_disk_gb(request), f"100 for system and image, held at most {_held(request)}"),
        "labels": dict(request.labels),
        "job_recovery": {
            "max_restarts_on_errors": Chosen(request.bill.attempts - 1, "of the program; preemptions do not count")
        },
    }
    task: dict[str, Any] = {"name": request.name, "resources": resources, "num_nodes": 1}
    if request.secret is not None:
        task["secrets"] = {"HF_TOKEN": Chosen("", "--secret HF_TOKEN fills it in")}
    return task | {"run": Chosen(f"timeout --signal=TERM --kill-after=120 {timeout.value} {command}", timeout.reason)}


def _machine(request: Request, machine: Machine) -> dict[str, Any]:
    own = None if machine is request.machine else default_region(machine, spot=request.spot)
    region = own or request.region
    row: dict[str, Any] = {"infra": f"gcp/{region}", "accelerators": _accelerators(machine)}
    if machine.chip.kind == "tpu":
        row["accelerator_args"] = {"runtime_version": TPUS[machine.chip.name], "tpu_vm": True}
    return row


def _accelerators(machine: Machine) -> str:
    if machine.chip.kind == "gpu":
        return f"{GPUS[machine.chip.name]}:{machine.chips}"
    return f"tpu-{machine.chip.name}-{machine.chips * (2 if machine.chip.name == 'v5p' else 1)}"


def _held(request: Request) -> str:
    return say_held(held_bytes(request, with_weights=downloads_base(request)))


def _disk_gb(request: Request) -> int:
    held = sum(held_bytes(request, with_weights=downloads_base(request)).values())
    return -(-(SYSTEM_BYTES + held) // (50 * GB)) * 50


def preflight(request: Request) -> list[Check]:
    return [
        *first_checks(request, apis=("compute.googleapis.com", "storage.googleapis.com")),
        Check(
            name="sky is here, and may use gcp",
            command=("sky", "check", "gcp"),
            remedy="install SkyPilot in an environment of its own, and do what sky check says",
        ),
        *bucket_checks(request),
        Check(
            name=f"no other managed job named {request.name}",
            command=_names(request.name),
            remedy=f"choose another --name, or remove it: gemsmith launch clean {request.name}",
            complaint=lambda output: "there is one" if output.strip() else None,
        ),
    ]


def status(record: LaunchRecord) -> Command:
    del record
    return ("sky", "jobs", "queue")


def logs(record: LaunchRecord) -> Command:
    return ("sky", "jobs", "logs", "--name", record.name, "--no-follow")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    cancel = ("sky", "jobs", "cancel", "--name", "{}", "--yes")
    return (Resource(kind="managed job", list=_names(record.name), remove=cancel),)


def created(record: LaunchRecord) -> tuple[Resource, ...]:
    return running(record)


def _names(name: str) -> Command:
    """Prints the name where a job of it has not ended: SkyPilot prints a table only."""
    pick = f"sed -n 's/.* {name} .*/{name}/p' | sort -u"
    return ("bash", "-c", f"set -o pipefail; sky jobs queue --skip-finished | {pick}")
