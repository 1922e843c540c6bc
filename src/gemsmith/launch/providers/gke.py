"""Kubernetes on Google's cloud: a JobSet for TPU slices of one or several hosts, and for GPUs.

The cluster and its node pools are the user's: nothing here makes them, and a pool that keeps its nodes goes on costing
money when the job has ended. In the pods of a JobSet, GKE sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES of their slice
and, where there are several, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, by which JAX
finds all hosts; so none of them is rendered here.

Pods on their node's network get no Workload Identity and run as the node's account
(github.com/apple/axlearn/issues/641): only those of several hosts are on it.
"""

from typing import Any

from gemsmith.errors import InputError
from gemsmith.hardware import Machine
from gemsmith.launch.commands import fill, values_of
from gemsmith.launch.provider import Feature, LaunchRequest, WithReason
from gemsmith.launch.render import render_files, render_template
from gemsmith.launch.request import is_googles
from gemsmith.launch.upload import describe_slice, disk_bytes, format_footprint, timed_command

FEATURES: frozenset[Feature] = frozenset()
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


def gives(machine: Machine) -> bool:
    if machine.chip.kind == "gpu":
        return machine.chip.name in GPUS and not machine.name.startswith("cloud-run") and is_googles(machine)
    # Several slices join only from node pools of several hosts: cloud.google.com/kubernetes-engine/docs/how-to/
    # tpu-multislice, read 2026-11-23.
    joined = machine.slices == 1 or machine.hosts > machine.slices
    return joined and machine.chips // machine.slices in TOPOLOGIES.get(machine.chip.name, {})


def check(request: LaunchRequest) -> None:
    """Raises InputError without a cluster."""
    if request.options.cluster is None:
        raise InputError(
            "--cluster: is missing; --provider gke needs the name of a cluster of yours, in --region or --zone"
        )


def render(request: LaunchRequest) -> dict[str, str]:
    job_set = render_template(
        "jobset.yaml",
        request,
        machine=request.machine,
        is_tpu=request.machine.chip.kind == "tpu",
        on_hosts_network=_on_hosts_network(request),
        nodes=_nodes(request),
        account=ACCOUNT,
        held=format_footprint(disk_bytes(request)),
        folder=FOLDER,
        command=timed_command(request, folder=FOLDER),
        time=f"{request.bill.timeout_s.reason}; from the program's start, so that waiting for nodes does not count",
    )
    known = values_of(request.options)
    credentials = "gcloud container clusters get-credentials {cluster} --{level} {place} --project {project}"
    apply = "kubectl --context {context} apply --filename jobset.yaml"
    submit = [
        ("Credentials of the cluster, into kubectl's own file.", fill(credentials, known)),
        ("Creates the job set, or says that it is there as it is.", fill(apply, known)),
    ]
    return render_files(request, {"jobset.yaml": job_set}, submit)


def _on_hosts_network(request: LaunchRequest) -> bool:
    return request.machine.chip.kind == "tpu" and request.machine.hosts > 1


def _nodes(request: LaunchRequest) -> dict[str, str | WithReason]:
    """The labels of the nodes that the pods need."""
    machine, chip = request.machine, request.machine.chip
    spot: dict[str, str | WithReason] = {"cloud.google.com/gke-spot": "true"} if request.options.spot else {}
    if chip.kind == "gpu":
        return {"cloud.google.com/gke-accelerator": GPUS[chip.name], **spot}
    topology = TOPOLOGIES[chip.name][machine.chips // machine.slices]
    return {
        "cloud.google.com/gke-tpu-accelerator": TPUS[chip.name],
        "cloud.google.com/gke-tpu-topology": WithReason(topology, describe_slice(machine)),
        **spot,
    }


def values(request: LaunchRequest) -> dict[str, Any]:
    """Both halves of Workload Identity are checked: who the Kubernetes service account is to be, and that it may."""
    nodes = ((key, value.value if isinstance(value, WithReason) else value) for key, value in _nodes(request).items())
    on_hosts_network = _on_hosts_network(request)
    return {
        "api": "container.googleapis.com",
        "nodes": ",".join(f"{key}={value}" for key, value in nodes),
        "on_hosts_network": on_hosts_network,
        "account_pulls": on_hosts_network,
        "kubernetes_account": None if on_hosts_network else ACCOUNT,
    }
