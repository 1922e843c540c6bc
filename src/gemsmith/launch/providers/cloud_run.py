"""Cloud Run: a Job with an RTX PRO 6000, submitted by `gcloud run jobs replace`; and the tuned model as a Service.

A job's files are kept in its memory, so the memory follows from what the run holds. A base in a bucket is read through
a read-only mount; everything that is written goes to the bucket object by object, never through the mount, which has
no atomic rename. vLLM is told in the service what `gemsmith serve --machine` would tell it on such a machine.
"""

from typing import Any, NamedTuple

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.commands import in_artifact_registry, registry_of
from gemsmith.launch.provider import MOUNT, Feature, LaunchRequest, WithReason
from gemsmith.launch.render import make_service, render_commands, render_files, render_template
from gemsmith.launch.upload import disk_bytes, format_footprint, worker_command
from gemsmith.plan.serving import MOST_REQUESTS

FEATURES: frozenset[Feature] = frozenset({"mounts weights", "evaluates", "tasks", "serves"})
FOLDER = "/tmp/gemsmith"
ACCELERATOR = "nvidia-rtx-pro-6000"
REGIONS = ("us-central1", "europe-west4", "asia-southeast1")
LONGEST_S = 168 * 3600
"""Of a task; Google's pages disagree on those with a GPU: 1, 12 and 168 h."""
UNDISPUTED_S = 12 * 3600


class Size(NamedTuple):
    vcpu: int
    memory_gib: int


SIZES = {"cloud-run-20": Size(20, 80), "cloud-run-30": Size(30, 120), "cloud-run-44": Size(44, 176)}
"""Machines of the catalog. 20 vCPU and 80 GiB are the least that go with this GPU, 44 and 176 the most."""


def gives(machine: Machine) -> bool:
    return machine.name in SIZES


def check(request: LaunchRequest) -> None:
    """Raises InputError for a region without the GPU, an image it cannot pull, too little memory or too long a time."""
    options, timeout_s = request.options, float(request.bill.timeout_s.value)
    if options.region not in REGIONS:
        raise InputError(
            f"--region {options.region}: Cloud Run has no {ACCELERATOR} there; choose {', '.join(REGIONS)}"
        )
    if options.spot:
        raise InputError("--spot: Cloud Run has no spot price; leave it out")
    if timeout_s > LONGEST_S:
        raise InputError(
            f"--timeout-hours {timeout_s / 3600:.0f}: a Cloud Run task takes {LONGEST_S // 3600} h at most; train "
            "fewer steps, or on another target"
        )
    if (options.network is None) != (options.subnet is None):
        raise InputError("--network and --subnet: go together; give both, or neither")
    images = {"--image": str(request.image.value)}
    if "export" in options.stages:
        make_service(request, request.machine)  # raises for what cannot be served
        images["serve.container_image"] = request.recipe.serve.container_image or ""
    for key, image in images.items():
        if not in_artifact_registry(image) and registry_of(image) != "docker.io":
            raise InputError(
                f"{key} {image}: Cloud Run pulls from Artifact Registry and Docker Hub alone; copy it there, or "
                f"make a remote repository of Artifact Registry for {registry_of(image)}"
            )
    held, memory_gib = disk_bytes(request), SIZES[request.machine.name].memory_gib
    if sum(held.values()) > memory_gib * 2**30:
        raise InputError(
            f"--machine {request.machine.name}: {memory_gib} GiB of memory do not hold {format_footprint(held)}; "
            "choose a larger one, leave export to another machine with --stages, or put the base in a bucket: "
            "checkpoint: gs://…"
        )


def render(request: LaunchRequest) -> dict[str, str]:
    options, size, timeout = request.options, SIZES[request.machine.name], request.bill.timeout_s
    reason, held = timeout.reason, format_footprint(disk_bytes(request))
    if float(timeout.value) > UNDISPUTED_S:
        reason += f". Longer than {UNDISPUTED_S // 3600} h may be refused with a GPU: Google's pages disagree"
    job = render_template(
        "job.yaml",
        request,
        accelerator=ACCELERATOR,
        # Quoted, as the API wants it.
        timeout=WithReason(str(timeout.value), reason),
        command=worker_command(request, folder=FOLDER),
        size=size,
        memory=WithReason(f"{size.memory_gib}Gi", f"files count as memory here; held at most {held}"),
        mount=MOUNT,
    )
    where = ("--project", options.project, "--region", options.region)
    jobs = ("gcloud", "run", "jobs")
    execute = (*jobs, "execute", options.name, *where, "--async", "--quiet")
    submit = [
        ("Creates the job, or brings it to what the file says.", (*jobs, "replace", "job.yaml", *where, "--quiet")),
        ("Starts it, and does not wait for its end.", execute),
    ]
    files = render_files(request, {"job.yaml": job}, submit)
    if "export" in options.stages:
        files["service.yaml"] = _service(request)
        serve = ("gcloud", "run", "services", "replace", "service.yaml", *where, "--quiet")
        files["serve.sh"] = render_commands([("The tuned model behind vLLM's API, once the job has ended.", serve)])
    return files


def _service(request: LaunchRequest) -> str:
    most, service = request.options.max_replicas or 1, make_service(request, request.machine)
    cost = f"the most that it can cost is {'one instance' if most == 1 else f'{most} instances'}"
    return render_template(
        "service.yaml",
        request,
        heading=(
            "The tuned model as a private service; run serve.sh once the job has ended. Without requests no instance "
            "runs.",
            "Reached as yourself: gcloud run services proxy NAME --region REGION --port 8080, and in another terminal:",
            "gemsmith chat --url http://127.0.0.1:8080 --model NAME",
            service.cold_start,
        ),
        accelerator=ACCELERATOR,
        concurrency=MOST_REQUESTS,
        most=WithReason(str(most), cost),
        service=service,
        size=SIZES["cloud-run-20"],
    )


def values(_request: LaunchRequest) -> dict[str, Any]:
    """Cloud Run's own agent pulls the image."""
    return {"api": "run.googleapis.com", "accelerator": ACCELERATOR, "account_pulls": False}
