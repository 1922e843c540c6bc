"""Kubernetes on Google's cloud: a JobSet for TPU slices and for GPUs, and the tuned model as a Deployment of vLLM.

The cluster and its node pools are the user's: nothing here makes them, and a pool that keeps its nodes goes on costing
money when the job has ended. In the pods of a JobSet, GKE sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES of their slice
and, where there are several, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, by which JAX
finds all hosts; so none of them is rendered here.

Pods on their node's network get no Workload Identity and run as the node's account
(github.com/apple/axlearn/issues/641): only those of several hosts are on it.
"""

from contextlib import suppress
from typing import Any

from gemsmith.errors import InputError, MachineError
from gemsmith.hardware import Machine, find_machine, load_catalog
from gemsmith.launch.commands import values_of
from gemsmith.launch.provider import Feature, LaunchRequest, WithReason
from gemsmith.launch.render import make_service, render_files, render_template
from gemsmith.launch.request import find_price, is_googles
from gemsmith.launch.upload import describe_slice, disk_bytes, format_footprint, timed_command
from gemsmith.plan.serving import WARM_UP_S

FEATURES: frozenset[Feature] = frozenset({"serves"})
FOLDER = "/dev/shm/gemsmith"
ACCOUNT = "gemsmith"  # the Kubernetes service account, tied to the request's by Workload Identity
TPUS = {"v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"}
TOPOLOGIES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"},
    "tpu7x": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4"},
}
"""Chip -> chips of a slice -> its shape."""
GPUS = {"rtx-pro-6000": "nvidia-rtx-pro-6000", "h100": "nvidia-h100-80gb"}
NEW_NODE_S = 1800  # for a node to come and to pull the image; assumed


def gives(machine: Machine) -> bool:
    if machine.chip.kind == "gpu":
        return machine.chip.name in GPUS and not machine.name.startswith("cloud-run") and is_googles(machine)
    # Several slices join only from node pools of several hosts: cloud.google.com/kubernetes-engine/docs/how-to/
    # tpu-multislice, read 2026-11-23.
    joined = machine.slices == 1 or machine.hosts > machine.slices
    return joined and machine.chips // machine.slices in TOPOLOGIES.get(machine.chip.name, {})


def check(request: LaunchRequest) -> None:
    """Raises InputError without a cluster, or for a service that the machine cannot have."""
    if request.options.cluster is None:
        needed = "the name of a cluster of yours, in --region or --zone"
        raise InputError(f"--cluster: is missing; --provider gke needs {needed}")
    if request.options.serve_machine is not None:
        try:
            make_service(request, server_machine(request))
        except MachineError as error:
            raise MachineError(str(error).replace("--machine", "--serve-machine", 1)) from None


def server_machine(request: LaunchRequest) -> Machine:
    """The machine of a server. Raises InputError for one that is not known, or that no single pod has."""
    catalog = load_catalog(request.recipe.hardware.catalog)
    machine = find_machine(catalog, request.options.serve_machine or "", "--serve-machine")
    if machine.hosts > 1 or not gives(machine):
        has = [each.name for each in catalog.machines.values() if each.hosts == 1 and gives(each)]
        raise InputError(f"--serve-machine {machine.name}: on Kubernetes a server has one host, of {', '.join(has)}")
    return machine


def render(request: LaunchRequest) -> dict[str, str]:
    known = values(request)
    job_set = render_template(
        "jobset.yaml",
        request,
        on_hosts_network=known["on_hosts_network"],
        nodes=_nodes(request.machine, spot=request.options.spot),
        account=ACCOUNT,
        held=format_footprint(disk_bytes(request)),
        folder=FOLDER,
        command=timed_command(request, folder=FOLDER),
        time=f"{request.bill.timeout_s.reason}; from the program's start, so that waiting for nodes does not count",
    )
    service = render_service(request) if request.options.serve_machine is not None else None
    return render_files(request, "gke", known, {"jobset.yaml": job_set}, service)


def render_service(request: LaunchRequest) -> str:
    """The Deployment of vLLM, the Service before it and, for several servers, what counts and scales them."""
    options, machine = request.options, server_machine(request)
    service, most, is_tpu = make_service(request, machine), options.max_replicas or 1, machine.chip.kind == "tpu"
    price = "what it costs there is not in the catalog"
    with suppress(InputError):
        rate = find_price(machine, options.region, spot=False).rate(spot=False) or 0.0
        price = f"{rate:.2f} USD/h a server, at most {most * rate:.2f} USD/h"
    start_s = 10 * service.probes + int(WARM_UP_S["tpu"][1]) * is_tpu
    return render_template(
        "deployment.yaml",
        request,
        kubectl=f"kubectl --context {values_of(options)['context']}",
        price=price,
        service=service,
        server=f"{options.name}-server",
        machine=machine,
        is_tpu=is_tpu,
        most=most,
        nodes=_nodes(machine, spot=False),
        account=ACCOUNT,
        start=WithReason(-(-start_s // 10), f"{start_s // 60} min for weights and compilation, at most"),
        progress_s=start_s + NEW_NODE_S,
    )


def _nodes(machine: Machine, *, spot: bool) -> dict[str, str | WithReason]:
    """The labels of the nodes that pods need."""
    chip, taken_back = machine.chip, dict[str, str | WithReason]({"cloud.google.com/gke-spot": "true"} if spot else {})
    if chip.kind == "gpu":
        return {"cloud.google.com/gke-accelerator": GPUS[chip.name], **taken_back}
    topology = TOPOLOGIES[chip.name][machine.chips // machine.slices]
    return {
        "cloud.google.com/gke-tpu-accelerator": TPUS[chip.name],
        "cloud.google.com/gke-tpu-topology": WithReason(topology, describe_slice(machine)),
        **taken_back,
    }


def selector(nodes: dict[str, str | WithReason]) -> str:
    """The labels as kubectl takes them."""
    return ",".join(f"{key}={value.value if isinstance(value, WithReason) else value}" for key, value in nodes.items())


def values(request: LaunchRequest) -> dict[str, Any]:
    """Both halves of Workload Identity are checked: who the Kubernetes service account is to be, and that it may."""
    options, machine, serves = request.options, request.machine, request.options.serve_machine is not None
    on_hosts_network = machine.chip.kind == "tpu" and machine.hosts > 1
    return {
        "api": "container.googleapis.com",
        "server": f"{options.name}-server",
        "nodes": selector(_nodes(machine, spot=options.spot)),
        "server_nodes": selector(_nodes(server_machine(request), spot=False)) if serves else None,
        "on_hosts_network": on_hosts_network,
        "account_pulls": on_hosts_network,
        "kubernetes_account": None if on_hosts_network and not serves else ACCOUNT,
    }
