"""What APIs are sent: bodies that a real gcloud made of rendered files and commands, kept in golden/bodies."""

import json
import os
import shlex
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from gemsmith import __version__
from gemsmith.launch.providers import TARGETS
from gemsmith.launch.submit import print_files

from .conftest import FOUR_TASKS

GOLDEN = Path(__file__).parent / "golden" / "bodies"
RECIPES = ("demo", "demo_images", "own", "pets_31b", "verilog_31b", "options")
CASES = [(on, recipe) for on in ("cloud-run", "tpu-vm") for recipe in RECIPES] + [("cloud-run", "predict")]
OPTIONS = {
    "cloud-run": {
        "network": "n",
        "subnet": "s",
        "stages": "plan,data,train",
        "machine": "cloud-run-44",
        "secret": "hf-token",
    },
    "tpu-vm": {"network": "n", "subnet": "s", "spot": True, "secret": "hf-token"},
}
HUB = ("checkpoint=google/gemma-4-31B-it",)
GCLOUD = {
    "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
    "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
    "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_RUN": "http://run.test/",
}


@pytest.fixture
def printed(launched, shipped, tmp_path):
    """Returns the folder with the rendered files of a case."""

    def make(on: str, recipe: str) -> Path:
        if recipe == "options":
            request = launched(on, overrides=HUB, timeout_hours=12, **OPTIONS[on])
        else:
            request = shipped(on, "pets_31b", **FOUR_TASKS) if recipe == "predict" else shipped(on, recipe)
        print_files(request, TARGETS[on], tmp_path / "out")
        return tmp_path / "out"

    return make


def commands(folder: Path) -> list[list[str]]:
    """Those of the rendered scripts that create something, copies to the bucket aside."""
    scripts = [folder / name for name in ("submit.sh", "serve.sh") if (folder / name).exists()]
    lines = [shlex.split(line, comments=True) for script in scripts for line in script.read_text().splitlines()]
    return [words for words in lines if words[:1] == ["gcloud"] and words[1] != "storage"]


def body_of(command: list[str], folder: Path) -> dict:
    """What a command sends, by what its flags and files mean."""
    words, flags = split_command(command)
    verb, project = " ".join(words[1:4]), flags["--project"]
    if verb == "compute tpus queued-resources":
        return queued_resource(words[5], flags)
    kind = words[2]
    api = {"jobs": "run.googleapis.com", "services": "serving.knative.dev"}[kind]
    path = f"/apis/{api}/v1/namespaces/{project}/{kind}"
    if words[3] == "execute":
        return {"path": f"{path}/{words[4]}:run", "body": {}}
    body = yaml.safe_load((folder / words[4]).read_text())
    body["metadata"]["namespace"] = project
    return {"path": path, "body": body}


def split_command(command: list[str]) -> tuple[list[str], dict[str, str]]:
    alone, flags, words = {"--quiet", "--async", "--spot"}, {}, []
    left = iter(command)
    for word in left:
        if not word.startswith("--"):
            words.append(word)
        else:
            flags[word] = "" if word in alone else next(left)
    return words, flags


def queued_resource(name: str, flags: dict[str, str]) -> dict:
    parent = f"projects/{flags['--project']}/locations/{flags['--zone']}"
    label, _, value = flags["--labels"].partition("=")
    network = {"network": flags.get("--network", "default")}
    network |= {"subnetwork": flags["--subnetwork"]} if "--subnetwork" in flags else {}
    node = {
        "acceleratorType": flags["--accelerator-type"],
        "runtimeVersion": flags["--runtime-version"],
        "labels": {label: value},
        "metadata": {"startup-script": flags["--metadata-from-file"].removeprefix("startup-script=")},
        "networkConfig": {"enableExternalIps": True, **network},
        "serviceAccount": {"email": flags["--service-account"], "scope": [flags["--scopes"]]},
    }
    hours = int(flags["--valid-until-duration"].removesuffix("h"))
    body = {
        "queueingPolicy": {"validUntilDuration": f"{hours * 3600}s"},
        "tpu": {"nodeSpec": [{"node": node, "nodeId": flags["--node-id"], "parent": parent}]},
    }
    spot = {"spot": {}} if "--spot" in flags else {}
    return {"path": f"/v2/{parent}/queuedResources?queuedResourceId={name}", "body": body | spot}


@pytest.mark.parametrize(("on", "recipe"), CASES)
def test_what_is_rendered_means_what_gcloud_was_seen_to_send(printed, on, recipe):
    folder = printed(on, recipe)
    meant = [body_of(command, folder) for command in commands(folder)]
    kept = json.loads((GOLDEN / on / f"{recipe}.json").read_text())
    assert json.loads(without_versions(json.dumps(meant))) == kept and kept


@pytest.fixture
def loopback():
    """The bodies that a real gcloud posts, and the address that it must be sent to."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(404, b'{"error": {"code": 404, "message": "not there", "status": "NOT_FOUND"}}')

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path, _, query = self.path.removeprefix("http://us-central1-run.test").partition("?")
            names = {"queuedResourceId"}
            kept = [item for item in query.split("&") if item.partition("=")[0] in names]
            bodies.append({"path": "?".join([path, *kept]), "body": json.loads(body or b"{}")})
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
@pytest.mark.parametrize(("on", "recipe"), CASES)
def test_a_real_gcloud_takes_what_is_rendered_and_sends_what_is_kept(printed, loopback, tmp_path, on, recipe):
    """Wanted changes: delete the file, run this test twice, and read the difference."""
    address, bodies = loopback
    folder, file = printed(on, recipe), GOLDEN / on / f"{recipe}.json"
    ours = {"CLOUDSDK_CONFIG": str(tmp_path / "config"), "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{address}/"}
    ours |= {"http_proxy": address, "no_proxy": "127.0.0.1"}
    for command in commands(folder):
        seen = len(bodies)
        done = subprocess.run(
            command, cwd=folder, env=os.environ | GCLOUD | ours, capture_output=True, check=False, timeout=120
        )
        assert len(bodies) == seen + 1, f"{shlex.join(command)}: {done.stderr.decode()}"
    sent = json.dumps([without_gclouds_own(body) for body in bodies], indent=1) + "\n"
    if (folder / "startup.sh").exists():
        script = json.dumps((folder / "startup.sh").read_text())
        assert script in sent
        sent = sent.replace(script, '"startup.sh"')
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(without_versions(sent))
        pytest.fail(f"{file} was made; read it, and run the test again")
    assert without_versions(sent) == file.read_text()


def without_versions(text: str) -> str:
    return text.replace(__version__, "VERSION")


def without_gclouds_own(value):
    if isinstance(value, dict):
        ours = {key: item for key, item in value.items() if not key.startswith("run.googleapis.com/client-")}
        return {key: without_gclouds_own(item) for key, item in ours.items()}
    return [without_gclouds_own(item) for item in value] if isinstance(value, list) else value
