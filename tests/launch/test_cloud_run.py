import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from gemsmith.launch import cloud_run
from gemsmith.launch.submit import print_files


def test_weights_are_mounted_read_only_and_results_are_not(launched):
    task = yaml.safe_load(cloud_run.render(launched())["job.yaml"])["spec"]["template"]["spec"]["template"]["spec"]
    (volume,) = task["volumes"]
    assert volume["csi"]["readOnly"] is True and volume["csi"]["volumeAttributes"] == {"bucketName": "weights"}
    assert task["timeoutSeconds"] == str(launched().bill.timeout_s.value) and task["maxRetries"] == 3
    assert task["containers"][0]["args"][2] == "gs://runs/team/big"


def test_a_hub_base_needs_its_token_and_no_mount(launched):
    hub = ("checkpoint=google/gemma-4-31B-it",)
    request = launched(overrides=hub, stages="plan,data,train", machine="cloud-run-44")
    text = cloud_run.render(request)["job.yaml"]
    assert "secretKeyRef" in text and "volumes" not in text


def test_the_service_waits_for_the_weights_and_costs_nothing_unasked(launched):
    service = yaml.safe_load(cloud_run.render(launched())["service.yaml"])["spec"]["template"]
    assert service["metadata"]["annotations"]["autoscaling.knative.dev/minScale"] == "0"
    probe = service["spec"]["containers"][0]["startupProbe"]
    # 62 GB at 1 Gbit/s are 8 minutes and more.
    assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * 8 * 60
    assert "--model=/mnt/weights/team/big/run/merged" in service["spec"]["containers"][0]["args"]


def test_without_export_there_is_nothing_to_serve(launched):
    assert "service.yaml" not in cloud_run.render(launched(stages="plan,data,train"))


def test_a_timeout_that_may_be_refused_is_said_so(launched):
    assert "may be refused with a GPU" in cloud_run.render(launched(timeout_hours=20))["job.yaml"]
    assert "may be refused" not in cloud_run.render(launched(timeout_hours=12))["job.yaml"]


def test_direct_vpc_is_rendered_as_the_annotation_that_cloud_run_reads(launched):
    job = yaml.safe_load(cloud_run.render(launched(network="n", subnet="s"))["job.yaml"])
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    interfaces = json.loads(annotations["run.googleapis.com/network-interfaces"])
    assert interfaces == [{"network": "n", "subnetwork": "s"}]


def test_clean_removes_the_job_and_the_service_by_their_label(launch_record):
    kinds = {resource.kind: resource for resource in cloud_run.created(launch_record)}
    assert kinds.keys() == {"execution", "service", "job"}
    assert "--filter=metadata.labels.gemsmith-run=big" in kinds["job"].list
    assert {resource.kind for resource in cloud_run.running(launch_record)} == {"execution", "service"}


GCLOUD = {
    "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN": "http://run.test/",
}


@pytest.fixture
def loopback():
    """The bodies that a real gcloud posts, and the address that it must be sent to."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(404, b'{"error": {"code": 404, "message": "not there", "status": "NOT_FOUND"}}')

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, json.loads(body)))
            # Refused, so that gcloud does not wait for what it created.
            self.answer(403, b'{"error": {"code": 403, "message": "seen", "status": "PERMISSION_DENIED"}}')

        def answer(self, code, content):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize(("kind", "file"), [("jobs", "job.yaml"), ("services", "service.yaml")])
def test_a_real_gcloud_takes_the_rendered_file_as_it_is(launched, loopback, tmp_path, kind, file):
    address, bodies = loopback
    print_files(launched(network="n", subnet="s"), cloud_run, tmp_path / "out")
    place = ("--project", "demo", "--region", "us-central1")
    done = subprocess.run(
        ["gcloud", "run", kind, "replace", str(tmp_path / "out" / file), *place],
        env=os.environ | GCLOUD | {"CLOUDSDK_CONFIG": str(tmp_path / "config"), "http_proxy": address},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert b"seen" in done.stderr, done.stderr
    ((path, body),) = bodies
    assert path.partition("?")[0].endswith(f"/namespaces/demo/{kind}")
    rendered = yaml.safe_load((tmp_path / "out" / file).read_text())
    sent = body["spec"]["template"]["spec"]
    assert sent["template"]["spec"] if kind == "jobs" else sent
    assert without_gclouds_own(body["spec"]) == rendered["spec"]


def without_gclouds_own(value):
    if isinstance(value, dict):
        return {
            key: without_gclouds_own(item)
            for key, item in value.items()
            if not key.startswith("run.googleapis.com/client-")
        }
    return [without_gclouds_own(item) for item in value] if isinstance(value, list) else value
