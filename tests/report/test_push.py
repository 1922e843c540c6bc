"""A run's weights go to the hub whole, in one commit, with a card that says what the records say."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from gemsmith.errors import InputError, MachineError, RunError
from gemsmith.report.push import model_card, push
from gemsmith.runs.eval_records import Elsewhere, EvalRecord
from gemsmith.runs.records import Check, VerifyRecord
from gemsmith.runs.run import Run, read_record, write_record

# huggingface_hub 1.33 hands files to httpx 0.28 so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")


@dataclass
class Hub:
    """A stand-in of the Hugging Face hub's API: what huggingface_hub needs for one commit."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    private: bool | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    refuses: str | None = None
    """The path that is answered with 403."""
    stored: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.private = json.loads(body).get("visibility") == "private"
            return {"url": f"{self.url}/me/model", "name": "me/model", "id": "me/model"}
        if path.endswith("/preupload/main"):
            files = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                for each in json.loads(body)["files"]
            ]
            return {"files": [each | {"shouldIgnore": False, "oid": None} for each in files]}
        if path.endswith("/info/lfs/objects/batch"):
            actions = {"upload": {"href": f"{self.url}/stored"}}
            objects = [each | {"actions": actions} for each in json.loads(body)["objects"]]
            return {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            self.commits += 1
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
            return {"commitUrl": f"{self.url}/me/model/commit/1", "commitOid": "1", "success": True}
        return {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    told = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            path = self.path.partition("?")[0]
            told.asked.append(path)
            if path == "/stored":
                told.stored[hashlib.sha256(body).hexdigest()] = body
            refused = path == "/api/models/me/model" or (told.refuses is not None and path.endswith(told.refuses))
            content = json.dumps({"error": "no"} if refused else told.answer(path, body)).encode()
            self.send_response(403 if refused else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = do  # noqa: N815 - as BaseHTTPRequestHandler looks them up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", told.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    yield told
    server.shutdown()
    server.server_close()


def test_the_weights_and_their_card_are_one_commit(hub: Hub, exported_run: Callable[..., Run]) -> None:
    run = exported_run()
    assert push(run, "hub:me/model", weights="merged", private=True) == f"{hub.url}/me/model"
    assert (hub.private, hub.commits) == (True, 1)
    assert hub.files.keys() == {file.name for file in run.merged.iterdir()} | {"README.md"}
    for file in run.merged.iterdir():
        assert hub.files[file.name] == file.read_bytes()
    assert hub.files["README.md"].decode() == model_card(run, "me/model", weights="merged")


@pytest.mark.parametrize("refused", ["/api/repos/create", "/commit/main"])
def test_a_hub_that_refuses_is_one_line_with_what_to_do(
    hub: Hub, exported_run: Callable[..., Run], refused: str
) -> None:
    hub.refuses = refused
    with pytest.raises(MachineError, match=r"^--to hub:me/model: the Hugging Face hub refused .*403.*set HF_TOKEN"):
        push(exported_run(), "hub:me/model", weights="merged")
    assert not hub.files


def test_what_verify_has_not_passed_stays_here(hub: Hub, exported_run: Callable[..., Run]) -> None:
    run = exported_run()
    (run.merged / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"not pushed: .*--skip-verify-check"):
        push(run, "hub:me/model", weights="merged")
    with pytest.raises(InputError, match="--to me/model: must be hub:OWNER/NAME"):
        push(run, "me/model")
    assert not hub.asked


def test_print_shows_the_card_and_asks_no_hub(gemsmith: Callable[..., Any], exported_run: Callable[..., Run]) -> None:
    run = exported_run()
    code, out, err = gemsmith("push", run.path, "--to", "hub:me/my", "--weights", "merged", "--print")
    assert (code, err) == (0, "") and out.startswith("---\n") and "me/my" in out
    code, out, err = gemsmith("push", run.path, "--to", "me/my", "--print")
    assert (code, out, err) == (2, "", "error: --to me/my: must be hub:OWNER/NAME or vertex:PROJECT/REGION\n")


def test_a_check_that_names_a_place_of_this_machine_does_not_in_the_card(make_run: Callable[..., Run]) -> None:
    run = make_run()
    record: VerifyRecord = read_record(run, VerifyRecord)
    check = Check(
        name="base", passed=False, detail=f"{run.path.resolve()}/merged is not made of {run.recipe.checkpoint}"
    )
    write_record(run, record.model_copy(update={"checks": (check,)}))
    card = model_card(run, "me/tuned", weights="merged")
    assert "| failed | base | " in card and str(run.path.resolve()) not in card


def test_a_server_that_was_asked_is_named_without_its_address(make_run: Callable[..., Run]) -> None:
    run = make_run()
    record: EvalRecord = read_record(run, EvalRecord)
    warning = "The tuned model is mine at http://10.0.0.7:8000: Gemsmith has not checked its weights."
    asked = Elsewhere(url="http://10.0.0.7:8000", model="mine", root=None)
    write_record(run, record.model_copy(update={"elsewhere": {"tuned": asked}, "warnings": (warning,)}))
    card = model_card(run, "me/tuned", weights="adapter")
    assert "The tuned model is mine: Gemsmith has not checked its weights." in card and "10.0.0.7" not in card


def test_the_card_has_scores_training_and_checks_and_no_path_of_this_machine(make_run: Callable[..., Run]) -> None:
    run = make_run()
    card = model_card(run, "me/tuned", weights="adapter", license="apache-2.0")
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "peft" and front["license"] == "apache-2.0"
    (metric,) = front["model-index"][0]["results"][0]["metrics"]
    assert 0 <= metric["value"] <= 1 and "n = " in metric["name"]
    for heading in ("## Scores", "## Use", "## Training", "## What was checked", "<summary>Recipe</summary>"):
        assert heading in card
    assert "| loss | " in card and "| SHA-256 of the packed rows | " in card
    assert str(run.path.parent) not in card
    assert f"--max-lora-rank {max(8, run.recipe.lora.rank)} --lora-modules tuned=me/tuned" in card
