"""One running vLLM server, from its start until nothing of it is left."""

import contextlib
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemsmith.errors import EngineError, MachineError
from gemsmith.runs.records import ServerFacts
from gemsmith.serve.command import image_of, server_command
from gemsmith.serve.container import refuse_open_server, remove_container
from gemsmith.serve.facts import ask, ask_facts, describe_answer, has_nonce, new_nonce, with_nonce
from gemsmith.serve.settings import KEY_VARIABLE, ServeSettings, VllmEnvironment, api_headers, find_vllm
from gemsmith.serve.vllm_checks import refuse_engine
from gemsmith.system.console import open_console
from gemsmith.system.process import last_lines, refuse_full_disk, stop, supervised

POLL_S = 0.2
START_PROOF_TIMEOUT_S, PROOF_TIMEOUT_S = 5.0, 30.0
START_GRACE_S = 2.0
FREE_PORT_TRIES = 3
# There, a socket that is bound and does not listen keeps a port, and lets vLLM listen on it: both have SO_REUSEADDR.
_HOLDS_PORTS = sys.platform == "linux"
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class PortTakenError(MachineError):
    """Another program has the port that vLLM was to listen on."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers at `url`, such as http://127.0.0.1:8000, for the model name `model`."""

    url: str
    model: str
    folder: Path
    command: tuple[str, ...]
    """Without the nonce, which is another at each start."""
    start_s: float = 0.0
    vllm: str
    pid: int
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False, compare=False)
    instance_id: str = field(repr=False, compare=False)
    facts: ServerFacts = field(default_factory=ServerFacts)
    """What it says of itself; of a server that is not asked, nothing."""

    @property
    def headers(self) -> Mapping[str, str]:
        return api_headers()

    def check(self) -> None:
        """Raises EngineError with the last log lines where the server has died, MachineError where the disk is full."""
        if (code := self.process.poll()) is not None:
            refuse_full_disk(self.log)
            raise EngineError(f"vLLM died (exit code {code}); the end of {self.log}:\n{last_lines(self.log)}")

    def prove(self) -> None:
        """Raises PortTakenError where what answers is not our vLLM, EngineError where that is dead or silent."""
        self.check()
        answer = ask(self.url, timeout_s=PROOF_TIMEOUT_S)
        if not answer:
            raise EngineError(f"vLLM at {self.url} does not answer; the end of {self.log}:\n{last_lines(self.log)}")
        if not has_nonce(answer, self.instance_id):
            raise _port_taken(self.url, answer)


@contextlib.contextmanager
def running_server(model_folder: Path, *, name: str, settings: ServeSettings, log: Path) -> Iterator[Server]:
    """A server of a checkpoint folder that is up and ours; it and its children are gone when the block ends.

    With an adapter in the settings, the name is the tuned model's. A free port that another program takes before vLLM
    has it is changed for another. Raises MachineError without vLLM or port, EngineError where vLLM dies or is silent.
    """
    refuse_open_server(settings, has_key=bool(api_headers()))
    console = open_console()
    if settings.machine is not None and settings.in_docker:  # which runs no Python of this machine
        engine = VllmEnvironment(python=Path("docker"), package=image_of(settings.machine, settings), version="")
    else:
        engine = find_vllm(settings.python)
    refuse_engine(engine)
    tries = 1 if settings.port else FREE_PORT_TRIES
    for left in reversed(range(tries)):
        with contextlib.ExitStack() as stack:
            try:
                server = stack.enter_context(_one_server(engine, model_folder, name=name, settings=settings, log=log))
            except PortTakenError:
                if not left:
                    raise
                console.print("another program took the free port before vLLM had it; starting vLLM again on another")
                continue
            yield server
            return


@contextlib.contextmanager
def _one_server(
    engine: VllmEnvironment, model_folder: Path, *, name: str, settings: ServeSettings, log: Path
) -> Iterator[Server]:
    instance_id = new_nonce()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(listener(settings.host, settings.port or 0))
        port = int(holder.getsockname()[1])
        if not _HOLDS_PORTS:
            holder.close()
        on_port = settings.model_copy(update={"port": port})
        command, environment = server_command(engine, model_folder, name, on_port, container=instance_id)
        if settings.in_docker:
            stack.callback(remove_container, instance_id)
        # At which a client on this machine reaches it.
        host = _REACHABLE.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
        process = stack.enter_context(supervised(with_nonce(command, instance_id), environment=environment, log=log))
        server = Server(
            url=f"http://{host}:{port}",
            model=name,
            folder=model_folder,
            command=tuple(word for word in command if word != instance_id),
            vllm=f"{engine.package} {engine.version}",
            pid=process.pid,
            log=log,
            process=process,
            instance_id=instance_id,
        )
        try:
            start_s, answer = _wait_until_ours(server, settings.start_timeout_s)
        except BaseException:
            # vLLM does not hear SIGTERM while it loads, and nothing is lost with one that has served nobody.
            stop(process, grace_s=START_GRACE_S)
            raise
        if _HOLDS_PORTS:
            # From now on nobody else can listen on the port, not even when vLLM is dead.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        facts = ask_facts(server.url, models=answer, log=log)
        yield replace(server, start_s=round(start_s, 2), facts=facts)


def _wait_until_ours(server: Server, timeout_s: float) -> tuple[float, bytes]:
    """How long it took the server to answer, in seconds, and its list of models."""
    begin_s = time.monotonic()
    console = open_console()
    console.print(
        f"vLLM is starting with {server.model}: about a minute for a tiny model, at most {timeout_s:.0f} s "
        f"(serve.start_timeout_s); its log: {server.log}"
    )
    with console.status("") as status:
        while True:
            # Before asking: where vLLM died of a taken port, the other program answers by now.
            code = server.process.poll()
            answer = ask(server.url, timeout_s=START_PROOF_TIMEOUT_S)
            if answer and has_nonce(answer, server.instance_id):
                break
            if answer or (answer is not None and code is not None):
                raise _port_taken(server.url, answer)
            if code is not None:
                refuse_full_disk(server.log)
                raise EngineError(
                    f"vLLM died at start (exit code {code}) with {server.model}; the end of "
                    f"{server.log}:\n{last_lines(server.log)}"
                )
            elapsed_s = time.monotonic() - begin_s
            if elapsed_s > timeout_s:
                silent = f"; {server.url} takes connections and says nothing, which may be another program"
                raise EngineError(
                    f"vLLM did not answer in {timeout_s:.0f} s (serve.start_timeout_s) with {server.model}"
                    f"{'' if answer is None else silent}; the end of {server.log}:\n{last_lines(server.log)}"
                )
            status.update(f"vLLM is starting with {server.model}: {elapsed_s:.0f} s")
            time.sleep(POLL_S)
    elapsed_s = time.monotonic() - begin_s
    console.print(f"vLLM serves {server.model} at {server.url}, started in {elapsed_s:.1f} s")
    return elapsed_s, answer


def _port_taken(url: str, answer: bytes) -> PortTakenError:
    found = describe_answer(answer)
    key = f"; if serve.arguments has --api-key, set ${KEY_VARIABLE} instead" if found == "HTTP 401" else ""
    return PortTakenError(
        f"serve.port: what answers at {url} ({found}) is not the vLLM that was started here; stop it, or name another "
        f"port{key}"
    )


def listener(host: str, port: int) -> socket.socket:
    """A socket on the port, 0: on a free one. Raises MachineError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise MachineError(
            f"serve.host: {host} is not an address of this machine ({error.strerror}); 127.0.0.1 is"
        ) from None
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"serve.port: {port} is in use on {host}; free it, name another, or leave it out to take a free one"
            ) from None
        raise MachineError(
            f"serve.host, serve.port: {host}:{port} cannot be bound ({error.strerror}); try 127.0.0.1 and no port"
        ) from None
    return found
