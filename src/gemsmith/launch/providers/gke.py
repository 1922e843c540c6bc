"""Kubernetes on Google's cloud: a JobSet for TPU slices of one or several hosts, and for GPUs.

The cluster and its node pools are the user's: nothing here makes them, and a pool that keeps its nodes goes on costing
money when the job has ended. In the pods of a JobSet, GKE sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES of their slice
and, where there are several, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, by which JAX
finds all hosts; so none of them is rendered here.

Pods on their node's network get no Workload Identity and run as the node's account
(github.com/apple/axlearn/issues/641): only those of several hosts are on it.
"""

import re
import shlex
from typing import Any

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.cost import is_googles
from gemsmith.launch.provider import LABEL, Check, Command, LaunchRecord, Request, Resource, WithReason
from gemsmith.launch.providers.gcloud import (
    account_checks,
    bucket_checks,
    first_checks,
    image_check,
    image_roles,
    missing_role,
)
from gemsmith.launch.render import render_script, render_yaml
from gemsmith.launch.request import disk_bytes, downloads_weights, format_footprint
from gemsmith.launch.upload import cost_lines, timed_command, upload_steps

MOUNTS_WEIGHTS = False
SUPPORTS_ANY_MACHINE = False
SUPPORTS_WHEEL = False
FOLDER = "/dev/shm/gemsmith"
ACCOUNT = "gemsmith"
"""The Kubernetes service account, tied to the request's by Workload Identity."""
TPUS = {"v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"}
TOPOLOGIES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "tpu7x": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
}
"""Chip -> chips of a slice -> its shape."""
GPUS = {"rtx-pro-6000": "nvidia-rtx-pro-6000", "h100": "nvidia-h100-80gb"}
_CLOUD = "cloud.google.com"
_SPOT_NOTICE_S = 25
"""All that a spot node leaves a pod."""


def gives(machine: Machine) -> bool:
    if machine.chip.kind == "gpu":
        return machine.chip.name in GPUS and not machine.name.startswith("cloud-run") and is_googles(machine)
    # Several slices join only from node pools of several hosts: cloud.google.com/kubernetes-engine/docs/how-to/
    # tpu-multislice, read 2026-11-23.
    joined = machine.slices == 1 or machine.hosts > machine.slices
    return joined and machine.chips // machine.slices in TOPOLOGIES.get(machine.chip.name, {})


def check(request: Request) -> None:
    """Raises InputError without a cluster."""
    if request.cluster is None:
        raise InputError("--cluster: is missing; --on gke needs the name of a cluster of yours, in --region or --zone")


def render(request: Request) -> dict[str, str]:
    context = _context(request.project, request.zone or request.region, request.cluster)
    login = ("gcloud", "container", "clusters", "get-credentials", request.cluster or "", *_where(request))
    submit = [
        *upload_steps(request),
        ("Credentials of the cluster, into kubectl's own file.", login),
        ("Creates the job set, or says that it is there as it is.", (*context, "apply", "--filename", "jobset.yaml")),
    ]
    return {
        "recipe.yaml": request.recipe_text,
        "jobset.yaml": render_yaml(_job_set(request), heading=cost_lines(request)),
        "submit.sh": render_script(submit, heading=cost_lines(request)),
    }


def _job_set(request: Request) -> dict[str, Any]:
    machine, labels = request.machine, dict[str, Any](request.labels)
    if request.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = WithReason(request.queue, "--queue; Kueue starts it when there is room")
    metadata: dict[str, Any] = {"name": request.name, "labels": labels}
    if machine.chip.kind == "tpu":
        nodes = WithReason(f"{_CLOUD}/gke-nodepool", "a slice is one node pool, and has it to itself")
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": nodes}
    job = {
        "parallelism": WithReason(machine.hosts // machine.slices, "a pod a host"),
        "completions": machine.hosts // machine.slices,
        "completionMode": "Indexed",
        "backoffLimit": WithReason(0, "the hosts of a slice start again together"),
        "template": {"metadata": {"labels": dict(request.labels)}, "spec": _pod(request)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": WithReason(
                    request.bill.attempts - 1, "each goes on from the last saved step in the bucket"
                )
            },
            "replicatedJobs": [{"name": "slice", "replicas": _replicas(machine), "template": {"spec": job}}],
        },
    }


def _replicas(machine: Machine) -> int | WithReason:
    return (
        1
        if machine.slices == 1
        else WithReason(machine.slices, f"{machine.name}: a job a slice; all start again together")
    )


def _pod(request: Request) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "restartPolicy": WithReason("Never", "the job set restarts"),
        "terminationGracePeriodSeconds": WithReason(
            _SPOT_NOTICE_S, "what a spot node leaves; the step under way is saved"
        ),
        "nodeSelector": _nodes(request),
    }
    account = request.service_account
    if _on_hosts_network(request):
        pod["hostNetwork"] = WithReason(True, f"hosts talk over it; so pods are their nodes' account, to be {account}")
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    else:
        pod["serviceAccountName"] = WithReason(ACCOUNT, f"Workload Identity makes it {account}")
    if request.machine.chip.kind == "tpu":
        pod["tolerations"] = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if request.spot:
        spot = {"key": f"{_CLOUD}/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        pod["tolerations"] = [*pod.get("tolerations", []), spot]
    held = format_footprint(disk_bytes(request, with_weights=downloads_weights(request)))
    memory = WithReason("Memory", f"the run's folder, in the host's memory; held at most {held}")
    return pod | {
        "volumes": [{"name": "staging", "emptyDir": {"medium": memory}}],
        "containers": [_container(request)],
    }


def _on_hosts_network(request: Request) -> bool:
    return request.machine.chip.kind == "tpu" and request.machine.hosts > 1


def _nodes(request: Request) -> dict[str, Any]:
    machine = request.machine
    spot = {f"{_CLOUD}/gke-spot": "true"} if request.spot else {}
    if machine.chip.kind == "gpu":
        return {f"{_CLOUD}/gke-accelerator": GPUS[machine.chip.name], **spot}
    chips, hosts = machine.chips // machine.slices, machine.hosts // machine.slices
    topology = TOPOLOGIES[machine.chip.name][chips]
    shape = WithReason(topology, f"{chips} chip{'s' * (chips > 1)} on {hosts} host{'s' * (hosts > 1)}")
    return {f"{_CLOUD}/gke-tpu-accelerator": TPUS[machine.chip.name], f"{_CLOUD}/gke-tpu-topology": shape, **spot}


def _container(request: Request) -> dict[str, Any]:
    command, machine = timed_command(request, folder=FOLDER), request.machine
    time = f"{request.bill.timeout_s.reason}; from the program's start, so that waiting for nodes does not count"
    resource = "google.com/tpu" if machine.chip.kind == "tpu" else "nvidia.com/gpu"
    environment: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": f"{FOLDER}/hub"},
        {"name": "GEMSMITH_CACHE", "value": f"{FOLDER}/cache"},
    ]
    if machine.chip.kind == "gpu":
        driver = WithReason("/usr/local/nvidia/lib64", "where GKE mounts the driver, which the loader does not look at")
        environment.append({"name": "LD_LIBRARY_PATH", "value": driver})
    if request.secret is not None:
        secret = {"secretKeyRef": {"name": request.secret, "key": "token"}}
        environment.append({"name": "HF_TOKEN", "valueFrom": secret})
    return {
        "name": "gemsmith",
        "image": request.image,
        "command": list(command[:1]),
        "args": [WithReason(word, time) if word == command[3] else word for word in command[1:]],
        "env": environment,
        "resources": {"limits": {resource: WithReason(machine.chips // machine.hosts, "all chips of the host")}},
        "volumeMounts": [{"name": "staging", "mountPath": "/dev/shm"}],
    }


def preflight(request: Request) -> list[Check]:
    place = request.zone or request.region
    context = _context(request.project, place, request.cluster)
    login = f"gcloud container clusters get-credentials {request.cluster} {' '.join(_where(request))}"
    manifest = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"
    nodes = ",".join(
        f"{key}={value.value if isinstance(value, WithReason) else value}" for key, value in _nodes(request).items()
    )
    checks = [
        *first_checks(request, apis=("container.googleapis.com", "storage.googleapis.com")),
        Check(name="kubectl is here", command=("kubectl", "version", "--client"), remedy="install it with gcloud's"),
        Check(name=f"cluster {request.cluster}", command=(*context, "get", "namespace", "default"), remedy=login),
        Check(
            name="JobSet is installed there",
            command=(*context, "get", "crd", "jobsets.jobset.x-k8s.io"),
            remedy=f"kubectl apply --server-side --filename {manifest}",
        ),
        Check(
            name=f"a node with {nodes}",
            command=(*context, "get", "nodes", "--selector", nodes, "--output", "name"),
            remedy="fine where a pool scales up from none; else make a node pool of this kind",
            complaint=lambda output: None if output.strip() else "there is none now",
            needed=False,
        ),
        *bucket_checks(request),
        image_check(request),
        *account_checks(request, roles=image_roles(request) if _on_hosts_network(request) else ()),
        *([_node_account_check(request)] if _on_hosts_network(request) else _identity_checks(request, context)),
    ]
    return [*checks, *_further_checks(request, context)]


def _identity_checks(request: Request, context: Command) -> list[Check]:
    """Both halves of Workload Identity: who the Kubernetes service account is to be, and that it may."""
    account, role, key = request.service_account, "roles/iam.workloadIdentityUser", "iam.gke.io/gcp-service-account"
    member = f"serviceAccount:{request.project}.svc.id.goog[default/{ACCOUNT}]"
    kubectl, escaped, asked = shlex.join(context), key.replace(".", "\\."), ("get", "serviceaccount", ACCOUNT)
    policy = ("gcloud", "iam", "service-accounts", "get-iam-policy", account, "--project", request.project)
    return [
        Check(
            name=f"Kubernetes service account {ACCOUNT} is {account}",
            command=(*context, *asked, f"--output=jsonpath={{.metadata.annotations.{escaped}}}"),
            remedy=f"{kubectl} create serviceaccount {ACCOUNT}; "
            f"{kubectl} annotate serviceaccount {ACCOUNT} {key}={account} --overwrite",
            complaint=lambda output: None if output.strip() == account else f"it is {output.strip() or 'nobody'} there",
        ),
        Check(
            name=f"{role} on {account}",
            command=(*policy, "--format=json"),
            remedy=f"gcloud iam service-accounts add-iam-policy-binding {account} --role {role} "
            f"--member {shlex.quote(member)} --project {request.project}",
            complaint=lambda output: missing_role(output, role, member),
        ),
    ]


def _node_account_check(request: Request) -> Check:
    """That there are nodes of the request's account, whose pods on the host's network are it."""
    account, cluster = request.service_account, request.cluster or ""
    pools = "nodePools[].config.serviceAccount,autoscaling.autoprovisioningNodePoolDefaults.serviceAccount"
    describe = ("gcloud", "container", "clusters", "describe", cluster, *_where(request))
    make = f"gcloud container node-pools create {request.name} --cluster {cluster} {' '.join(_where(request))}"
    return Check(
        name=f"nodes of {cluster} run as {account}",
        command=(*describe, f"--format=value({pools})"),
        remedy=f"{make} --service-account {account} --scopes cloud-platform, with the slice's type, topology and nodes",
        complaint=lambda output: None if account in re.split(r"[;\s]+", output) else "none of its node pools does",
    )


def _further_checks(request: Request, context: Command) -> list[Check]:
    checks = [
        Check(
            name=f"no other job set named {request.name}",
            command=(*context, "get", "jobset", request.name, "--ignore-not-found", "--output", "name"),
            remedy=f"choose another --name, or remove it: gemsmith launch clean {request.name}",
            complaint=lambda output: "there is one" if output.strip() else None,
        )
    ]
    if request.queue is not None:
        checks.append(
            Check(
                name=f"Kueue's local queue {request.queue}",
                command=(*context, "get", "localqueue", request.queue),
                remedy="name another with --queue, or leave it out",
            )
        )
    if request.secret is not None:
        checks.append(
            Check(
                name=f"secret {request.secret} in the cluster, the Hugging Face token",
                command=(*context, "get", "secret", request.secret),
                remedy=f"kubectl create secret generic {request.secret} --from-file=token=FILE, or name another",
            )
        )
    return checks


def status(record: LaunchRecord) -> Command:
    return (*_record_context(record), "get", "jobset,pods", "--selector", f"{LABEL}={record.name}", "--output", "wide")


def logs(record: LaunchRecord) -> Command:
    selector = f"{LABEL}={record.name}"
    return (*_record_context(record), "logs", "--selector", selector, "--tail=-1", "--prefix", "--max-log-requests=64")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    context = _record_context(record)
    return (
        Resource(
            kind="job set",
            list=(*context, "get", "jobset", "--selector", f"{LABEL}={record.name}", "--output", "name"),
            remove=(*context, "delete", "{}", "--wait=true"),
        ),
    )


def created(record: LaunchRecord) -> tuple[Resource, ...]:
    return running(record)


def _record_context(record: LaunchRecord) -> Command:
    return _context(record.project, record.zone or record.region, record.cluster)


def _where(request: Request) -> Command:
    place = ("--zone", request.zone) if request.zone else ("--region", request.region)
    return (*place, "--project", request.project)


def _context(project: str, place: str, cluster: str | None) -> Command:
    """Kubectl for this cluster, whichever is the current one; the name is the one that gcloud gives it."""
    return ("kubectl", "--context", f"gke_{project}_{place}_{cluster}")
