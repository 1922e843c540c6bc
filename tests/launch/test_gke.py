import json
import re
import subprocess

import pytest
import yaml

from gemsmith.errors import InputError
from gemsmith.launch.commands import follow_command, preflight, resources
from gemsmith.launch.providers import gke

CLUSTER = {"cluster": "c1", "region": "us-east5"}
V6E = {"cluster": "c1", "machine": "v6e-8", "overrides": ("train.global_batch_size=8",)}


def job_set(request):
    return yaml.safe_load(gke.render(request)["jobset.yaml"])


def pod_of(found):
    return found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_a_slice_is_asked_for_by_its_shape(launched):
    found = job_set(launched("gke", machine="v5p-8", **CLUSTER))
    pod = pod_of(found)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x1"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert found["metadata"]["labels"] == {"gemsmith-run": "big"}
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "activeDeadlineSeconds" not in job, "it counts while pods wait for nodes"
    (container,) = pod["containers"]
    seconds = str(launched("gke", machine="v5p-8", **CLUSTER).bill.timeout_s.value)
    ended = [
        "timeout",
        "--signal=TERM",
        "--kill-after=120",
        seconds,
        "gemsmith",
        "launch",
        "worker",
        "gs://runs/team/big",
    ]
    assert [*container["command"], *container["args"]][:8] == ended


TWO_HOSTS = """\
machines:
  v5p-16:
    {chip: v5p, chips: 8, hosts: 2, interconnect_bytes_per_s: 300.0e+9, source: mine, date: "2026", prices: [
      {provider: gcp, region: us-east5, usd_per_hour: 33.60, source: twice v5p-8, date: "2026"}]}
"""


def test_several_hosts_are_pods_that_start_again_together(launched, tmp_path):
    (tmp_path / "own.yaml").write_text(TWO_HOSTS)
    own = ("hardware.catalog=own.yaml", "train.global_batch_size=8")
    found = job_set(launched("gke", machine="v5p-16", overrides=own, **CLUSTER))
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    assert pod_of(found)["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 3


def names(request):
    return [check.name for check in preflight(request, "gke", gke.values(request))]


def test_only_pods_of_several_hosts_are_on_the_hosts_network_and_run_as_the_nodes_account(launched):
    one = launched("gke", machine="v6e-8", overrides=("train.global_batch_size=8",), cluster="c1")
    pod = pod_of(job_set(one))
    assert "hostNetwork" not in pod and "dnsPolicy" not in pod and pod["serviceAccountName"] == "gemsmith"
    several = launched("gke", machine="v6e-16", overrides=("train.global_batch_size=16",), cluster="c1")
    text = gke.render(several)["jobset.yaml"]
    assert (
        "hostNetwork: true  # hosts talk over it; so pods are their nodes' account, to be gemsmith@demo-project" in text
    )
    assert "serviceAccountName" not in pod_of(job_set(several))
    assert "nodes of c1 run as " + several.options.service_account in names(several)
    assert not [name for name in names(several) if "workloadIdentityUser" in name]
    (check,) = [check for check in preflight(several, "gke", gke.values(several)) if check.name.startswith("nodes of")]
    assert check.complaint("default;other@p.iam.gserviceaccount.com\t\n") == "none of its node pools does"
    assert check.complaint(f"default;{several.options.service_account}\tdefault\n") is None
    assert "--scopes cloud-platform" in check.remedy


MEMBER = "serviceAccount:demo-project.svc.id.goog[default/gemsmith]"


def test_both_halves_of_workload_identity_and_the_role_on_the_bucket_are_checked(launched):
    request = launched("gke", machine="v5p-8", **CLUSTER)
    checks = {check.name: check for check in preflight(request, "gke", gke.values(request))}
    account = "gemsmith@demo-project.iam.gserviceaccount.com"
    annotated = checks[f"Kubernetes service account gemsmith is {account}"]
    assert annotated.complaint(account) is None and annotated.complaint("") == "it is nobody there"
    assert (
        "create serviceaccount gemsmith; " in annotated.remedy and f"gcp-service-account={account}" in annotated.remedy
    )
    may = checks[f"roles/iam.workloadIdentityUser on {account}"]
    policy = {"bindings": [{"role": "roles/iam.workloadIdentityUser", "members": [MEMBER]}]}
    assert may.complaint(json.dumps(policy)) is None and may.complaint("{}") is not None
    assert f"--member '{MEMBER}'" in may.remedy
    assert f"service account {account}" in checks and "roles/storage.objectUser on gs://runs" in checks


def test_several_slices_are_jobs_of_one_job_set(launched):
    rows = ("train.global_batch_size=32",)
    one, two = (launched("gke", machine=name, overrides=rows, cluster="c1") for name in ("v6e-16", "2xv6e-16"))
    (alone,), (both,) = (job_set(request)["spec"]["replicatedJobs"] for request in (one, two))
    assert (alone["replicas"], both["replicas"]) == (1, 2)
    job = both["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (4, 4, 0), "a pod a host of one slice"
    pod = pod_of(job_set(two))
    assert pod["nodeSelector"] == pod_of(job_set(one))["nodeSelector"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert job_set(two)["metadata"]["annotations"] == exclusive, "no two slices of one node pool"
    assert two.bill.usd_per_hour == 2 * one.bill.usd_per_hour
    assert (
        two.plan.machines[0].mesh["replica"] == 2
        and two.recipe.train.checkpoint_folder == "gs://runs/team/big/checkpoints"
    )


def test_slices_of_the_recipe_are_taken_without_an_option(launched):
    own = ("train.global_batch_size=32", "hardware.machines=[2xv6e-16]")
    assert launched("gke", overrides=own, cluster="c1").machine.name == "2xv6e-16"


@pytest.mark.parametrize(("on", "machine"), [("gke", "2xv6e-8"), ("tpu-vm", "2xv6e-16"), ("sky", "2xv6e-8")])
def test_slices_that_a_target_cannot_join_are_refused_in_one_line(launched, on, machine):
    line = rf"^--machine {machine}: --provider {on} does not have it; several slices are launched by --provider gke"
    with pytest.raises(InputError, match=line) as error:
        launched(on, machine=machine)
    assert "\n" not in str(error.value)


def test_a_gpu_and_a_spot_node_are_asked_for_by_their_labels(launched):
    trl = ("train.backend=trl", "train.dtype=nf4")
    options = {"machine": "1xh100", "cluster": "c1", "region": "us-east4", "overrides": trl}
    pod = pod_of(job_set(launched("gke", spot=True, **options)))
    nodes = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb", "cloud.google.com/gke-spot": "true"}
    assert pod["nodeSelector"] == nodes and "hostNetwork" not in pod
    assert [item["key"] for item in pod["tolerations"]] == ["cloud.google.com/gke-spot"]
    driver = {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}
    assert driver in pod["containers"][0]["env"]


def test_kueue_gets_its_label_and_the_hub_its_token(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    request = launched("gke", machine="v5p-8", queue="team", overrides=hub, secret="hf-token", **CLUSTER)
    found = job_set(request)
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "secretKeyRef" in str(pod_of(found))
    asked = names(request)
    assert "Kueue's local queue team" in asked and "secret hf-token in the cluster, the Hugging Face token" in asked


def service_of(request):
    """The service's documents by kind, and its pod."""
    documents = {document["kind"]: document for document in yaml.safe_load_all(gke.render(request)["service.yaml"])}
    return documents, documents["Deployment"]["spec"]["template"]


def test_a_service_has_the_machine_s_node_and_all_its_chips(launched):
    for machine, chips, node in (("v6e-4", {"google.com/tpu": 4}, "2x2"), ("2xh100", {"nvidia.com/gpu": 2}, "h100")):
        documents, pod = service_of(launched("gke", serve_machine=machine, spot=True, **V6E))
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == chips
        assert node in str(pod["spec"]["nodeSelector"]) and "spot" not in str(pod), "a server is not taken away"
        assert documents.keys() == {"Deployment", "Service"} and documents["Deployment"]["spec"]["replicas"] == 1


def test_names_within_a_service_agree(launched):
    documents, pod = service_of(launched("gke", serve_machine="v6e-8", max_replicas=3, **V6E))
    labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    port, name = container["ports"][0]["name"], documents["Deployment"]["metadata"]["name"]
    for selector in (
        documents["Service"]["spec"]["selector"],
        documents["Deployment"]["spec"]["selector"]["matchLabels"],
        documents["PodMonitoring"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
        trained = job_set(launched("gke", **V6E))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        assert not selector.items() <= trained["metadata"]["labels"].items(), "the job's pods are no servers"
    assert {documents["Service"]["spec"]["ports"][0]["targetPort"], port} == {"http"}
    assert documents["PodMonitoring"]["spec"]["endpoints"][0]["port"] == port
    scaled = documents["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == name and (scaled["minReplicas"], scaled["maxReplicas"]) == (1, 3)
    assert "replicas" not in documents["Deployment"]["spec"], "an apply would undo what the autoscaler did"
    assert "vllm:num_requests_waiting" in scaled["metrics"][0]["pods"]["metric"]["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]} == {"shm", "xla", "weights"}
    assert {document["metadata"]["labels"]["gemsmith-run"] for document in documents.values()} == {"big"}


def test_a_server_has_time_for_the_weights_and_a_tpu_s_first_compilation(launched):
    tpu, gpu = (service_of(launched("gke", serve_machine=name, **V6E))[1]["spec"] for name in ("v6e-8", "2xh100"))
    waits = [pod["containers"][0]["startupProbe"] for pod in (tpu, gpu)]
    seconds = [probe["periodSeconds"] * probe["failureThreshold"] for probe in waits]
    assert seconds[1] > 2 * 8 * 60 and seconds[0] == seconds[1] + 600


KUBECTL = """#!/bin/sh
echo "$@" >>{log}
case "$*" in
*"get secret"*) exit {has_none} ;;
*"create secret"*) cat >{key} ;;
esac
"""


@pytest.mark.parametrize("has_none", [0, 1])
def test_serve_sh_makes_a_key_once_and_shows_it_to_nobody(launched, fake_tools, tmp_path, has_none):
    files, key, log = gke.render(launched("gke", serve_machine="v6e-8", **V6E)), tmp_path / "key", tmp_path / "log"
    (tmp_path / "tools" / "kubectl").write_text(KUBECTL.format(log=log, key=key, has_none=has_none))
    (tmp_path / "serve.sh").write_text(files["serve.sh"])
    done = subprocess.run(["bash", str(tmp_path / "serve.sh")], capture_output=True, text=True, check=True)
    asked = log.read_text().splitlines()
    assert key.exists() is bool(has_none) is any("create secret generic big-server" in line for line in asked)
    if has_none:
        assert re.fullmatch("[0-9a-f]{64}", key.read_text())
        assert key.read_text() not in done.stdout + done.stderr + log.read_text()
    assert asked[-2].endswith("label secret big-server gemsmith-run=big --overwrite")
    assert asked[-1].endswith("apply --filename service.yaml")
    (_, pod) = service_of(launched("gke", serve_machine="v6e-8", **V6E))
    secret = pod["spec"]["containers"][0]["env"][0]
    assert secret == {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "big-server", "key": "key"}}}


def test_stop_removes_servers_and_clean_what_belongs_to_them(launch_record):
    record = launch_record.model_copy(update={"target": "gke", "cluster": "c1"})
    scaled = record.model_copy(update={"serve_machine": "v6e-8", "max_replicas": 2})
    kinds = [[each.kind for each in resources(one, "created")] for one in (record, scaled)]
    assert kinds[0] == ["job set", "deployment", "service and what belongs to it"], "whoever ran serve.sh"
    assert kinds[1] == [*kinds[0], "monitoring of pods"], "which not every cluster knows"
    assert [each.kind for each in resources(scaled, "running")] == ["job set", "deployment"]


def test_what_a_service_needs_of_the_cluster_is_looked_for(launched):
    plain = names(launched("gke", **V6E))
    served = names(launched("gke", serve_machine="2xh100", load="stream", max_replicas=2, **V6E))
    more = [name for name in served if name not in plain]
    assert more == [
        "a node with cloud.google.com/gke-accelerator=nvidia-h100-80gb, for the service",
        "pods of c1 may mount buckets, for the service",
        "servers of c1 can be counted by what waits at them",
        "an adapter of custom metrics is in c1",
        "roles/storage.bucketViewer on gs://runs",
    ]
    several = {"machine": "v6e-16", "overrides": ("train.global_batch_size=16",), "cluster": "c1"}
    account = "Kubernetes service account gemsmith is gemsmith@demo-project.iam.gserviceaccount.com"
    assert account not in names(launched("gke", **several))
    assert account in names(launched("gke", serve_machine="v6e-8", **several)), "whose pod is not on its node's network"


def test_the_price_of_a_server_is_said(launched):
    text = gke.render(launched("gke", serve_machine="v6e-8", max_replicas=3, **V6E))["service.yaml"]
    head = text.partition("apiVersion")[0]
    assert "21.60 USD/h a server, at most 64.80 USD/h" in head
    assert "or: kubectl --context gke_demo-project_us-central1_c1 delete deployment big-server" in head


def test_a_cluster_is_needed(launched):
    with pytest.raises(InputError, match="--cluster: is missing"):
        launched("gke", machine="v5p-8")


def test_commands_go_to_the_launch_s_cluster_whichever_is_current(launched, launch_record):
    record = launch_record.model_copy(update={"target": "gke", "cluster": "c1", "region": "us-east5"})
    found = resources(record, "created")
    commands = [command for resource in found for command in (resource.list, resource.remove)]
    for command in (*commands, follow_command(record, "status"), follow_command(record, "logs")):
        assert command[:3] == ("kubectl", "--context", "gke_p_us-east5_c1")
    assert all("gemsmith-run=big" in resource.list for resource in found)
