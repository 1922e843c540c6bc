"""One running vLLM server, from its start until nothing of it is left."""

import contextlib
import errno
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from gemsmith.errors import EngineError, MachineError
from gemsmith.serve.engine import ServeSettings, find_engine, server_command, server_environment
from gemsmith.serve.process import guarded, last_lines

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers at `url`, such as http://127.0.0.1:8000, for the model name `model`."""

    url: str
    model: str
    folder: Path
    command: tuple[str, ...]
    start_s: float
    vllm: str
    python: Path
    pid: int
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False, compare=False)

    def check(self) -> None:
        """Raises EngineError with the log's last lines where the server has died."""
        if self.process.poll() is not None:
            raise EngineError(f"vLLM died (exit code {self.process.returncode}); the end of {self.log}:\n{last_lines(self.log)}")


@contextlib.contextmanager
def running_server(model_folder: Path, *, name: str, settings: ServeSettings, log: Path) -> Iterator[Server]:
    """A healthy server of a checkpoint folder; it and its children are gone when the block ends, however it ends.

    Raises MachineError where vLLM is not installed or the port is in use, EngineError where vLLM dies or does not answer in time.
    """
    engine = find_engine(settings.python)
    port = settings.port or _free_port(settings.host)
    _check_port(settings.host, port)
    command = server_command(engine, model_folder, name, port, settings)
    url = f"http://{_reachable(settings.host)}:{port}"
    begin_s = time.monotonic()
    with guarded(command, environment=server_environment(engine), log=log) as process:
        _wait_until_healthy(process, url, name, log, settings.start_timeout_s)
        yield Server(
            url=url,
            model=name,
            folder=model_folder,
            command=tuple(command),
            start_s=round(time.monotonic() - begin_s, 2),
            vllm=f"{engine.package} {engine.version}",
            python=engine.python,
            pid=process.pid,
            log=log,
            process=process,
        )


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, name: str, log: Path, timeout_s: float) -> None:
    begin_s = time.monotonic()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # trust_env=False: a proxy set for the outside must not be asked for our own machine.
    with httpx.Client(trust_env=False, timeout=5.0) as client, console.status("") as status:
        while not _is_healthy(client, url):
            elapsed_s = time.monotonic() - begin_s
            if process.poll() is not None:
                code = process.returncode
                raise EngineError(f"vLLM died at start (exit code {code}) with {name}; the end of {log}:\n{last_lines(log)}")
            if elapsed_s > timeout_s:
                raise EngineError(
                    f"vLLM did not answer in {timeout_s:.0f} s (serve.start_timeout_s) with {name}; the end of {log}:\n{last_lines(log)}"
                )
            status.update(f"vLLM is starting with {name}: {elapsed_s:.0f} s")
            time.sleep(POLL_S)
    console.print(f"vLLM serves {name} at {url}, started in {time.monotonic() - begin_s:.1f} s")


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _free_port(host: str) -> int:
    with _listener(host, 0) as listener:
        return int(listener.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    _listener(host, port).close()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise MachineError(f"serve.host: {host} is not an address of this machine ({error.strerror}); 127.0.0.1 is") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"serve.port: {port} is in use on {host}; free it, name another, or leave it out to take a free one"
            ) from None
        raise MachineError(f"serve.host, serve.port: {host}:{port} cannot be bound ({error.strerror}); try 127.0.0.1 and no port") from None
    return listener


def _reachable(host: str) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
