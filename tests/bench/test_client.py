"""What our client adds to vLLM's: here around a stand-in for its modules, and last around vLLM itself."""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemsmith.bench.cell import Count, LoadSpec, read_cell
from gemsmith.bench.driver import CLIENT, HEARD, measure, running_client
from gemsmith.bench.sweep import run_sweep
from gemsmith.errors import EngineError, MachineError
from gemsmith.recipe.serving import BURST, Bench, Load
from gemsmith.serve.client.endpoint import Endpoint, find_endpoint
from gemsmith.serve.settings import VllmEnvironment, find_vllm
from support.cases import each


class Handler:
    """As vLLM's StreamedResponseHandler: messages are ended by an empty line, or are whole JSON."""

    def __init__(self) -> None:
        self.buffer = ""

    def add_chunk(self, chunk: bytes) -> list[str]:
        *messages, self.buffer = (self.buffer + chunk.decode()).split("\n\n")
        if self.buffer.startswith("data: ") and _is_message(self.buffer.removeprefix("data: ")):
            messages, self.buffer = [*messages, self.buffer], ""
        return messages


def _is_message(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return text == "[DONE]" or json.loads(text) is not None
    return False


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("vllm", "vllm.benchmarks", "vllm.benchmarks.lib", "vllm.utils", "aiohttp")
    stand_ins: dict[str, Any] = {name: ModuleType(name) for name in names}
    functions = {
        "ASYNC_REQUEST_FUNCS": {},
        "RequestFunc": Any,
        "RequestFuncOutput": partial(SimpleNamespace, success=False, output_tokens=0),
        "StreamedResponseHandler": Handler,
    }
    stand_ins["vllm.benchmarks.lib.endpoint_request_func"] = SimpleNamespace(**functions)
    stand_ins["vllm.benchmarks.serve"] = SimpleNamespace(add_cli_args=None, main=None)
    stand_ins["vllm.utils.argparse_utils"] = SimpleNamespace(FlexibleArgumentParser=None)
    stand_ins["aiohttp"].ClientError = type("ClientError", (Exception,), {})
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Handler, "add_chunk", Handler.add_chunk)  # put back at the end
    spec = importlib.util.spec_from_file_location("bench_client", CLIENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(tokens: Any = 6, *, prompt_len: Any = 8, success: bool = True) -> Any:
    return SimpleNamespace(success=success, output_tokens=tokens, prompt_len=prompt_len, error="", itl=[])


def test_tokens_that_come_are_told_and_comments_are_not(client: Any, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    client.tell_when_heard(heard)
    client.CELL.ended = 5
    assert Handler().add_chunk(b": ping\n\n") == [": ping"]
    time.sleep(0.2)
    assert not heard.exists()
    assert Handler().add_chunk(b": ping\n\ndata: {}\n\n") == [": ping", "data: {}"]
    deadline_s = time.monotonic() + 60
    while not heard.exists() or heard.read_text() != "5":
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@each(
    ("note", "output", "cause"),
    [
        ({}, {}, None),
        ({"status": None, "error": OSError("refused")}, {"success": False}, "no connection"),
        ({"status": 429, "reason": "Too Many Requests"}, {"tokens": 0, "success": False}, "http 429"),
        ({"status": 500}, {"tokens": 0, "success": False}, "http 500"),
        ({"error": OSError("reset")}, {"success": False}, "cut stream"),
        ({"error": ValueError("Expecting value")}, {"success": False}, "wrong JSON"),
        ({"error": AttributeError("'list' object has no attribute 'get'")}, {"success": False}, "wrong JSON"),
        ({"error": TimeoutError()}, {"success": False}, "timeout"),
        ({"refused": True}, {"tokens": 0}, "error in stream"),
        ({"done": False}, {"tokens": 3}, "cut stream"),
        ({"done": False, "unread": True}, {"tokens": 6}, "wrong JSON"),
        ({}, {"tokens": 0}, "usage missing"),
        ({}, {"tokens": "6"}, "usage missing"),
        ({}, {"prompt_len": None}, "usage missing"),
        ({}, {"tokens": 5}, "wrong length"),
        ({}, {"tokens": 7}, "wrong length"),
        ({}, {"success": False}, "wrong length"),
    ],
)
def test_a_request_that_has_not_all_its_tokens_has_a_cause(
    note: dict[str, Any], output: dict[str, Any], cause: str | None, client: Any
) -> None:
    seen = client.StreamObservation(**{"status": 200, "done": True} | note)
    assert client.find_cause(seen, answer(**output), asked=6) == cause


def test_a_request_that_hangs_ends_with_the_cells_timeout(client: Any) -> None:
    async def hang(**_: Any) -> Any:
        await asyncio.sleep(60)

    client.CELL.timeout_s, client.CELL.ended = 0.05, 0
    asked = SimpleNamespace(prompt_len=8, output_len=6)
    output = asyncio.run(client.annotate_failure(hang)(request_func_input=asked, session=None))
    assert (output.success, output.error, client.CELL.ended) == (False, "timeout: TimeoutError", 1)


def test_the_message_that_names_the_role_of_a_chat_is_no_token(client: Any) -> None:
    async def chat(**_: Any) -> Any:
        return SimpleNamespace(itl=[0.0001, 0.02, 0.03])

    output = asyncio.run(client.drop_role_chunk(chat)(request_func_input=None, session=None))
    assert output.itl == [0.02, 0.03]


def test_what_a_stream_says_is_noted_of_its_own_request(client: Any) -> None:
    client.note_messages(threading.Event())

    async def stream(*chunks: bytes) -> Any:
        client.NOTE.set(client.StreamObservation())
        handler = Handler()
        for chunk in chunks:
            handler.add_chunk(chunk)
            await asyncio.sleep(0)
        return client.NOTE.get()

    async def both() -> Any:
        return await asyncio.gather(
            stream(b"data: {}\n\n", b"data: [DONE]\n\n"), stream(b"data: {}\n\n", b'data: {"error": {}}\n\n')
        )

    whole, refused = asyncio.run(both())
    assert (whole.done, whole.refused, refused.done, refused.refused) == (True, False, False, True)


@pytest.mark.parametrize(
    ("chunks", "unread"),
    [
        ((b"data: {}", b"data: {broken}", b"data: [DONE]"), True),
        ((b"data: {}", b'data: {"text": "data: [DONE]"}'), False),
        ((b"data: {}", b'data: {"text": "da'), False),
    ],
)
def test_what_follows_a_message_that_is_no_json_is_not_taken_for_a_cut(
    chunks: tuple[bytes, ...], unread: bool, client: Any
) -> None:
    """vLLM's client strips each chunk, so that nothing parts the message from the next."""
    client.note_messages(threading.Event())
    client.NOTE.set(note := client.StreamObservation())
    handler = Handler()
    for chunk in chunks:
        handler.add_chunk(chunk)
    assert (note.done, note.unread) == (False, unread)


def test_cells_are_read_as_they_are_handed_and_half_a_line_is_waited_for(client: Any, tmp_path: Path) -> None:
    file = tmp_path / "asked"
    file.write_text('{"a": 1}\n{"a":')
    cells = client.handed_cells(file)
    assert next(cells) == {"a": 1}
    threading.Timer(0.2, lambda: file.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')).start()
    assert [next(cells), next(cells)] == [{"a": 2}, {"a": 3}]


SLOW_TTFT_S, SLOW_TPOT_S = 0.4, 0.05
DEEDS = ("", "http 429", "http 500", "cut", "broken", "json", "usage", "short", "error", "hang")
CAUSES = {
    "": None,
    "http 429": "http 429",
    "http 500": "http 500",
    "cut": "cut stream",
    "broken": "cut stream",
    "json": "wrong JSON",
    "usage": "usage missing",
    "short": "wrong length",
    "error": "error in stream",
    "hang": "timeout",
}


@dataclass
class Streams:
    """A server that streams as vLLM does; `deed` says what it does to its nth request."""

    deed: Callable[[int], str] = lambda number: ""
    count: Iterator[int] = field(default_factory=itertools.count)
    done: Counter[str] = field(default_factory=Counter)
    ended: threading.Event = field(default_factory=threading.Event)
    server: ThreadingHTTPServer | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ThreadingHTTPServer.request_queue_size = 128
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler_of(self))
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
        self.server = None


def handler_of(streams: Streams) -> type[BaseHTTPRequestHandler]:
    class Streaming(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "demo"}]}' if self.path == "/v1/models" else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            deed = streams.deed(next(streams.count))
            streams.done[deed] += 1
            with contextlib.suppress(OSError):
                self.answer(deed, int(asked["max_tokens"]))

        def answer(self, deed: str, tokens: int) -> None:
            if deed.startswith("http"):
                self.send_response(int(deed[5:]))
                self.send_header("Retry-After", "1")
                self.end_headers()
                return
            self.send_response(200)
            if deed == "broken":
                self.send_header("Content-Length", "1000000")
            self.end_headers()
            if deed == "hang":
                streams.ended.wait(30)
                return
            if deed == "slow":
                time.sleep(SLOW_TTFT_S)
            early, usage = deed in ("cut", "broken"), {"completion_tokens": tokens, "prompt_tokens": 8}
            if deed == "short":
                usage["completion_tokens"] = 3
            for _ in range(3 if early or deed == "short" else tokens):
                self.say({"choices": [{"text": " token"}]})
                time.sleep(SLOW_TPOT_S if deed == "slow" else 0.005)
            if early:
                return
            if deed == "json":
                self.wfile.write(b"data: {broken}\n\n")
            elif deed == "error":
                self.say({"error": {"message": "EngineDeadError"}})
            elif deed != "usage":
                self.say({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def say(self, message: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    return Streaming


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    streams.start()
    yield streams
    streams.ended.set()
    streams.stop()


@pytest.fixture
def engine() -> VllmEnvironment:
    try:
        return find_vllm()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.mark.vllm
def test_every_malformed_answer_is_counted_under_its_name_and_none_twice(
    streams: Streams, engine: VllmEnvironment, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    streams.deed = lambda number: DEEDS[number % len(DEEDS)]
    load = Load(input_tokens=8, output_tokens=6, request_rate=40.0)
    ask = LoadSpec(number=1, load=load, count=Count(warmup=0, measured=4 * len(DEEDS)), seed=1, timeout_s=3)
    endpoint = Endpoint(url=streams.url, model="demo", tokenizer=tiny_checkpoint("tiny-31b"))
    with running_client(engine.python, endpoint, tmp_path) as client:
        cell = read_cell(ask, measure(client, ask))
    assert streams.done == dict.fromkeys(DEEDS, 4)  # nothing is asked again
    expected = Counter(cause for deed in DEEDS for cause in [CAUSES[deed]] * 4 if cause)
    assert cell.failures == expected
    assert (cell.completed, cell.cut, cell.failed) == (4, 12, 24)
    assert (tmp_path / HEARD).exists()


@pytest.mark.vllm
def test_times_are_those_that_the_server_took(
    streams: Streams, engine: VllmEnvironment, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    streams.deed = lambda number: "slow"
    load = Load(input_tokens=8, output_tokens=16, request_rate=4.0)
    ask = LoadSpec(number=1, load=load, count=Count(warmup=2, measured=20), seed=1, timeout_s=30)
    endpoint = Endpoint(url=streams.url, model="demo", tokenizer=tiny_checkpoint("tiny-31b"))
    with running_client(engine.python, endpoint, tmp_path) as client:
        cell = read_cell(ask, measure(client, ask))
    assert cell.completed == 20
    assert cell.ttft_ms.p50 == pytest.approx(1000 * SLOW_TTFT_S, rel=0.15)
    assert cell.tpot_ms.p50 == pytest.approx(1000 * SLOW_TPOT_S, rel=0.15)
    assert cell.e2e_ms.p50 == pytest.approx(cell.ttft_ms.p50 + 15 * cell.tpot_ms.p50, rel=0.05)


@pytest.mark.vllm
def test_a_server_killed_in_mid_sweep_is_gone_on_with_when_it_is_back(
    streams: Streams, engine: VllmEnvironment, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    bench = Bench(input_tokens=(8,), output_tokens=6, request_rates=(20.0, 40.0, "burst"), prompts=20)
    endpoint = find_endpoint(streams.url, None, tiny_checkpoint("tiny-31b"))

    def deed(number: int) -> str:
        if number == 40:  # in the second cell: the first has 4 and 20
            threading.Thread(target=streams.stop).start()
        return ""

    streams.deed = deed
    with pytest.raises(EngineError, match=r"cell 2 .*does not answer any more(.|\n)*1 cells before it are kept"):
        run_sweep(endpoint, engine, bench, seed=0, folder=tmp_path / "bench")
    streams.deed, streams.done = lambda number: "", Counter()
    streams.start()
    found = run_sweep(endpoint, engine, bench, seed=0, folder=tmp_path / "bench")
    assert [(cell.completed, cell.failures) for cell in found["cells"]] == [(20, {})] * 3
    assert streams.done[""] == 8 + 20 + 20 + 2  # the second cell's warm-up and its own, the burst and its two before it
    assert found["cells"][2].request_rate == BURST


def nvml(monkeypatch: pytest.MonkeyPatch, *used: int) -> None:
    """Stands in for NVML: two GPUs, of which each look finds the first with that much memory in use, and then none."""
    looks = iter(used)

    def memory(gpu: int) -> SimpleNamespace:
        if gpu:
            return SimpleNamespace(used=1000)
        if (left := next(looks, None)) is None:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(used=left)

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetName": lambda gpu: f"gpu {gpu}",
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=100 * gpu),
        "nvmlDeviceGetPowerUsage": lambda gpu: 700_000,
    }
    monkeypatch.setitem(sys.modules, "vllm.third_party", SimpleNamespace(pynvml=SimpleNamespace(**functions)))


def watched(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    client.watch_devices(tmp_path / "devices.jsonl")
    return [json.loads(line) for line in (tmp_path / "devices.jsonl").read_text().splitlines()]


def test_each_gpu_is_looked_at_until_nvml_no_longer_answers(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]
) -> None:
    nvml(monkeypatch, 300, 500)
    *looks, problem = watched(client, tmp_path, monkeypatch)
    assert problem.startswith("watch_gpus: RuntimeError GPU is lost; watch_tpus: ")
    assert looks[0][0] == {"name": "gpu 0", "memory_bytes": 300, "busy": 0.0, "power_w": 700.0}
    load = Load(input_tokens=16, output_tokens=16, request_rate=20.0)
    ask = LoadSpec(number=1, load=load, count=Count(warmup=0, measured=12), seed=0)
    cell = read_cell(ask, result | {"devices": looks})
    assert cell.devices is not None and cell.no_devices is None
    first, second = cell.devices
    assert (first.name, first.samples, first.memory_bytes_max, first.busy_mean) == ("gpu 0", 2, 500, 0.0)
    assert (second.memory_bytes_max, second.busy_max, second.power_w_mean) == (1000, 1.0, 700.0)
    told = read_cell(ask, result | {"devices": [problem]})
    assert told.devices is None and told.no_devices == problem


def test_tpus_are_looked_at_where_there_is_no_gpu(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libnvidia-ml.so.1 is not there")

    monkeypatch.setitem(sys.modules, "vllm.third_party", SimpleNamespace(pynvml=SimpleNamespace(nvmlInit=no_driver)))
    usages = iter([[SimpleNamespace(memory_usage=5, duty_cycle_pct=50.0)] * 2])
    device = SimpleNamespace(get_local_chips=lambda: ("v6e", 2))
    metrics = SimpleNamespace(get_chip_usage=lambda chip: next(usages))
    monkeypatch.setitem(sys.modules, "tpu_info", SimpleNamespace(device=device, metrics=metrics))
    look, problem = watched(client, tmp_path, monkeypatch)
    assert look == [{"name": "v6e", "memory_bytes": 5, "busy": 0.5}] * 2 and "libnvidia-ml.so.1" in problem
    device.get_local_chips = lambda: (None, 0)
    assert watched(client, tmp_path, monkeypatch)[-1].endswith("watch_tpus: LookupError no TPU is attached")
