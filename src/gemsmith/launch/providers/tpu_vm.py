"""TPU VMs: a queued resource whose startup script runs the stages and then deletes the node.

They run in a container, or in a Python of their own that uv makes from Gemsmith's wheel and locks.

Google no longer develops this API and has no TPU7x in it; v5e, v5p and v6e still come by it.
"""

import shlex
from importlib import resources

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.provider import LABEL, Check, Command, LaunchRecord, Request, Resource
from gemsmith.launch.providers.gcloud import (
    account_checks,
    bucket_checks,
    first_checks,
    image_check,
    image_roles,
    secret_checks,
)
from gemsmith.launch.render import comments, render_script
from gemsmith.launch.upload import cost_lines, upload_steps, worker_command
from gemsmith.system.characters import one_line

MOUNTS_WEIGHTS = False
SUPPORTS_ANY_MACHINE = False
SUPPORTS_WHEEL = True
FOLDER = "/dev/shm/gemsmith"
"""In the host's memory: the boot disk is smaller than the weights of a large model."""
RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
"""Chip -> runtime image; with another chip's image the node boots, and ssh never answers."""
UV, PYTHON = "0.13.9", "3.11"
"""What makes a Python on the node, and which."""
WAITS = "24h"
"""For which a queued resource waits for a machine; nothing is paid meanwhile."""


def gives(machine: Machine) -> bool:
    return machine.chip.name in RUNTIMES and machine.slices == 1


def accelerator_type(machine: Machine) -> str:
    """The API's name for a slice: v5p counts cores, two a chip."""
    numbers = {"v5e": f"v5litepod-{machine.chips}", "v5p": f"v5p-{2 * machine.chips}", "v6e": f"v6e-{machine.chips}"}
    return numbers[machine.chip.name]


def check(request: Request) -> None:
    """Raises InputError without a zone."""
    if request.zone is None:
        there = ", ".join(price.region for price in request.machine.prices if price.provider == "gcp")
        raise InputError(
            f"--zone: is missing; {request.machine.name} has a price in {there}; zones that have it are listed by: "
            f"gcloud compute tpus accelerator-types list --zone ZONE --filter=type={accelerator_type(request.machine)}"
        )


def render(request: Request) -> dict[str, str]:
    create = (
        *("gcloud", "compute", "tpus", "queued-resources", "create", request.name, *_place(request)),
        *("--node-id", request.name, "--accelerator-type", accelerator_type(request.machine)),
        *("--runtime-version", RUNTIMES[request.machine.chip.name], "--labels", f"{LABEL}={request.name}"),
        *("--service-account", request.service_account),
        *("--scopes", "https://www.googleapis.com/auth/cloud-platform"),
        *("--metadata-from-file", "startup-script=startup.sh", "--valid-until-duration", WAITS),
        *(("--spot",) if request.spot else ()),
        *(("--network", request.network) if request.network else ()),
        *(("--subnetwork", request.subnet) if request.subnet else ()),
        *("--async", "--quiet"),
    )
    chips, hosts = request.machine.chips, request.machine.hosts
    reason = (
        f"Waits {WAITS} for {chips} chip{'s' * (chips > 1)} on {hosts} host{'s' * (hosts > 1)}, unpaid until then.\n"
        "The script deletes the node when the stages have ended, have failed, or have taken too long."
    )
    return {
        "recipe.yaml": request.recipe_text,
        "startup.sh": _startup(request),
        "submit.sh": render_script([*upload_steps(request), (reason, create)], heading=cost_lines(request)),
    }


def _startup(request: Request) -> str:
    """The script that every host runs at every boot."""
    timeout = request.bill.timeout_s
    settings = [
        ("NAME", request.name, "of the queued resource and its node"),
        ("PROJECT", request.project, "--project"),
        ("ZONE", request.zone or "", "--zone"),
        ("ROOT", request.root, "--bucket, and the name"),
        *_program(request),
        ("TIMEOUT_S", str(timeout.value), timeout.reason),
        ("SECRET", request.secret or "", "the Hugging Face token's in Secret Manager; empty: none is needed"),
        ("STAGING", FOLDER, "the boot disk is smaller than the weights of a large model"),
    ]
    lines = ["#!/usr/bin/env bash", *comments(cost_lines(request))]
    lines += [f"{name}={shlex.quote(value)}  # {one_line(reason)}" for name, value, reason in settings]
    # A comma without quotes looks like a mistake in a list of bash.
    command = " ".join(
        f"'{part}'" if "," in part else shlex.quote(part) for part in worker_command(request, folder=FOLDER)
    )
    lines += [f"COMMAND=({command})", ""]
    own = "startup_python.sh" if request.python else "startup_container.sh"
    parts = [resources.files("gemsmith.launch.providers").joinpath(part) for part in ("startup.sh", own)]
    return "\n".join(lines) + "".join(part.read_text(encoding="utf-8") for part in parts)


def _program(request: Request) -> list[tuple[str, str, str]]:
    """Settings of what the stages run in."""
    if request.python is None:
        return [("IMAGE", str(request.image.value), request.image.reason)]
    return [
        ("UV", UV, "brings the Python and installs into it"),
        ("PYTHON", PYTHON, "as in docker/train-tpu.Dockerfile; the node has 3.10"),
    ]


def preflight(request: Request) -> list[Check]:
    place, kind = _place(request), accelerator_type(request.machine)
    runtime = RUNTIMES[request.machine.chip.name]
    return [
        *first_checks(request, apis=("tpu.googleapis.com", "storage.googleapis.com")),
        *bucket_checks(request),
        *([] if request.python else [image_check(request)]),
        *account_checks(request, roles=("roles/tpu.admin", *(() if request.python else image_roles(request)))),
        *secret_checks(request),
        Check(
            name=f"{kind} in {request.zone}",
            command=("gcloud", "compute", "tpus", "accelerator-types", "describe", kind, *place),
            remedy="choose another --zone; gcloud compute tpus locations list names them all",
        ),
        Check(
            name=f"runtime {runtime} in {request.zone}",
            command=("gcloud", "compute", "tpus", "versions", "describe", runtime, *place),
            remedy="choose another --zone",
        ),
        Check(
            name=f"no other queued resource named {request.name}",
            command=(
                *("gcloud", "compute", "tpus", "queued-resources", "list", *place),
                *(f"--filter=name:{request.name}", "--format=value(name.basename())"),
            ),
            remedy=f"choose another --name, or remove it: gemsmith launch clean {request.name}",
            complaint=lambda output: "there is one" if request.name in output.split() else None,
        ),
    ]


def status(record: LaunchRecord) -> Command:
    return ("gcloud", "compute", "tpus", "queued-resources", "describe", record.name, *_record_place(record))


def logs(record: LaunchRecord) -> Command:
    """The startup script copies its log to the bucket every minute, so that it outlives the node."""
    return ("gcloud", "storage", "cat", f"{record.root}/logs/worker-0.txt")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    place = _record_place(record)
    return (
        Resource(
            kind="queued resource",
            list=(
                *("gcloud", "compute", "tpus", "queued-resources", "list", *place),
                *(f"--filter=name:{record.name}", "--format=value(name.basename())"),
            ),
            # With --force its node goes, too; of a node alone the queued resource would stay.
            remove=("gcloud", "compute", "tpus", "queued-resources", "delete", "{}", *place, "--force", "--quiet"),
        ),
        Resource(
            kind="node",
            list=(
                *("gcloud", "compute", "tpus", "tpu-vm", "list", *place),
                *(f"--filter=labels.{LABEL}={record.name}", "--format=value(name.basename())"),
            ),
            remove=("gcloud", "compute", "tpus", "tpu-vm", "delete", "{}", *place, "--quiet"),
        ),
    )


def created(record: LaunchRecord) -> tuple[Resource, ...]:
    return running(record)


def _place(request: Request) -> Command:
    return ("--project", request.project, "--zone", request.zone or "")


def _record_place(record: LaunchRecord) -> Command:
    return ("--project", record.project, "--zone", record.zone or "")
