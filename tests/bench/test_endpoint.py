import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemsmith.errors import CheckpointError, EngineError, InputError
from gemsmith.serve.client.endpoint import RemoteServer, api_key, endpoint_of, find_endpoint, key_headers
from support.hostile_server import Hostile, hostile_server


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with hostile_server() as server:
        yield server


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """What the server answers to GET /v1/models and /version."""

    def answer(body: Any, status: int = 200) -> None:
        from gemsmith.serve.client.chat import read_object

        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        monkeypatch.setattr("gemsmith.serve.client.endpoint._ask", lambda url: read_object(status, data))

    return answer


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, **more}


def test_a_servers_only_model_is_found_with_its_tokenizer(hostile: Hostile, tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint("tiny-31b")
    found = find_endpoint(f"{hostile.url}/v1/", None, folder)
    assert (found.url, found.model, found.tokenizer) == (hostile.url, "ours", folder)
    assert found.facts["url"] == hostile.url and len(found.facts["tokenizer"]) == 64
    found.prove()
    found.check()


def test_a_server_that_has_gone_is_noticed_when_asked(tiny_checkpoint: Any) -> None:
    with hostile_server() as server:
        found = find_endpoint(server.url, None, tiny_checkpoint("tiny-31b"))
    with pytest.raises(EngineError, match=r"^http://127\.0\.0\.1:\d+ does not answer any more \(ConnectError"):
        found.prove()


def test_vllm_names_the_folder_that_it_serves(listing: Any, tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint("tiny-31b")
    names = [model("demo", root=str(folder), max_model_len=640), model("demo-alias", root=str(folder))]
    listing({"data": names, "version": "0.32.0"})
    found = find_endpoint("http://x", None, None)
    assert (found.model, found.tokenizer, found.facts["max_model_len"]) == ("demo", folder, "640")
    assert found.facts["version"] == "0.32.0" and "created" not in found.facts


@pytest.mark.parametrize(
    ("url", "name", "message"),
    [
        ("127.0.0.1:8000", None, r"^--url 127\.0\.0\.1:8000: must be http"),
        ("ftp://x", None, r"^--url ftp://x: must be http"),
        ("http://x", "demoo", r"^--model demoo: http://x has demo, other \(did you mean demo\?\)"),
        ("http://x", None, r"^--model is missing; http://x has demo, other$"),
        ("http://x", "demo", r"^--tokenizer is missing: "),
    ],
)
def test_what_cannot_be_asked_is_one_line(url: str, name: str | None, message: str, listing: Any) -> None:
    listing({"data": [model("demo", root="/not/here"), model("other", root="/nor/this")]})
    with pytest.raises(InputError, match=message):
        find_endpoint(url, name, None)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, r"^--url http://x: GET /v1/models: http 401 .*; set \$VLLM_API_KEY or \$OPENAI_API_KEY$"),
        (500, {}, r"GET /v1/models: http 500 .*; is the server up\?$"),
        (200, b"<html>", r"GET /v1/models: not JSON \(<html>\)"),
        (200, {"data": []}, r"lists no model"),
        (200, {"data": ["demo"]}, r"lists no model"),
    ],
)
def test_a_server_that_lists_no_models_is_one_line(status: int, body: Any, message: str, listing: Any) -> None:
    listing(body, status)
    with pytest.raises(InputError, match=message):
        find_endpoint("http://x", None, None)


def test_a_server_that_never_ends_its_list_of_models_is_given_up(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemsmith.serve.client.endpoint._TIMEOUT_S", 0.5)
    hostile.listed = "drip"
    with pytest.raises(InputError, match=r"GET /v1/models: no answer \(not within 0 s\); is the server up\?$"):
        find_endpoint(hostile.url, None, None)
    server = RemoteServer(url=hostile.url, model="ours")
    server.check()  # it is there


def test_a_tokenizer_that_is_not_there_is_one_line(listing: Any, tmp_path: Path) -> None:
    listing({"data": [model("demo")]})
    with pytest.raises(CheckpointError, match=r"^--tokenizer .*: has no tokenizer\.json"):
        find_endpoint("http://x", "demo", tmp_path)


def test_the_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, hostile: Hostile) -> None:
    assert api_key() is None and key_headers() == {}
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert key_headers() == {"Authorization": "Bearer theirs"}
    monkeypatch.setenv("VLLM_API_KEY", "ours")
    assert api_key() == "ours"


def test_our_own_server_is_known_by_its_weights_and_arguments_and_not_by_its_port(hostile: Hostile) -> None:
    from dataclasses import replace

    server = hostile.server(Path("/w"))
    one, other = (
        endpoint_of(replace(server, command=("python", "-m", "x", "--port", port, *more)), weights_sha256="abc")
        for port, more in (("1", ()), ("2", ("--enable-prefix-caching",)))
    )
    assert one.facts["command"] == "-m x" and one.facts["weights"] == "abc"
    assert (one.prefix_caching, other.prefix_caching) == (False, True)
    one.check()
