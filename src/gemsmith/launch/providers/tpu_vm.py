"""TPU VMs: a queued resource whose startup script runs the stages and then deletes the node.

They run in a container, or in a Python of their own that uv makes from Gemsmith's wheel and locks. Google no longer
develops this API and has no TPU7x in it; v5e, v5p and v6e still come by it.
"""

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.provider import (
    LABEL,
    ChosenOptions,
    Command,
    LaunchRecord,
    LaunchRequest,
    PreflightCheck,
    Resource,
)
from gemsmith.launch.providers.gcloud import common_checks, first_checks, image_roles, name_check, secret_checks
from gemsmith.launch.render import render_commands, render_template
from gemsmith.launch.upload import cost_lines, upload_steps, worker_command
from gemsmith.serve.command import RUNTIMES

MOUNTS_WEIGHTS = False
SUPPORTS_ANY_MACHINE = False
SUPPORTS_WHEEL = True
FOLDER = "/dev/shm/gemsmith"
"""In the host's memory: the boot disk is smaller than the weights of a large model."""
UV, PYTHON = "0.13.9", "3.11"
"""What makes a Python on the node, and which."""
WAITS = "24h"
"""For which a queued resource waits for a machine; nothing is paid meanwhile."""
_NAMES = "--format=value(name.basename())"


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
        raise InputError(
            f"--zone: is missing; {request.machine.name} has a price in {there}; zones that have it are listed by: "
            f"gcloud compute tpus accelerator-types list --zone ZONE --filter=type={accelerator_type(request.machine)}"
        )


def render(request: LaunchRequest) -> dict[str, str]:
    options, machine = request.options, request.machine
    create = (
        *_tpus(options, "queued-resources", "create", options.name),
        *("--node-id", options.name, "--accelerator-type", accelerator_type(machine)),
        *("--runtime-version", RUNTIMES[machine.chip.name], "--labels", f"{LABEL}={options.name}"),
        *("--service-account", options.service_account),
        *("--scopes", "https://www.googleapis.com/auth/cloud-platform"),
        *("--metadata-from-file", "startup-script=startup.sh", "--valid-until-duration", WAITS),
        *(("--spot",) if options.spot else ()),
        *(("--network", options.network) if options.network else ()),
        *(("--subnetwork", options.subnet) if options.subnet else ()),
        *("--async", "--quiet"),
    )
    chips, hosts = machine.chips, machine.hosts
    reason = (
        f"Waits {WAITS} for {chips} chip{'s' * (chips > 1)} on {hosts} host{'s' * (hosts > 1)}, unpaid until then.\n"
        "The script deletes the node when the stages have ended, have failed, or have taken too long."
    )
    heading, command = cost_lines(request), worker_command(request, folder=FOLDER)
    return {
        "recipe.yaml": request.recipe_text,
        "startup.sh": render_template(
            "startup.sh",
            request,
            heading=heading,
            uv=UV,
            python=PYTHON,
            folder=FOLDER,
            command=command,
        ),
        "submit.sh": render_commands([*upload_steps(request), (reason, create)], heading=heading),
    }


def preflight(request: LaunchRequest) -> list[PreflightCheck]:
    options, kind, runtime = request.options, accelerator_type(request.machine), RUNTIMES[request.machine.chip.name]
    roles = ("roles/tpu.admin", *(() if options.wheel else image_roles(request)))
    return [
        *first_checks(request, apis=("tpu.googleapis.com", "storage.googleapis.com")),
        *common_checks(request, roles=roles),
        *secret_checks(request),
        PreflightCheck(
            name=f"{kind} in {options.zone}",
            command=_tpus(options, "accelerator-types", "describe", kind),
            remedy="choose another --zone; gcloud compute tpus locations list names them all",
        ),
        PreflightCheck(
            name=f"runtime {runtime} in {options.zone}",
            command=_tpus(options, "versions", "describe", runtime),
            remedy="choose another --zone",
        ),
        name_check(request, "queued resource", _queued_resources(options)),
    ]


def status(record: LaunchRecord) -> Command:
    return _tpus(record, "queued-resources", "describe", record.name)


def logs(record: LaunchRecord) -> Command:
    """The startup script copies its log to the bucket every minute, so that it outlives the node."""
    return ("gcloud", "storage", "cat", f"{record.root}/logs/worker-0.txt")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    return (
        Resource(
            kind="queued resource",
            list=_queued_resources(record),
            # With --force its node goes, too; of a node alone the queued resource would stay.
            remove=(*_tpus(record, "queued-resources", "delete", "{}"), "--force", "--quiet"),
        ),
        Resource(
            kind="node",
            list=(*_tpus(record, "tpu-vm", "list"), f"--filter=labels.{LABEL}={record.name}", _NAMES),
            remove=(*_tpus(record, "tpu-vm", "delete", "{}"), "--quiet"),
        ),
    )


created = running


def _tpus(options: ChosenOptions, *words: str) -> Command:
    return ("gcloud", "compute", "tpus", *words, "--project", options.project, "--zone", options.zone or "")


def _queued_resources(options: ChosenOptions) -> Command:
    """Prints the launch's name where there is one of it."""
    return (*_tpus(options, "queued-resources", "list"), f"--filter=name:{options.name}", _NAMES)
