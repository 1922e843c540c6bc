"""SkyPilot: a managed job that takes whichever of the machines that fit it gets, and starts again after a preemption.

SkyPilot lives in an environment of its own: only its command line is used.
"""

import shlex
from typing import Any

from gemsmith.hardware import Machine
from gemsmith.launch.cost import is_googles
from gemsmith.launch.provider import Check, Command, LaunchRecord, Request, Resource, WithReason
from gemsmith.launch.providers.gcloud import (
    account_checks,
    bucket_checks,
    first_checks,
    image_check,
    image_roles,
    registry_of,
)
from gemsmith.launch.render import render_script, render_yaml
from gemsmith.launch.request import GB, disk_bytes, downloads_weights, format_footprint
from gemsmith.launch.upload import cost_lines, timed_command, upload_steps

MOUNTS_WEIGHTS = False
SUPPORTS_ANY_MACHINE = True
SUPPORTS_WHEEL = False
FOLDER = "/tmp/gemsmith"
TPUS = {"v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""Chip -> runtime image; SkyPilot's names are tpu-v5p-8, of cores, and tpu-v6e-8, of chips."""
GPUS = {"rtx-pro-6000": "RTXPRO6000", "h100": "H100"}
SYSTEM_BYTES = 100 * GB
"""Of the disk, for the system and the image; assumed."""


def gives(machine: Machine) -> bool:
    known = machine.chip.name in TPUS or machine.chip.name in GPUS
    alone = machine.hosts == machine.slices == 1 and not machine.name.startswith("cloud-run")
    return known and alone and is_googles(machine)


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
    resources = {
        "any_of": [_machine(each) for each in (request, *request.others)],
        "image_id": WithReason(f"docker:{request.image.value}", request.image.reason),
        "use_spot": WithReason(request.spot, "--spot; what is preempted goes on elsewhere from the bucket"),
        "disk_size": WithReason(_disk_gb(request), f"100 for system and image, held at most {_held(request)}"),
        "labels": dict(request.labels),
        "job_recovery": {
            "max_restarts_on_errors": WithReason(request.bill.attempts - 1, "of the program; preemptions do not count")
        },
    }
    task: dict[str, Any] = {"name": request.name, "resources": resources, "num_nodes": 1}
    if image_roles(request):
        # All three, so that it asks gcloud for a login; nothing in them: as the machine's own account.
        task["envs"] = {
            "SKYPILOT_DOCKER_USERNAME": "",
            "SKYPILOT_DOCKER_PASSWORD": WithReason("", "none: the machine's own account pulls"),
            "SKYPILOT_DOCKER_SERVER": registry_of(str(request.image.value)),
        }
    if request.secret is not None:
        task["secrets"] = {"HF_TOKEN": WithReason("", "--secret HF_TOKEN fills it in")}
    return task | {"run": WithReason(shlex.join(timed_command(request, folder=FOLDER)), request.bill.timeout_s.reason)}


def _machine(request: Request) -> dict[str, Any]:
    machine, place = request.machine, "/".join(("gcp", request.region, *([request.zone] if request.zone else [])))
    row: dict[str, Any] = {"infra": place, "accelerators": _accelerators(machine)}
    if machine.chip.kind == "tpu":
        row["accelerator_args"] = {"runtime_version": TPUS[machine.chip.name], "tpu_vm": True}
    return row


def _accelerators(machine: Machine) -> str:
    if machine.chip.kind == "gpu":
        return f"{GPUS[machine.chip.name]}:{machine.chips}"
    return f"tpu-{machine.chip.name}-{machine.chips * (2 if machine.chip.name == 'v5p' else 1)}"


def _held(request: Request) -> str:
    return format_footprint(disk_bytes(request, with_weights=downloads_weights(request)))


def _disk_gb(request: Request) -> int:
    held = sum(disk_bytes(request, with_weights=downloads_weights(request)).values())
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
        image_check(request),
        *account_checks(request, roles=image_roles(request)),
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
