"""What our client adds to vLLM's: here around a stand-in for its modules, and last around vLLM itself."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemsmith.bench.cells import Ask, read_cell
from gemsmith.bench.stage import CLIENT, client_arguments
from gemsmith.errors import MachineError
from gemsmith.serve.engine import clean_environment, find_engine


class Handler:
    """As vLLM's StreamedResponseHandler: messages are ended by an empty line."""

    def add_chunk(self, chunk: bytes) -> list[str]:
        return [message for message in chunk.decode().split("\n\n") if message]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("vllm", "vllm.benchmarks", "vllm.benchmarks.lib", "vllm.utils")
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in names}
    functions = {
        "ASYNC_REQUEST_FUNCS": {},
        "RequestFunc": Any,
        "RequestFuncOutput": Any,
        "StreamedResponseHandler": Handler,
    }
    stand_ins["vllm.benchmarks.lib.endpoint_request_func"] = SimpleNamespace(**functions)
    stand_ins["vllm.benchmarks.serve"] = SimpleNamespace(add_cli_args=None, main=None)
    stand_ins["vllm.utils.argparse_utils"] = SimpleNamespace(FlexibleArgumentParser=None)
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Handler, "add_chunk", Handler.add_chunk)  # put back at the end
    spec = importlib.util.spec_from_file_location("bench_client", CLIENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_that_come_touch_the_file_and_comments_do_not(client: Any, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    client.touch_when_heard(heard)
    assert Handler().add_chunk(b": ping\n\n") == [": ping"]
    time.sleep(0.2)
    assert not heard.exists()
    assert Handler().add_chunk(b": ping\n\ndata: {}\n\n") == [": ping", "data: {}"]
    deadline_s = time.monotonic() + 5
    while not heard.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.parametrize(("told", "success", "tokens"), [(16, True, 16), (0, True, 3), (0, False, 0)])
def test_chunks_stand_for_tokens_where_the_server_did_not_tell_them(
    told: int, success: bool, tokens: int, client: Any
) -> None:
    async def request(**_: Any) -> Any:
        return SimpleNamespace(success=success, output_tokens=told, itl=[0.1, 0.1])

    assert asyncio.run(client.count_chunks(request)(session=None)).output_tokens == tokens


class Streams(BaseHTTPRequestHandler):
    """Answers as vLLM's completions do; each fourth stream of the load test ends after three tokens and never tells
    their number."""

    protocol_version = "HTTP/1.1"
    count = itertools.count(-3)  # one request asks whether the server is up, and two warm it up

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cut = next(self.count) % 4 == 3
        usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"], "prompt_tokens": 8}}
        chunks: list[dict[str, Any]] = [{"choices": [{"text": " token"}]}] * (3 if cut else asked["max_tokens"])
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for chunk in chunks if cut else [*chunks, usage]:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            time.sleep(0.01)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def streams() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with contextlib.closing(server.socket):
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.vllm
def test_vllms_client_tells_which_streams_ended_early(streams: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    try:
        engine = find_engine()
    except MachineError as error:
        pytest.skip(str(error))
    ask = Ask(number=1, input_tokens=8, output_tokens=6, request_rate=20.0, prompts=8, seed=1)
    (tmp_path / ask.prompts_file).write_text('{"prompt": "a b c d e f"}\n' * 8)
    server: Any = SimpleNamespace(url=streams, model="demo", folder=tiny_checkpoint("tiny-31b"))
    (tmp_path / "cells.json").write_text(json.dumps([client_arguments(server, ask, tmp_path)]))
    command = [engine.python, CLIENT, tmp_path / "cells.json", tmp_path / "heard"]
    subprocess.run(
        command,
        env=clean_environment() | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    result = json.loads((tmp_path / ask.result_file).read_text())
    assert sorted(result["output_lens"]) == [3, 3, 6, 6, 6, 6, 6, 6]
    cell = read_cell(ask, result)
    assert (cell.completed, cell.cut, cell.failed) == (6, 2, 0)
    assert (tmp_path / "heard").exists()
