"""Cloud Run: a Job with an RTX PRO 6000, submitted by `gcloud run jobs replace`; and the tuned model as a Service.

A job's files are kept in its memory, so the memory follows from what the run holds. A base in a bucket is read through
a read-only mount; everything that is written goes to the bucket object by object, never through the mount, which has
no atomic rename.

What vLLM is told in the service of a tuned model: what `gemsmith serve --on` would tell it on such a machine.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.provider import LABEL, MOUNT, Check, Command, LaunchRecord, Request, Resource, WithReason
from gemsmith.launch.providers.gcloud import (
    account_checks,
    bucket_checks,
    first_checks,
    image_check,
    in_artifact_registry,
    registry_of,
    secret_checks,
    subnet_check,
)
from gemsmith.launch.render import render_script, render_yaml
from gemsmith.launch.request import GB, disk_bytes, downloads_weights, format_footprint
from gemsmith.launch.upload import cost_lines, upload_steps, worker_command
from gemsmith.plan.serving import MOST_REQUESTS
from gemsmith.serve.command import PROMPT_AND_OUTPUT, Weights, deploy, published_config
from gemsmith.serve.container import Deployment
from gemsmith.serve.settings import ServeSettings

PORT = 8000


def deploy_service(request: Request) -> Deployment:
    """The deployment of the merged weights in the run's bucket, which is mounted at MOUNT."""
    serve, data = request.recipe.serve, request.recipe.data
    needed = serve.max_model_len or 0
    folder = f"{MOUNT}/{request.root.removeprefix(f'gs://{request.bucket}/')}"
    settings = ServeSettings(
        host="0.0.0.0",
        port=PORT,
        # What eval and bench need is little for others to ask with, unless it is more than what is given by default.
        max_model_len=request.max_model_len or (needed if needed > PROMPT_AND_OUTPUT else None),
        dtype=serve.dtype,
        seed=request.recipe.seed,
        prefix_caching=True,
        chat_template=f"{folder}/launched/{data.template}" if data.template else None,
        arguments=serve.arguments,
        images=serve.images or bool(request.images),
        image_tokens=data.image_tokens,
        kv_cache_dtype=serve.kv_cache_dtype,
        container_image=serve.container_image,
    )
    weights = Weights(
        source=f"{folder}/run/merged",
        is_folder=True,
        variant=request.variant,
        config=published_config(request.variant),
    )
    # Cloud Run asks who calls before vLLM sees the call, so the server needs no key.
    return deploy(request.machine, weights, settings, name=request.name, keyed=True)


def service_arguments(deployment: Deployment) -> list[str | WithReason]:
    """Its arguments, an option with its value each, and the reasons of those that were chosen."""
    there = {mount.inside: mount.host for mount in deployment.mounts}
    words = [there.get(word, word) for word in deployment.arguments]
    reasons = {choice.what.partition(" ")[0]: choice.why for choice in deployment.choices}
    reasons["--gpu-memory-utilization"] = reasons["memory"]
    return [
        WithReason(argument, reasons[option]) if (option := argument.partition("=")[0]) in reasons else argument
        for argument in _joined(words)
    ]


def _joined(words: Sequence[str]) -> Iterator[str]:
    """["a", "--b", "c", "--d"] -> "a", "--b=c", "--d"."""
    left = [*words]
    while left:
        word = left.pop(0)
        value = word.startswith("--") and "=" not in word and left and not left[0].startswith("--")
        yield f"{word}={left.pop(0)}" if value else word


MOUNTS_WEIGHTS = True
SUPPORTS_ANY_MACHINE = False
SUPPORTS_WHEEL = False
FOLDER = "/tmp/gemsmith"
ACCELERATOR = "nvidia-rtx-pro-6000"
REGIONS = ("us-central1", "europe-west4", "asia-southeast1")
LONGEST_S = 168 * 3600
"""Of a task; Google's pages disagree on those with a GPU: 1, 12 and 168 h."""
UNDISPUTED_S = 12 * 3600
_PREFIX = "run.googleapis.com"
_QUOTA = re.compile(r"RtxPro6000.*NoZonalRedundancy")
"""In the name of the quota that the rendered job draws on."""


class Size(NamedTuple):
    vcpu: int
    memory_gib: int


SIZES = {"cloud-run-20": Size(20, 80), "cloud-run-30": Size(30, 120), "cloud-run-44": Size(44, 176)}
"""Machines of the catalog. 20 vCPU and 80 GiB are the least that go with this GPU, 44 and 176 the most."""


def gives(machine: Machine) -> bool:
    return machine.name in SIZES


def check(request: Request) -> None:
    """Raises InputError for a region without the GPU, an image it cannot pull, too little memory or too long a time."""
    if request.region not in REGIONS:
        raise InputError(
            f"--region {request.region}: Cloud Run has no {ACCELERATOR} there; choose {', '.join(REGIONS)}"
        )
    if request.spot:
        raise InputError("--spot: Cloud Run has no spot price; leave it out")
    if float(request.bill.timeout_s.value) > LONGEST_S:
        raise InputError(
            f"--timeout-hours {float(request.bill.timeout_s.value) / 3600:.0f}: a Cloud Run task takes "
            f"{LONGEST_S // 3600} h at most; train fewer steps, or on another target"
        )
    if (request.network is None) != (request.subnet is None):
        raise InputError("--network and --subnet: go together; give both, or neither")
    served = {"serve.container_image": request.recipe.serve.container_image or ""} if "export" in request.stages else {}
    for key, image in {"--image": str(request.image.value), **served}.items():
        if not in_artifact_registry(image) and registry_of(image) != "docker.io":
            raise InputError(
                f"{key} {image}: Cloud Run pulls from Artifact Registry and Docker Hub alone; copy it there, or "
                f"make a remote repository of Artifact Registry for {registry_of(image)}"
            )
    held = disk_bytes(request, with_weights=downloads_weights(request))
    memory_gib = SIZES[request.machine.name].memory_gib
    if sum(held.values()) > memory_gib * 2**30:
        raise InputError(
            f"--machine {request.machine.name}: {memory_gib} GiB of memory do not hold {format_footprint(held)}; "
            "choose a larger one, leave export to another machine with --stages, or put the base in a bucket: checkpoint: "
            "gs://…"
        )


def render(request: Request) -> dict[str, str]:
    region = ("--project", request.project, "--region", request.region)
    submit = [
        *upload_steps(request),
        (
            "Creates the job, or brings it to what the file says.",
            ("gcloud", "run", "jobs", "replace", "job.yaml", *region, "--quiet"),
        ),
        (
            "Starts it, and does not wait for its end.",
            ("gcloud", "run", "jobs", "execute", request.name, *region, "--async", "--quiet"),
        ),
    ]
    files = {
        "recipe.yaml": request.recipe_text,
        "job.yaml": render_yaml(_job(request), heading=cost_lines(request)),
        "submit.sh": render_script(submit, heading=cost_lines(request)),
    }
    if "export" in request.stages:
        replace = ("gcloud", "run", "services", "replace", "service.yaml", *region, "--quiet")
        files["service.yaml"] = render_yaml(_service(request), heading=_SERVICE_HEADING)
        files["serve.sh"] = render_script([("The tuned model behind vLLM's API, once the job has ended.", replace)])
    return files


_SERVICE_HEADING = (
    "The tuned model as a private service; run serve.sh once the job has ended. Without requests no instance runs.",
    "Reached as yourself: gcloud run services proxy NAME --region REGION --port 8080, and beside it:",
    "gemsmith chat --url http://127.0.0.1:8080 --model NAME",
)


def _job(request: Request) -> dict[str, Any]:
    labels = request.labels
    task = {
        "maxRetries": WithReason(request.bill.attempts - 1, "a retry goes on from the last saved step in the bucket"),
        # Quoted, as the API wants it.
        "timeoutSeconds": WithReason(
            str(request.bill.timeout_s.value), request.bill.timeout_s.reason + _disputed(request)
        ),
        "serviceAccountName": WithReason(request.service_account, "its only role is on the bucket, and the secret's"),
        **_gpu_and_mounts(request.weights_bucket),
        "containers": [_container(request)],
    }
    return {
        "apiVersion": f"{_PREFIX}/v1",
        "kind": "Job",
        "metadata": {
            "name": request.name,
            "labels": labels,
            "annotations": {f"{_PREFIX}/launch-stage": WithReason("BETA", "GPUs of jobs are")},
        },
        "spec": {
            "template": {
                "metadata": {"labels": labels, "annotations": _annotations(request)},
                "spec": {
                    "taskCount": WithReason(1, "one GPU trains the whole run"),
                    "parallelism": 1,
                    "template": {"spec": task},
                },
            }
        },
    }


def _disputed(request: Request) -> str:
    long = float(request.bill.timeout_s.value) > UNDISPUTED_S
    return f". Longer than {UNDISPUTED_S // 3600} h may be refused with a GPU: Google's pages disagree" if long else ""


def _annotations(request: Request) -> dict[str, Any]:
    annotations: dict[str, Any] = {
        f"{_PREFIX}/execution-environment": WithReason("gen2", "GPUs and mounts need it"),
        f"{_PREFIX}/gpu-zonal-redundancy-disabled": WithReason(
            "true", "cheaper, and of a quota of its own; best effort"
        ),
    }
    if request.network is not None:
        interfaces = json.dumps([{"network": request.network, "subnetwork": request.subnet}])
        annotations[f"{_PREFIX}/network-interfaces"] = WithReason(interfaces, "Direct VPC; the subnet is /26 or larger")
        annotations[f"{_PREFIX}/vpc-access-egress"] = "all-traffic"
    return annotations


def _gpu_and_mounts(bucket: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"nodeSelector": {f"{_PREFIX}/accelerator": ACCELERATOR}}
    if bucket is not None:
        source = {
            "driver": f"gcsfuse.{_PREFIX}",
            "readOnly": WithReason(True, "weights are only read; results never go through a mount"),
            "volumeAttributes": {"bucketName": bucket},
        }
        found["volumes"] = [{"name": "weights", "csi": source}]
    return found


def _container(request: Request) -> dict[str, Any]:
    command = worker_command(request, folder=FOLDER)
    container: dict[str, Any] = {
        "image": request.image,
        "command": list(command[:1]),
        "args": list(command[1:]),
        "resources": {"limits": _limits(request)},
    }
    if request.secret is not None:
        secret = {"secretKeyRef": {"name": request.secret, "key": "latest"}}
        container["env"] = [{"name": "HF_TOKEN", "valueFrom": secret}]
    if request.weights_bucket is not None:
        container["volumeMounts"] = [{"name": "weights", "mountPath": MOUNT}]
    return container


def _limits(request: Request) -> dict[str, Any]:
    size = SIZES[request.machine.name]
    held = format_footprint(disk_bytes(request, with_weights=downloads_weights(request)))
    return {
        "cpu": WithReason(str(size.vcpu), "the least that goes with this memory and GPU"),
        "memory": WithReason(f"{size.memory_gib}Gi", f"files count as memory here; held at most {held}"),
        "nvidia.com/gpu": WithReason("1", "an instance has one"),
    }


def _service(request: Request) -> dict[str, Any]:
    annotations = _annotations(request) | {
        "autoscaling.knative.dev/minScale": WithReason("0", "nothing is paid while nobody asks"),
        "autoscaling.knative.dev/maxScale": WithReason("1", "the most that it can cost is one instance"),
        f"{_PREFIX}/cpu-throttling": WithReason("false", "a GPU needs it"),
    }
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": request.name,
            "labels": request.labels,
            "annotations": {f"{_PREFIX}/launch-stage": "BETA", f"{_PREFIX}/ingress": "all"},
        },
        "spec": {
            "template": {
                "metadata": {"labels": request.labels, "annotations": annotations},
                "spec": {
                    "containerConcurrency": WithReason(
                        MOST_REQUESTS, "as many as vLLM batches; what its memory does not hold waits there"
                    ),
                    "timeoutSeconds": WithReason(3600, "the longest; an answer is streamed"),
                    "serviceAccountName": request.service_account,
                    **_gpu_and_mounts(request.bucket),
                    "containers": [_service_container(request)],
                },
            }
        },
    }


def _service_container(request: Request) -> dict[str, Any]:
    weights_gb, deployment = 2 * request.parameters / GB, deploy_service(request)
    probe = {
        "httpGet": {"path": "/health", "port": deployment.port},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": WithReason(
            _load_tries(weights_gb), f"{weights_gb:.0f} GB at the 1 Gbit/s that Direct VPC has, twice over, and 5 min"
        ),
    }
    return {
        "image": WithReason(
            deployment.image or "", "serve.container_image, or else vLLM's own; its tag was not looked up"
        ),
        "command": ["vllm", *deployment.program],
        "args": service_arguments(deployment),
        "env": [{"name": name, "value": value} for name, value in deployment.environment.items()],
        "ports": [{"containerPort": deployment.port}],
        "resources": {"limits": _service_limits()},
        "volumeMounts": [{"name": "weights", "mountPath": MOUNT}],
        "startupProbe": probe,
    }


def _load_tries(weights_gb: float) -> int:
    """Probes of 10 s until vLLM must be up."""
    seconds = 2 * weights_gb * 8 + 300
    return -(-int(seconds) // 10)


def _service_limits() -> Mapping[str, Any]:
    size = SIZES["cloud-run-20"]
    return {
        "cpu": WithReason(str(size.vcpu), "the least that goes with this GPU"),
        "memory": WithReason(f"{size.memory_gib}Gi", "the least; weights are mapped, not copied"),
        "nvidia.com/gpu": "1",
    }


def preflight(request: Request) -> list[Check]:
    project = ("--project", request.project)
    checks = [
        *first_checks(request, apis=("run.googleapis.com", "storage.googleapis.com")),
        *bucket_checks(request),
        image_check(request),
        *account_checks(request),
        *secret_checks(request),
        Check(
            name=f"GPU quota in {request.region}",
            command=(
                *("gcloud", "beta", "quotas", "info", "list", *project),
                *("--service", "run.googleapis.com", "--format=json"),
            ),
            remedy=(
                f"ask for {ACCELERATOR} without zonal redundancy in {request.region}: "
                f"https://console.cloud.google.com/iam-admin/quotas?project={request.project}"
            ),
            complaint=lambda output: _no_quota(output, request.region),
            needed=False,
        ),
        Check(
            name=f"no other job named {request.name}",
            command=(
                *("gcloud", "run", "jobs", "list", *project, "--region", request.region),
                *(f"--filter=metadata.name={request.name}", "--format=value(metadata.name)"),
            ),
            remedy=f"choose another --name, or remove it: gemsmith launch clean {request.name}",
            complaint=lambda output: f"there is {output.strip()}" if output.strip() else None,
        ),
    ]
    return [*checks, *subnet_check(request)]


def _no_quota(output: str, region: str) -> str | None:
    """Why a task gets no GPU, by all quotas of Cloud Run, which are listed whatever their value in a region is."""
    try:
        quotas = [quota for quota in json.loads(output) if _QUOTA.search(quota["quotaId"])]
        infos = [info for quota in quotas for info in quota.get("dimensionsInfos", ())]
        here = [info.get("details", {}) for info in infos if region in info["applicableLocations"]]
        values = [int(details.get("value", 0)) for details in here]  # 0 is left out, -1 is no limit
    except (ValueError, KeyError, TypeError, AttributeError):
        return "the quotas cannot be read"
    return None if any(values) else "it is 0" if values else "none is listed for this GPU"


def status(record: LaunchRecord) -> Command:
    return ("gcloud", "run", "jobs", "executions", "list", "--job", record.name, *_place(record))


def logs(record: LaunchRecord) -> Command:
    query = f'resource.type="cloud_run_job" resource.labels.job_name="{record.name}"'
    last = (
        *("gcloud", "logging", "read", query, "--project", record.project),
        *("--order=desc", "--limit=1000", "--freshness=7d", "--format=value(timestamp,textPayload)"),
    )
    # The last ones come newest first; sed, which every system has, turns them round.
    return ("bash", "-c", f"set -o pipefail; {shlex.join(last)} | sed -n '1!G;h;$p'")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    return (
        Resource(
            kind="execution",
            list=(
                *("gcloud", "run", "jobs", "executions", "list", "--job", record.name, *_place(record)),
                *("--filter=NOT status.completionTime:*", "--format=value(metadata.name)"),
            ),
            remove=("gcloud", "run", "jobs", "executions", "cancel", "{}", *_place(record), "--quiet"),
        ),
        _resource(record, "services"),
    )


def created(record: LaunchRecord) -> tuple[Resource, ...]:
    return (*running(record), _resource(record, "jobs"))


def _resource(record: LaunchRecord, kind: str) -> Resource:
    label = f"--filter=metadata.labels.{LABEL}={record.name}"
    return Resource(
        kind=kind.removesuffix("s"),
        list=("gcloud", "run", kind, "list", *_place(record), label, "--format=value(metadata.name)"),
        remove=("gcloud", "run", kind, "delete", "{}", *_place(record), "--quiet"),
    )


def _place(record: LaunchRecord) -> Command:
    return ("--project", record.project, "--region", record.region)
