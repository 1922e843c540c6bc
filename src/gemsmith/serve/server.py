"""One running vLLM server, from its start until nothing of it is left, and what it says of itself.

A server that is ours lists a random name beside the model's, which no other can.
"""

import contextlib
import errno
import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemsmith.errors import EngineError, MachineError
from gemsmith.runs.records import ServerFacts
from gemsmith.serve.command import image_of, server_command
from gemsmith.serve.container import refuse_open_server, remove_container
from gemsmith.serve.settings import KEY_VARIABLE, ServeSettings, VllmEnvironment, api_headers, find_vllm
from gemsmith.serve.vllm_checks import refuse_engine
from gemsmith.system.console import open_console
from gemsmith.system.process import describe_exit, last_lines, refuse_full_disk, stop, supervised

POLL_S = 0.2
START_PROOF_TIMEOUT_S, PROOF_TIMEOUT_S = 5.0, 30.0
START_GRACE_S = 2.0
FREE_PORT_TRIES = 3
# There, a socket that is bound and does not listen keeps a port, and lets vLLM listen on it: both have SO_REUSEADDR.
_HOLDS_PORTS = sys.platform == "linux"
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
_OPTION = "--served-model-name"
_MOST_BYTES = 2**20
_TIMEOUT_S = 10.0
TRUTH = {"True": True, "False": False}
# vLLM's one line about its engine, with everything that it has settled on (vllm/config/vllm.py, __str__, 0.32.0).
_ENGINE = re.compile(r"Initializing a V\d LLM engine \(v?([^)]+)\) with config: (.*)")


class PortTakenError(MachineError):
    """Another program has the port that vLLM was to listen on."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers at `url`, such as http://127.0.0.1:8000, for the model name `model`."""

    url: str
    model: str
    folder: Path
    command: tuple[str, ...]  # without the nonce, which is another at each start
    start_s: float = 0.0
    vllm: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False, compare=False)
    instance_id: str = field(repr=False, compare=False)
    facts: ServerFacts = field(default_factory=ServerFacts)  # what it says of itself, once it is asked

    @property
    def headers(self) -> Mapping[str, str]:
        return api_headers()

    def check(self) -> None:
        """Raises EngineError with the last log lines where the server has died, MachineError where the disk is full."""
        if (code := self.process.poll()) is not None:
            refuse_full_disk(self.log)
            raise EngineError(
                f"vLLM died (exit code {describe_exit(code)}); the end of {self.log}:\n{last_lines(self.log)}"
            )

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
    for left in reversed(range(1 if settings.port else FREE_PORT_TRIES)):
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
        # /server_info would give all in one, but only beside switches that let a client run code there.
        version, metrics = (ask(server.url, path, timeout_s=_TIMEOUT_S) or b"" for path in ("/version", "/metrics"))
        text = log.read_text(encoding="utf-8", errors="replace")
        facts = read_facts(models=answer, version=version, metrics=metrics, log=text)
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
                    f"vLLM died at start (exit code {describe_exit(code)}) with {server.model}; the end of "
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


def new_nonce() -> str:
    return f"gemsmith-{secrets.token_hex(8)}"


def with_nonce(command: Sequence[str], instance_id: str) -> list[str]:
    """A command line with the nonce behind the last --served-model-name: vLLM lists all, and goes by the first."""
    words = list(command)
    last = max(place for place, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == _OPTION)
    option, equals, value = words[last].partition("=")
    words[last : last + 1] = [option, value] if equals else [option]
    end = next((place for place in range(last + 1, len(words)) if words[place].startswith("-")), len(words))
    return [*words[:end], instance_id, *words[end:]]


def ask(url: str, path: str = "/v1/models", *, timeout_s: float) -> bytes | None:
    """What a server answers to GET in the time, status line first; None where none listens.

    By a socket: HTTP clients limit the time of each read, so that a byte now and then holds them for hours.
    """
    parts = urlsplit(url)
    headers = {"Host": parts.netloc, "Accept": "application/json"} | dict(api_headers())
    lines = [f"GET {path} HTTP/1.0", *(f"{key}: {value}" for key, value in headers.items()), "", ""]
    deadline_s = time.monotonic() + timeout_s
    answer = b""
    try:
        connection = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=timeout_s)
    except OSError:
        return None
    with connection, contextlib.suppress(OSError):
        connection.sendall("\r\n".join(lines).encode())
        while len(answer) < _MOST_BYTES and (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            piece = connection.recv(2**16)
            if not piece:
                break
            answer += piece
    return answer


def has_nonce(answer: bytes, instance_id: str) -> bool:
    return f'"{instance_id}"'.encode() in answer


def describe_answer(answer: bytes) -> str:
    """A stranger's answer in two words, safe to print."""
    if not answer:
        return "no answer"
    status = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return f"HTTP {status[1].decode()}" if status else "not HTTP"


def read_facts(*, models: bytes, version: bytes, metrics: bytes, log: str) -> ServerFacts:
    """The facts in a server's answers, status line and headers before them, and in its log."""
    engine = _ENGINE.search(log)
    config = engine[2] if engine else ""
    cache = read_cache_config(metrics.decode("utf-8", "replace"))
    quantization, told = _word(config, "quantization"), _json(version).get("version")
    if not (isinstance(told, str) and told):
        told = engine[1] if engine else None
    cards = _json(models).get("data")
    lengths = [card.get("max_model_len") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    length = next((length for length in lengths if isinstance(length, int)), None)
    read = {
        "version": told,
        "dtype": (_word(config, "dtype") or "").removeprefix("torch.") or None,
        "quantization": "none" if quantization == "None" else quantization,
        "kv_cache_dtype": cache.get("cache_dtype") or _word(config, "kv_cache_dtype"),
        "tensor_parallel": _number(_word(config, "tensor_parallel_size")),
        "data_parallel": _number(_word(config, "data_parallel_size")),
        "max_model_len": length or _number(_word(config, "max_seq_len")),
        "chunked_prefill": TRUTH.get(_word(config, "enable_chunked_prefill") or ""),
        "prefix_caching": TRUTH.get(cache.get("enable_prefix_caching") or _word(config, "enable_prefix_caching") or ""),
        "kv_blocks": _number(cache.get("num_gpu_blocks")),
        "kv_block_tokens": _number(cache.get("block_size")),
        "kv_cache_tokens": _number(cache.get("kv_cache_size_tokens")),
    }
    return ServerFacts.model_validate(read | {"unread": tuple(name for name, value in read.items() if value is None)})


def read_cache_config(metrics: str) -> dict[str, str]:
    """What a page of /metrics says of the cache, by vLLM's names; empty where it does not."""
    found = re.search(r"^vllm:cache_config_info\{(.*)\} ", metrics, re.MULTILINE)
    return dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}


def _word(config: str, key: str) -> str | None:
    """The value of a key in the engine's line.

    >>> _word("kv_cache_dtype=auto, dtype=torch.float32, seed=0", "dtype")
    'torch.float32'
    """
    found = re.search(rf"(?<!\w){key}=([^,]+)", config)
    return found[1].strip() if found else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _json(answer: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
