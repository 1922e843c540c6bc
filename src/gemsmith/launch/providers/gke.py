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
    WithReason,
)
from gemsmith.launch.providers.gcloud import common_checks, first_checks, image_roles, name_check, role_check
from gemsmith.launch.render import render_commands, render_template
from gemsmith.launch.request import is_googles
from gemsmith.launch.upload import cost_lines, disk_bytes, format_footprint, timed_command, upload_steps

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
    heading, time = cost_lines(request), request.bill.timeout_s.reason
    job_set = render_template(
        "jobset.yaml",
        request,
        heading=heading,
        machine=request.machine,
        is_tpu=request.machine.chip.kind == "tpu",
        on_hosts_network=_on_hosts_network(request),
        nodes=_nodes(request),
        account=ACCOUNT,
        held=format_footprint(disk_bytes(request)),
        folder=FOLDER,
        command=timed_command(request, folder=FOLDER),
        time=f"{time}; from the program's start, so that waiting for nodes does not count",
    )
    apply = _kubectl(request.options, "apply", "--filename", "jobset.yaml")
    submit = [
        *upload_steps(request),
        (
            "Credentials of the cluster, into kubectl's own file.",
            _cluster(request.options, "clusters", "get-credentials"),
        ),
        ("Creates the job set, or says that it is there as it is.", apply),
    ]
    return {
        "recipe.yaml": request.recipe_text,
        "jobset.yaml": job_set,
        "submit.sh": render_commands(submit, heading=heading),
    }


def _on_hosts_network(request: LaunchRequest) -> bool:
    return request.machine.chip.kind == "tpu" and request.machine.hosts > 1


def _nodes(request: LaunchRequest) -> dict[str, str | WithReason]:
    """The labels of the nodes that the pods need."""
    machine, chip = request.machine, request.machine.chip
    spot: dict[str, str | WithReason] = {"cloud.google.com/gke-spot": "true"} if request.options.spot else {}
    if chip.kind == "gpu":
        return {"cloud.google.com/gke-accelerator": GPUS[chip.name], **spot}
    chips, hosts = machine.chips // machine.slices, machine.hosts // machine.slices
    said = f"{chips} chip{'s' * (chips > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return {
        "cloud.google.com/gke-tpu-accelerator": TPUS[chip.name],
        "cloud.google.com/gke-tpu-topology": WithReason(TOPOLOGIES[chip.name][chips], said),
        **spot,
    }


def preflight(request: LaunchRequest) -> list[PreflightCheck]:
    options = request.options
    manifest = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"
    nodes = ",".join(
        f"{key}={value.value if isinstance(value, WithReason) else value}" for key, value in _nodes(request).items()
    )
    on_hosts = _on_hosts_network(request)
    return [
        *first_checks(request, apis=("container.googleapis.com", "storage.googleapis.com")),
        PreflightCheck(
            name="kubectl is here", command=("kubectl", "version", "--client"), remedy="install it with gcloud's"
        ),
        PreflightCheck(
            name=f"cluster {options.cluster}",
            command=_kubectl(options, "get", "namespace", "default"),
            remedy=" ".join(_cluster(options, "clusters", "get-credentials")),
        ),
        PreflightCheck(
            name="JobSet is installed there",
            command=_kubectl(options, "get", "crd", "jobsets.jobset.x-k8s.io"),
            remedy=f"kubectl apply --server-side --filename {manifest}",
        ),
        PreflightCheck(
            name=f"a node with {nodes}",
            command=_kubectl(options, "get", "nodes", "--selector", nodes, "--output", "name"),
            remedy="fine where a pool scales up from none; else make a node pool of this kind",
            complaint=lambda output: None if output.strip() else "there is none now",
            needed=False,
        ),
        *common_checks(request, roles=image_roles(request) if on_hosts else ()),
        *([_node_account_check(options)] if on_hosts else _identity_checks(options)),
        *_checks_in_cluster(request),
    ]


def _identity_checks(options: ChosenOptions) -> list[PreflightCheck]:
    """Both halves of Workload Identity: who the Kubernetes service account is to be, and that it may."""
    account, role, key = options.service_account, "roles/iam.workloadIdentityUser", "iam.gke.io/gcp-service-account"
    member = f"serviceAccount:{options.project}.svc.id.goog[default/{ACCOUNT}]"
    kubectl, escaped = shlex.join(_kubectl(options)), key.replace(".", "\\.")
    return [
        PreflightCheck(
            name=f"Kubernetes service account {ACCOUNT} is {account}",
            command=_kubectl(
                options, "get", "serviceaccount", ACCOUNT, f"--output=jsonpath={{.metadata.annotations.{escaped}}}"
            ),
            remedy=f"{kubectl} create serviceaccount {ACCOUNT}; "
            f"{kubectl} annotate serviceaccount {ACCOUNT} {key}={account} --overwrite",
            complaint=lambda output: None if output.strip() == account else f"it is {output.strip() or 'nobody'} there",
        ),
        role_check(("iam", "service-accounts"), account, role, member, where=("--project", options.project)),
    ]


def _node_account_check(options: ChosenOptions) -> PreflightCheck:
    """That there are nodes of the request's account, whose pods on the host's network are it."""
    account = options.service_account
    pools = "nodePools[].config.serviceAccount,autoscaling.autoprovisioningNodePoolDefaults.serviceAccount"
    make = ("gcloud", "container", "node-pools", "create", options.name, "--cluster", options.cluster or "")
    return PreflightCheck(
        name=f"nodes of {options.cluster} run as {account}",
        command=(*_cluster(options, "clusters", "describe"), f"--format=value({pools})"),
        remedy=f"{' '.join((*make, *_where(options)))} --service-account {account} --scopes cloud-platform, with the "
        "slice's type, topology and nodes",
        complaint=lambda output: None if account in re.split(r"[;\s]+", output) else "none of its node pools does",
    )


def _checks_in_cluster(request: LaunchRequest) -> list[PreflightCheck]:
    options = request.options
    job_set = _kubectl(options, "get", "jobset", options.name, "--ignore-not-found", "--output", "name")
    checks = [name_check(request, "job set", job_set)]
    if options.queue is not None:
        checks.append(
            PreflightCheck(
                name=f"Kueue's local queue {options.queue}",
                command=_kubectl(options, "get", "localqueue", options.queue),
                remedy="name another with --queue, or leave it out",
            )
        )
    if options.secret is not None:
        create = f"kubectl create secret generic {options.secret} --from-file=token=FILE"
        checks.append(
            PreflightCheck(
                name=f"secret {options.secret} in the cluster, the Hugging Face token",
                command=_kubectl(options, "get", "secret", options.secret),
                remedy=f"{create}, or name another",
            )
        )
    return checks


def status(record: LaunchRecord) -> Command:
    return _kubectl(record, "get", "jobset,pods", "--selector", f"{LABEL}={record.name}", "--output", "wide")


def logs(record: LaunchRecord) -> Command:
    ours = ("--selector", f"{LABEL}={record.name}")
    return _kubectl(record, "logs", *ours, "--tail=-1", "--prefix", "--max-log-requests=64")


def running(record: LaunchRecord) -> tuple[Resource, ...]:
    return (
        Resource(
            kind="job set",
            list=_kubectl(record, "get", "jobset", "--selector", f"{LABEL}={record.name}", "--output", "name"),
            remove=_kubectl(record, "delete", "{}", "--wait=true"),
        ),
    )


created = running


def _where(options: ChosenOptions) -> Command:
    place = ("--zone", options.zone) if options.zone else ("--region", options.region)
    return (*place, "--project", options.project)


def _cluster(options: ChosenOptions, *words: str) -> Command:
    return ("gcloud", "container", *words, options.cluster or "", *_where(options))


def _kubectl(options: ChosenOptions, *words: str) -> Command:
    """Kubectl for this cluster, whichever is the current one; the context's name is the one that gcloud gives it."""
    place = options.zone or options.region
    return ("kubectl", "--context", f"gke_{options.project}_{place}_{options.cluster}", *words)
