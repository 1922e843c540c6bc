"""What is uploaded, said and run, and which objects a real gcloud writes when it runs the uploads of submit.sh."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gemsmith.launch.providers import TARGETS
from gemsmith.launch.submit import print_files
from gemsmith.launch.upload import GB, cost_lines, disk_bytes, format_footprint, upload_steps, worker_command

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def storage(tmp_path):
    """The environment of a gcloud whose buckets are empty and here, and the objects that it tried to write."""
    written = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            last = self.path.partition("?")[0].rpartition("/")[2]
            known = {"o": {"items": []}, "storageLayout": {"bucket": "runs", "location": "US-CENTRAL1"}}
            self.answer(200 if last in known else 404, known.get(last, {"error": {"code": 404, "message": "none"}}))

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bucket, name = re.search(r"/b/([^/]+)/o", self.path)[1], re.search(rb'"name": "([^"]+)"', body)[1]
            written.append(f"gs://{bucket}/{name.decode()}")
            # Refused, so that gcloud does not ask for what it wrote.
            self.answer(403, {"error": {"code": 403, "message": "seen"}})

        def answer(self, code, content):
            text = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield (
        {
            "CLOUDSDK_CONFIG": str(tmp_path / "config"),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_PROJECT": "demo-project",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": (f"http://127.0.0.1:{server.server_address[1]}/storage/v1/"),
        },
        written,
    )
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_a_real_gcloud_puts_every_file_where_the_machine_looks_for_it(shipped, storage, tmp_path):
    environment, written = storage
    folder = tmp_path / "out"
    print_files(shipped("cloud-run", "demo_images"), TARGETS["cloud-run"], folder)
    for line in (folder / "submit.sh").read_text().splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["gemsmith"]:
            subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
        if words[:2] == ["gcloud", "storage"]:
            subprocess.run(words, cwd=folder, env=os.environ | environment, check=False, timeout=120)
    root = "gs://runs/team/demo-images/launched"
    base = [path.relative_to(RECIPES) for path in (RECIPES / "demo_images_base").iterdir() if path.is_file()]
    packed = [f"{key}/{name}" for key in ("data-train", "data-eval") for name in ("00000.tar", "files.sha256")]
    assert {*written} == {
        f"{root}/recipe.yaml",
        *(f"{root}/inputs/checkpoint/{path}" for path in base),
        *(f"{root}/images/{path}" for path in packed),
    }


def test_the_recipe_is_uploaded_after_what_it_reads(launched, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    commands = [command for _, command in upload_steps(launched(overrides=("data.train=rows.jsonl",)))]
    assert commands[0][-2:] == (str(tmp_path / "rows.jsonl"), "gs://runs/team/big/launched/inputs/data-train/")
    assert commands[-1][-2:] == ("recipe.yaml", "gs://runs/team/big/launched/")


def test_the_greatest_bill_is_told_with_how_it_comes_about(launched):
    request = launched(timeout_hours=2, retries=1)
    assert "At most 16.48 USD for the machine: 2 h x 2 attempts" in cost_lines(request)[-1]
    assert "Estimated: " in cost_lines(request)[1]


def test_hours_of_training_are_not_told_of_a_launch_without_it(launched):
    assert cost_lines(launched(stages="plan,data"))[1] == "Not estimated: training is not among the stages."


def test_the_machine_gets_its_stages(launched):
    assert worker_command(launched(stages="data,train"), folder="/x")[-3:] == ("/x/big", "--stages", "data,train")


def test_merged_weights_and_saved_steps_are_what_a_large_model_holds(launched):
    held = disk_bytes(launched(stages="plan,data,train,export"))
    assert 61 < held["merged weights"] / GB < 66 and 20 < held["saved steps"] / GB < 25
    assert "merged weights" not in disk_bytes(launched(stages="plan,data,train"))
    assert "merged weights 63" in format_footprint(held)
    held_out = "data.eval={task: verilog, rows: 9, split: held-out}"
    best = launched(overrides=("train.keep=best", "train.eval_steps=50", held_out), stages="plan,data,train")
    assert disk_bytes(best)["saved steps"] == held["saved steps"] * 5 / 4


def test_a_base_in_a_mounted_bucket_is_not_copied(launched):
    assert "the base" not in disk_bytes(launched())
    assert "the base" in disk_bytes(launched("tpu-vm"))
    assert "the base" in disk_bytes(launched(overrides=("checkpoint=google/gemma-4-31B-it",), stages="plan,data,train"))
