"""The stage `serve`, and the servers that bench and eval share with it."""

import contextlib
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console

from gemsmith.checkpoint import open_checkpoint
from gemsmith.errors import CheckpointError, EngineError
from gemsmith.records import Origin, ServeRecord
from gemsmith.run import Clock, Run, make_origin, read_record, start_clock, write_record
from gemsmith.serve.engine import KEY_VARIABLE, ServeSettings, api_headers, has_chat_template
from gemsmith.serve.server import Server, running_server

FIRST_PROMPT = (
    "Write a Verilog module named bus_gate with 8-bit input a, 8-bit input b and 8-bit output y. y is the bitwise AND of a and b."
)
FIRST_ANSWER_TOKENS = 64


class Servers:
    """The servers of a run: started when they are asked for, at most one at a time, none left when the block ends."""

    def __init__(
        self, run: Run, *, prefix_caching: bool = False, start: Callable[..., AbstractContextManager[Server]] = running_server
    ) -> None:
        self._run = run
        self._settings = make_settings(run, prefix_caching=prefix_caching)
        self._start = start
        self._stack = contextlib.ExitStack()
        self._current: tuple[Path, Server] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def tuned(self) -> Server:
        """A server of the merged weights, under the run directory's name."""
        read_record(self._run, "export")
        return self._serve(self._run.merged, self._name, "vllm-tuned.log")

    def base(self) -> Server:
        """A server of the checkpoint that training started from, under the run directory's name and `-base`."""
        return self._serve(open_checkpoint(self._run.recipe.checkpoint).folder, f"{self._name}-base", "vllm-base.log")

    def stop(self) -> None:
        """Stops the server that runs, if one does."""
        self._current = None
        self._stack.close()

    @property
    def _name(self) -> str:
        return self._run.path.resolve().name

    def _serve(self, folder: Path, name: str, log: str) -> Server:
        if self._current is not None and self._current[0] == folder:
            self._current[1].check()
            return self._current[1]
        self.stop()
        if self._settings.chat_template is None and not has_chat_template(folder):
            raise CheckpointError(f"{folder}: has no chat template, so chats cannot be rendered; name one as data.template")
        server = self._stack.enter_context(self._start(folder, name=name, settings=self._settings, log=self._run.logs / log))
        self._current = (folder, server)
        return server


def make_settings(run: Run, *, prefix_caching: bool = False) -> ServeSettings:
    """The recipe's section `serve`, with the seed and the chat template that the whole run uses."""
    serve = run.recipe.serve
    return ServeSettings(
        python=serve.python,
        host=serve.host,
        port=serve.port,
        max_model_len=serve.max_model_len,
        dtype=serve.dtype,
        seed=run.recipe.seed,
        chat_template=run.recipe.data.template,
        prefix_caching=prefix_caching,
        arguments=serve.arguments,
        start_timeout_s=serve.start_timeout_s,
    )


def serve(run: Run, servers: Servers) -> ServeRecord:
    """Starts the tuned model's server and asks it once; it stays up for as long as `servers` does."""
    clock = start_clock()
    server = servers.tuned()
    record = ServeRecord(
        origin=origin_with_engine(run, "serve", clock, server),
        url=server.url,
        model=server.model,
        command=server.command,
        start_s=server.start_s,
        vllm=server.vllm,
        answer=_ask(server),
    )
    write_record(run, record)
    return record


def keep_serving(run: Run) -> None:
    """Serves the tuned model until Ctrl-C, and prints a curl line that works.

    Raises EngineError where vLLM dies. Prefix caching is on, unlike under bench, where it would falsify the times.
    """
    with Servers(run, prefix_caching=True) as servers:
        serve(run, servers)
        server = servers.tuned()
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("Ctrl-C stops it. Try:")
        print(curl_line(server), flush=True)
        try:
            server.process.wait()
        except KeyboardInterrupt:
            console.print("stopping vLLM")
            return
        server.check()


def curl_line(server: Server) -> str:
    """A shell command that asks the server something."""
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if api_headers() else ""
    body = shlex.quote(json.dumps(_first_request(server)))
    return f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {body}"


def origin_with_engine(run: Run, stage: str, clock: Clock, server: Server, **more: Any) -> Origin:
    """The record's origin with vLLM's version in it, which lives in an environment of its own."""
    origin = make_origin(run, stage, clock, **more)
    package, _, version = server.vllm.partition(" ")
    return origin.model_copy(update={"versions": origin.versions | {package: version}})


def _first_request(server: Server) -> dict[str, Any]:
    messages = [{"role": "user", "content": FIRST_PROMPT}]
    return {"model": server.model, "messages": messages, "max_tokens": FIRST_ANSWER_TOKENS, "temperature": 0}


def _ask(server: Server) -> str:
    url = f"{server.url}/v1/chat/completions"
    try:
        response = httpx.post(url, json=_first_request(server), headers=api_headers(), timeout=600, trust_env=False)
    except httpx.TransportError as error:
        server.check()
        raise EngineError(f"vLLM at {server.url} did not answer a first prompt ({error}); its log is {server.log}") from None
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"vLLM at {server.url} answered a first prompt with {response.status_code}: {response.text[:300]}")
    return str(response.json()["choices"][0]["message"]["content"] or "")
