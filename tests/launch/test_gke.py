import json

import pytest
import yaml

from gemsmith.errors import InputError
from gemsmith.launch.commands import follow_command, preflight, resources
from gemsmith.launch.providers import gke

CLUSTER = {"cluster": "c1", "region": "us-east5"}


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
    return [check.name for check in preflight(request, "gke", gke)]


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
    (check,) = [check for check in preflight(several, "gke", gke) if check.name.startswith("nodes of")]
    assert check.complaint("default;other@p.iam.gserviceaccount.com\t\n") == "none of its node pools does"
    assert check.complaint(f"default;{several.options.service_account}\tdefault\n") is None
    assert "--scopes cloud-platform" in check.remedy


MEMBER = "serviceAccount:demo-project.svc.id.goog[default/gemsmith]"


def test_both_halves_of_workload_identity_and_the_role_on_the_bucket_are_checked(launched):
    request = launched("gke", machine="v5p-8", **CLUSTER)
    checks = {check.name: check for check in preflight(request, "gke", gke)}
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


def test_a_cluster_is_needed(launched):
    with pytest.raises(InputError, match="--cluster: is missing"):
        launched("gke", machine="v5p-8")


def test_commands_go_to_the_launch_s_cluster_whichever_is_current(launched, launch_record):
    record = launch_record.model_copy(update={"target": "gke", "cluster": "c1", "region": "us-east5"})
    (resource,) = resources(record, "created")
    for command in (resource.list, resource.remove, follow_command(record, "status"), follow_command(record, "logs")):
        assert command[:3] == ("kubectl", "--context", "gke_p_us-east5_c1")
    assert "gemsmith-run=big" in resource.list
