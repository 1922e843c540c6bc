"""Kept bodies against the types of Google's clients, and job sets against schemas of Kubernetes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

GOLDEN = Path(__file__).parent / "golden"
PACKAGES = (
    "google-cloud-aiplatform==2.7.0",
    "google-cloud-run==0.16.2",
    "google-cloud-tpu==1.28.0",
    "kubernetes-validate==1.37.0",
)
# A field that a type does not have is an error of from_json.
CHECK = """
import json, sys
from google.cloud import run_v2, tpu_v2
from google.cloud.aiplatform_v1 import types as aiplatform_v1
import kubernetes_validate
for kind, document in json.load(sys.stdin):
    if kind == "k8s":
        kubernetes_validate.validate(document, "1.32", strict=True)
    else:
        module, name = kind.split(".")
        types = {"aiplatform_v1": aiplatform_v1, "run_v2": run_v2, "tpu_v2": tpu_v2}[module]
        getattr(types, name).from_json(json.dumps(document))
    print(kind)
"""
_RUN = "run.googleapis.com/"


def revision_template(template: dict) -> dict:
    """Cloud Run's v1 annotations and pod as fields of v2, of jobs and services alike."""
    annotations, pod = template["annotations"], template["pod"]
    generations = {"gen2": "EXECUTION_ENVIRONMENT_GEN2"}
    found = {
        "serviceAccount": pod.get("serviceAccountName"),
        "executionEnvironment": generations[annotations[f"{_RUN}execution-environment"]],
        "nodeSelector": {"accelerator": pod["nodeSelector"][f"{_RUN}accelerator"]},
        "gpuZonalRedundancyDisabled": annotations[f"{_RUN}gpu-zonal-redundancy-disabled"] == "true",
        "volumes": [volume_of(volume) for volume in pod.get("volumes", [])],
        "containers": [container_of(container) for container in pod["containers"]],
    }
    if interfaces := annotations.get(f"{_RUN}network-interfaces"):
        egress = {"all-traffic": "ALL_TRAFFIC"}[annotations[f"{_RUN}vpc-access-egress"]]
        found["vpcAccess"] = {"egress": egress, "networkInterfaces": json.loads(interfaces)}
    return found


def volume_of(volume: dict) -> dict:
    source = volume["csi"]
    given = source["volumeAttributes"]
    options = {"mountOptions": given["mountOptions"].split(",")} if "mountOptions" in given else {}
    return {"name": volume["name"], "gcs": {"bucket": given["bucketName"], "readOnly": source["readOnly"], **options}}


def container_of(container: dict) -> dict:
    found = dict(container)
    found["env"] = [
        {"name": item["name"], "valueSource": {"secretKeyRef": secret_of(item["valueFrom"]["secretKeyRef"])}}
        if "valueFrom" in item
        else item
        for item in found.get("env", [])
    ]
    if "startupProbe" in found:
        found["startupProbe"] = dict(found["startupProbe"])
    return found


def secret_of(reference: dict) -> dict:
    return {"secret": reference["name"], "version": reference["key"]}


def job_of(body: dict) -> dict:
    template = body["spec"]["template"]
    execution, task = template["spec"], template["spec"]["template"]["spec"]
    revision = revision_template({"annotations": template["metadata"]["annotations"], "pod": task})
    return {
        "labels": body["metadata"]["labels"],
        "launchStage": body["metadata"]["annotations"][f"{_RUN}launch-stage"],
        "template": {
            "labels": template["metadata"]["labels"],
            "taskCount": execution["taskCount"],
            "parallelism": execution["parallelism"],
            "template": revision | {"timeout": f"{task['timeoutSeconds']}s", "maxRetries": task["maxRetries"]},
        },
    }


def service_of(body: dict) -> dict:
    template = body["spec"]["template"]
    annotations, pod = template["metadata"]["annotations"], template["spec"]
    scale = {kind: int(annotations[f"autoscaling.knative.dev/{kind}Scale"]) for kind in ("min", "max")}
    ingress = {"all": "INGRESS_TRAFFIC_ALL"}
    return {
        "labels": body["metadata"]["labels"],
        "launchStage": body["metadata"]["annotations"][f"{_RUN}launch-stage"],
        "ingress": ingress[body["metadata"]["annotations"][f"{_RUN}ingress"]],
        "template": revision_template({"annotations": annotations, "pod": pod})
        | {
            "labels": template["metadata"]["labels"],
            "scaling": {"minInstanceCount": scale["min"], "maxInstanceCount": scale["max"]},
            "timeout": f"{pod['timeoutSeconds']}s",
            "maxInstanceRequestConcurrency": pod["containerConcurrency"],
        },
    }


def kept_bodies():
    """Kind and document of everything that is kept."""
    for file in sorted((GOLDEN / "bodies").rglob("*.json")):
        for sent in json.loads(file.read_text()):
            if "queuedResources" in sent["path"]:
                yield "tpu_v2.QueuedResource", sent["body"]
            elif sent["path"].endswith("/jobs"):
                yield "run_v2.Job", job_of(sent["body"])
            elif sent["path"].endswith("/services"):
                yield "run_v2.Service", service_of(sent["body"])
    yield "run_v2.Service", service_of(yaml.safe_load((GOLDEN / "cloud-run" / "stream" / "service.yaml").read_text()))
    yield "aiplatform_v1.Model", json.loads((GOLDEN / "vertex.json").read_text())
    for file in sorted((GOLDEN / "gke").rglob("jobset.yaml")):
        for replicated in yaml.safe_load(file.read_text())["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "slice"}, **replicated["template"]}
            yield "k8s", job
    for file in sorted((GOLDEN / "gke").rglob("service.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            if document["kind"] != "PodMonitoring":  # which is Google's own
                yield "k8s", document


def test_bodies_of_every_kind_are_kept():
    kinds = [kind for kind, _ in kept_bodies()]
    assert {kind: kinds.count(kind) for kind in sorted({*kinds})} == {
        "aiplatform_v1.Model": 1,
        "k8s": 11,
        "run_v2.Job": 7,
        "run_v2.Service": 6,
        "tpu_v2.QueuedResource": 6,
    }


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with the packages."""
    folder = tmp_path_factory.mktemp("types") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check", "install", *PACKAGES]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("pip reaches no package index here")
    return command[0]


def checked(python, documents):
    return subprocess.run(
        [python, "-c", CHECK], input=json.dumps(documents), capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.install
def test_the_types_of_google_and_kubernetes_have_every_field(python):
    documents = list(kept_bodies())
    done = checked(python, documents)
    assert done.returncode == 0 and len(done.stdout.split()) == len(documents), done.stderr


@pytest.mark.install
@pytest.mark.parametrize("kind", ["run_v2.Job", "tpu_v2.QueuedResource", "k8s"])
def test_a_field_that_a_type_does_not_have_is_found(python, kind):
    document = next(document for found, document in kept_bodies() if found == kind)
    text = json.dumps(document)
    known = {"run_v2.Job": "maxRetries", "tpu_v2.QueuedResource": "acceleratorType", "k8s": "backoffLimit"}[kind]
    done = checked(python, [(kind, json.loads(re.sub(f'"{known}"', f'"{known}s"', text)))])
    assert done.returncode and f"{known}s" in done.stderr
