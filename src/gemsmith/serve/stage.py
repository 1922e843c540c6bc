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

from gemsmith.characters import spell_out
from gemsmith.checkpoint import open_checkpoint
from gemsmith.errors import CheckpointError, EngineError, RunError
from gemsmith.provenance import Clock, start_clock
from gemsmith.recipe import differing_keys
from gemsmith.recipe_file import load_recipe
from gemsmith.records import ExportRecord, Origin, ServeRecord
from gemsmith.run import Run, make_origin, read_record, write_record
from gemsmith.serve.chat import Failure, read_chat, read_object
from gemsmith.serve.engine import KEY_VARIABLE, ServeSettings, api_headers, has_chat_template
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.verified import find_doubt
from gemsmith.terminal import open_console

FIRST_PROMPT = (
    "Write a Verilog module named bus_gate with 8-bit input a, 8-bit input b and 8-bit output y. y is the bitwise AND "
    "of a and b."
)
FIRST_ANSWER_TOKENS = 64


class Servers:
    """The servers of a run: started when they are asked for, at most one at a time, none left when the block ends."""

    def __init__(
        self,
        run: Run,
        *,
        prefix_caching: bool = False,
        unverified: bool = False,
        start: Callable[..., AbstractContextManager[Server]] = running_server,
    ) -> None:
        """`unverified`: the merged weights are served whatever verify says of them."""
        self._run = run
        self._unverified = unverified
        self._notices: tuple[str, ...] = ()
        self._checked = False
        self._settings = make_settings(run, prefix_caching=prefix_caching)
        self._start = start
        self._stack = contextlib.ExitStack()
        self._current: tuple[Path, Server] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a record of the tuned model's answers must say of its weights."""
        return self._notices

    def tuned(self) -> Server:
        """A server of the merged weights, under the run directory's name.

        Raises RunError where they are not what verify has passed, unless that is insisted on; then `notices` says so.
        """
        read_record(self._run, ExportRecord)
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

    def check_verified(self) -> None:
        """Raises RunError where verify has not passed the merged weights, unless that is insisted on; see `notices`."""
        if self._checked or (self._current is not None and self._current[0] == self._run.merged):
            return
        doubt = find_doubt(self._run)
        if doubt is not None and not self._unverified:
            raise RunError(
                f"{self._run.merged}: weights not served: {doubt.reason}; run: {doubt.remedy}; "
                "to serve these weights all the same, add --unverified to gemsmith serve, bench or eval"
            )
        self._notices = () if doubt is None else (f"Served unverified weights: {doubt.reason}.",)
        self._checked = True

    def _serve(self, folder: Path, name: str, log: str) -> Server:
        if self._current is not None and self._current[0] == folder:
            self._current[1].prove()
            return self._current[1]
        self.stop()
        if folder == self._run.merged:
            self.check_verified()
        if self._settings.chat_template is None and not has_chat_template(folder):
            raise CheckpointError(
                f"{folder}: has no chat template, so chats cannot be rendered; name one as data.template"
            )
        server = self._stack.enter_context(
            self._start(folder, name=name, settings=self._settings, log=self._run.logs / log)
        )
        self._current, self._checked = (folder, server), False
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
        notices=servers.notices,
        url=server.url,
        model=server.model,
        command=server.command,
        start_s=server.start_s,
        vllm=server.vllm,
        answer=_ask(server),
    )
    write_record(run, record)
    return record


def keep_serving(run: Run, *, unverified: bool = False, ready: Callable[[], None] = lambda: None) -> None:
    """Serves the tuned model until Ctrl-C, and prints a curl line; recorded where the run's recipe says the same.

    `ready` is called once nothing more is written to the run.

    Raises EngineError where vLLM dies. Prefix caching is on, unlike under bench, where it would falsify the times.
    """
    with Servers(run, prefix_caching=True, unverified=unverified) as servers:
        if differing_keys(load_recipe(run.recipe_file), run.recipe):
            _ask(servers.tuned())
        else:
            serve(run, servers)
        server = servers.tuned()
        ready()
        console = open_console()
        for notice in servers.notices:
            console.print(f"serve: notice: {notice}", style="yellow")
        console.print("Ctrl-C stops it. Try:")
        print(spell_out(curl_line(server)), flush=True)
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
    except httpx.RequestError as error:
        server.check()
        raise EngineError(
            f"vLLM at {server.url} did not answer a first prompt ({error}); its log is {server.log}"
        ) from None
    if response.status_code != httpx.codes.OK:
        raise EngineError(
            f"vLLM at {server.url} answered a first prompt with {response.status_code}: {response.text[:300]}"
        )
    found = read_object(response.status_code, response.content)
    reply = found if isinstance(found, Failure) else read_chat(found)
    if isinstance(reply, Failure):
        raise EngineError(
            f"vLLM at {server.url} answered a first prompt with {reply.reason}: {reply.detail}; its log is {server.log}"
        )
    return reply.text
