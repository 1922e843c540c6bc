"""Cloud Run: a Job with an RTX PRO 6000, submitted by `gcloud run jobs replace`; and the tuned model as a Service.

A job's files are kept in its memory, so the memory follows from what the run holds. A base in a bucket is read through
a read-only mount; everything that is written goes to the bucket object by object, never through the mount, which has
no atomic rename. vLLM is told in the service what `gemsmith serve --machine` would tell it on such a machine.
"""

from typing import Any

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.commands import in_artifact_registry, registry_of
from gemsmith.launch.provider import MOUNT, Feature, LaunchRequest, WithReason
from gemsmith.launch.render import make_service, render_files, render_template
from gemsmith.launch.upload import disk_bytes, format_footprint, worker_command
from gemsmith.plan.serving import MOST_REQUESTS

FEATURES: frozenset[Feature] = frozenset({"mounts weights", "evaluates", "tasks", "serves"})
FOLDER = "/tmp/gemsmith"
GPU = "nvidia-rtx-pro-6000"
REGIONS = ("us-central1", "europe-west4", "asia-southeast1")
LONGEST_S = 168 * 3600  # of a task; Google's pages disagree on those with a GPU: 1, 12 and 168 h
UNDISPUTED_S = 12 * 3600
VCPUS = {"cloud-run-20": 20, "cloud-run-30": 30, "cloud-run-44": 44}
"""Of the catalog's machines: 20 are the least that go with this GPU, 44 the most."""
GIB_A_VCPU = 4


def gives(machine: Machine) -> bool:
    return machine.name in VCPUS


def check(request: LaunchRequest) -> None:
    """Raises InputError for a region without the GPU, an image it cannot pull, too little memory or too long a time."""
    options, timeout_s = request.options, float(request.bill.timeout_s.value)
    if options.region not in REGIONS:
        raise InputError(f"--region {options.region}: Cloud Run has no {GPU} there; choose {', '.join(REGIONS)}")
    if options.spot:
        raise InputError("--spot: Cloud Run has no spot price; leave it out")
    if timeout_s > LONGEST_S:
        what = f"a Cloud Run task takes {LONGEST_S // 3600} h at most"
        raise InputError(f"--timeout-hours {timeout_s / 3600:.0f}: {what}; train fewer steps, or on another target")
    if (options.network is None) != (options.subnet is None):
        raise InputError("--network and --subnet: go together; give both, or neither")
    images = {"--image": str(request.image.value)}
    if "export" in options.stages:
        make_service(request, request.machine)  # raises for what cannot be served
        images["serve.container_image"] = request.recipe.serve.container_image or ""
    for key, image in images.items():
        if not in_artifact_registry(image) and registry_of(image) != "docker.io":
            remedy = f"copy it there, or make a remote repository of Artifact Registry for {registry_of(image)}"
            raise InputError(f"{key} {image}: Cloud Run pulls from Artifact Registry and Docker Hub alone; {remedy}")
    held, memory_gib = disk_bytes(request), GIB_A_VCPU * VCPUS[request.machine.name]
    if sum(held.values()) > memory_gib * 2**30:
        what = f"{memory_gib} GiB of memory do not hold {format_footprint(held)}"
        remedy = "choose a larger one, leave export to another machine with --stages, or put the base in a bucket"
        raise InputError(f"--machine {request.machine.name}: {what}; {remedy}: checkpoint: gs://…")


def render(request: LaunchRequest) -> dict[str, str]:
    vcpus, timeout = VCPUS[request.machine.name], request.bill.timeout_s
    reason, held = timeout.reason, format_footprint(disk_bytes(request))
    if float(timeout.value) > UNDISPUTED_S:
        reason += f". Longer than {UNDISPUTED_S // 3600} h may be refused with a GPU: Google's pages disagree"
    job = render_template(
        "job.yaml",
        request,
        accelerator=GPU,
        # Quoted, as the API wants it.
        timeout=WithReason(str(timeout.value), reason),
        command=worker_command(request, folder=FOLDER),
        vcpus=str(vcpus),
        memory=WithReason(f"{GIB_A_VCPU * vcpus}Gi", f"files count as memory here; held at most {held}"),
        mount=MOUNT,
    )
    service = _service(request) if "export" in request.options.stages else None
    return render_files(request, "cloud-run", values(request), {"job.yaml": job}, service)


def _service(request: LaunchRequest) -> str:
    most, service = request.options.max_replicas or 1, make_service(request, request.machine)
    least, how = min(VCPUS.values()), "streamed" if request.options.load == "stream" else "mapped"
    cost = f"the most that it can cost is {'one instance' if most == 1 else f'{most} instances'}"
    return render_template(
        "service.yaml",
        request,
        accelerator=GPU,
        concurrency=MOST_REQUESTS,
        most=WithReason(str(most), cost),
        service=service,
        vcpus=str(least),
        memory=WithReason(f"{GIB_A_VCPU * least}Gi", f"the least; weights are {how}, not copied"),
    )


def values(_request: LaunchRequest) -> dict[str, Any]:
    """Cloud Run's own agent pulls the image."""
    return {"api": "run.googleapis.com", "accelerator": GPU, "account_pulls": False}
