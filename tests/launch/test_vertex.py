"""Merged weights go to a bucket, and a model that vLLM serves from there into Vertex AI's registry."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from gemsmith.launch import sync, vertex

IMAGE = "europe-west4-docker.pkg.dev/proj/hub/vllm/vllm-openai:v0.32.0"
TO = ("--to", "vertex:my-proj/europe-west4")
ON = ("--machine", "1xh100", "--set", f"serve.container_image={IMAGE}")
TOKEN = ("print-access-token", 0, "ya29.ours\n")
OPERATION = "projects/1/locations/europe-west4/models/2/operations/3"
MODEL = "projects/1/locations/europe-west4/models/2"


@dataclass
class Registry:
    """A stand-in of Vertex AI: a model is there when it has been asked for twice more."""

    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    refuses: dict | None = None

    has: list[dict] = field(default_factory=list)

    def answer(self) -> tuple[int, bytes]:
        if self.refuses is not None:
            return self.refuses["code"], json.dumps({"error": self.refuses}).encode()
        if "/models?" in self.asked[-1][1]:
            return 200, json.dumps({"models": self.has} if self.has else {}).encode()
        if len(self.asked) < 4:
            return 200, json.dumps({"name": OPERATION}).encode()
        return 200, json.dumps({"name": OPERATION, "done": True, "response": {"model": MODEL}}).encode()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    told = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            told.asked.append((self.command, self.path, self.headers.get("Authorization")))
            if body := self.rfile.read(int(self.headers.get("Content-Length") or 0)):
                told.bodies.append(json.loads(body))
            code, content = told.answer()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do  # noqa: N815 - as BaseHTTPRequestHandler looks them up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setattr(vertex, "API", f"http://127.0.0.1:{server.server_port}/v1/{{}}")
    monkeypatch.setattr(vertex, "_POLL_S", 0.0)
    yield told
    server.shutdown()
    server.server_close()


def printed(out: str) -> dict:
    return json.loads(out)["body"]["model"]


def test_what_is_sent_is_what_print_shows_and_the_weights_come_first(exported_run, gemsmith, fake_tools, registry):
    run, calls = exported_run(), fake_tools(TOKEN)
    code, shown, err = gemsmith("push", run.path, *TO, *ON, "--bucket", "gs://models/team/", "--print")
    assert (code, err) == (0, "") and not calls() and not registry.asked
    code, out, err = gemsmith("push", run.path, *TO, *ON, "--bucket", "gs://models/team/")
    assert (code, err, out) == (0, "", f"{MODEL}\n")
    copy, *tokens = calls()
    assert copy[:3] == ["gcloud", "storage", "rsync"] and copy[-2:] == [str(run.merged), "gs://models/team/demo/merged"]
    assert {tuple(call) for call in tokens} == {("gcloud", "auth", "print-access-token")}
    there, bearer = "/v1/europe-west4", "Bearer ya29.ours"
    operation = ("GET", f"{there}/{OPERATION}", bearer)
    upload = ("POST", f"{there}/projects/my-proj/locations/europe-west4/models:upload", bearer)
    assert registry.asked[1:] == [upload, operation, operation]
    listed = urlsplit(registry.asked[0][1])
    assert registry.asked[0][0] == "GET" and f"{listed.path}:upload" == upload[1]
    assert parse_qs(listed.query)["filter"] == ['displayName="demo"']
    assert registry.bodies == [{"model": printed(shown)}] and json.loads(shown)["upload"] == copy


def test_another_push_of_a_name_makes_a_version_of_the_same_model(exported_run, gemsmith, fake_tools, registry):
    run, _ = exported_run(), fake_tools(TOKEN)
    theirs = {"name": "projects/1/locations/europe-west4/models/9", "labels": {"team": "a"}}
    registry.has = [theirs, {"name": MODEL, "labels": {"gemsmith-run": "demo"}}]
    assert gemsmith("push", run.path, *TO, *ON, "--bucket", "gs://m")[0] == 0
    assert registry.bodies[0]["parentModel"] == MODEL


def test_the_model_is_served_as_a_launch_serves_it_and_described_by_its_records(exported_run, gemsmith):
    run = exported_run()
    model = printed(gemsmith("push", run.path, *TO, *ON, "--bucket", "gs://m", "--license", "Apache 2.0", "--print")[1])
    text = model.pop("description")
    assert model == json.loads((Path(__file__).parent / "golden" / "vertex.json").read_text())
    assert text.startswith("# demo\n") and "## Scores" in text and "## What was checked" in text
    assert "vllm serve gs://m/demo/merged --load-format runai_streamer\n" in text and str(run.path.parent) not in text


def test_weights_that_a_launch_left_in_its_bucket_are_registered_there(
    exported_run, gemsmith, fake_tools, registry, monkeypatch, tmp_path
):
    run, calls = exported_run(), fake_tools(TOKEN)
    shutil.rmtree(run.merged)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sync, "fetch_records", lambda url, folder: shutil.copytree(run.path, folder, dirs_exist_ok=True)
    )
    code, out, err = gemsmith("push", "gs://runs/my", *TO, *ON)
    assert (code, err) == (0, "") and out == f"{MODEL}\n"
    assert registry.bodies[0]["model"]["artifactUri"] == "gs://runs/my/run/merged"
    assert [call[1] for call in calls()] == ["auth"] * 4
    (tmp_path / "runs/my/verify.json").unlink()
    run.record_file("verify").unlink()
    code, _, err = gemsmith("push", "gs://runs/my", *TO, *ON)
    assert code == 2 and "not pushed: they were never verified" in err and len(registry.bodies) == 1


def test_the_servers_settings_make_no_record_one_of_other_settings(exported_run, gemsmith):
    run = exported_run()
    assert gemsmith("plan", run.path)[0] == 0 and run.record_file("plan").exists()
    shown = gemsmith("push", run.path, *TO, *ON, "--bucket", "gs://m", "--print")[1]
    assert "No record of" in printed(shown)["description"]
    assert "other settings" not in printed(shown)["description"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--to", "vertex:my-proj"), "--to vertex:my-proj: must be hub:OWNER/NAME or vertex:PROJECT/REGION"),
        (("--to", "vertex:my-proj/europe"), "--to vertex:my-proj/europe: must be hub:OWNER/NAME or vertex:"),
        (("--weights", "adapter"), "--weights: does not go with --machine"),
        (("--bucket", "models"), "--bucket: must be gs://BUCKET or a folder in it"),
        (("--machine", "v6e-8"), "--machine v6e-8: has no GPU; name one that has, such as 1xh100"),
        (("--machine", "h900"), "--machine: 'h900' is not in the catalog"),
        (("--set", "serve.container_image=vllm/vllm-openai:v0.32.0"), "takes images of Artifact Registry alone"),
        (("--private",), "--private: does not go with --machine"),
        (("--to", "hub:me/my"), "vertex:PROJECT/REGION and --machine go together"),
    ],
)
def test_what_vertex_ai_would_refuse_is_one_line_before_anything_is_sent(exported_run, gemsmith, given, said):
    base = ("push", exported_run().path, *TO, *ON, "--bucket", "gs://models")
    code, out, err = gemsmith(*base, *given)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_refusal_is_told_in_vertex_ais_words(exported_run, gemsmith, fake_tools, registry):
    path = exported_run().path
    registry.refuses = {"code": 403, "message": "Permission 'aiplatform.models.upload' denied"}
    fake_tools(TOKEN)
    code, _, err = gemsmith("push", path, *TO, *ON, "--bucket", "gs://m")
    assert code == 2 and "Vertex AI refused: 403 Permission 'aiplatform.models.upload' denied" in err
    fake_tools(("print-access-token", 1, "You are not logged in"))
    code, _, err = gemsmith("push", path, *TO, *ON, "--bucket", "gs://m")
    assert code == 2 and "You are not logged in; log in with: gcloud auth login" in err
