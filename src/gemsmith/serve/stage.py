"""The stage `serve`, and the servers that bench and eval share with it, of weights that verify has passed."""

import contextlib
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from gemsmith.arch.lora_targets import KINDS
from gemsmith.checkpoints.folder import is_hub_id, open_checkpoint
from gemsmith.checkpoints.peft_config import read_peft_config
from gemsmith.data.image_folder import FORMAT as IMAGE_FOLDER
from gemsmith.errors import EngineError, RunError
from gemsmith.recipe.load import differing_keys, load_recipe, read_reasons, with_values
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.checksums import changed_files
from gemsmith.runs.records import DataRecord, ExportRecord, ServeRecord, VerifyRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, make_provenance, read_record, start_clock, write_record
from gemsmith.serve.client.batch import Request, ask_each
from gemsmith.serve.client.chat import TOP, AnswerTokens, Failure, difference, read_chat, read_choice, read_tokens
from gemsmith.serve.container import this_machine_as
from gemsmith.serve.server import Server, running_server
from gemsmith.serve.settings import (
    KEY_VARIABLE,
    ServedAdapter,
    ServeSettings,
    api_headers,
    base_name,
    refuse_without_template,
    settings_of,
)
from gemsmith.serve.vllm_checks import refuse_vision
from gemsmith.serve.vllm_issues import ADAPTER_IGNORED
from gemsmith.system.characters import escape_control_chars
from gemsmith.system.console import open_console, print_warnings
from gemsmith.system.files import sha256_file

# Reading less than this takes no time worth a word.
_SAID_FROM_BYTES = 2 * 10**9
_LISTED = 3
# Ids that every vocabulary has; what they mean does not matter.
PROMPTS = tuple([2, *range(first, first + 80, 10)] for first in (300, 401, 502, 603))
ANSWER_TOKENS = 4
# By how much log-probabilities may differ by rounding, where sums come in another order: of float32, of bfloat16.
_ROUNDING, _ROUNDING_OTHERWISE = {"float32": 1e-3}, 0.05


def find_verification_issue(run: Run, *, adapter: bool = False, are_here: bool = True) -> tuple[str, str] | None:
    """Why the run's merged/, or its base with adapter/, is not verified, and the command that changes it; else None.

    Of a run in a bucket the weights are not `are_here`: there no record is of other files than those beside it.
    """
    exported: ExportRecord = read_record(run, ExportRecord)
    verify = f"gemsmith verify {run.path}"
    export_again = f"gemsmith export {run.path} --force && {verify}"
    if not run.record_file("verify").exists():
        return "they were never verified", verify
    try:
        record: VerifyRecord = read_record(run, VerifyRecord)
    except (RunError, OSError):
        return "verify.json is unreadable", verify
    if record.provenance.inputs_sha256.get("export.json") != sha256_file(run.record_file("export")):
        return "they were exported again after they were verified", verify
    if not record.passed:
        failed = "; ".join(f"{check.name}: {check.detail}" for check in record.checks if check.passed is False)
        return f"verify failed: {failed or 'see verify.json'}", export_again
    problems: list[str] = []
    if adapter:
        problems, base = changed_files(run.adapter, exported.adapter), open_checkpoint(run.recipe.checkpoint)
        if exported.base_sha256 and base.fingerprint() != exported.base_sha256:
            problems.append(f"{base.folder} is not the base that the adapter was exported for")
    elif are_here:
        total_bytes = sum(file.bytes for file in exported.merged)
        if total_bytes >= _SAID_FROM_BYTES:
            told = f"comparing {len(exported.merged)} files of {run.merged} with export.json"
            open_console().print(f"{told}, {total_bytes / 1e9:.0f} GB")
        # Which also puts them into the page cache, from which vLLM loads them.
        problems = changed_files(run.merged, exported.merged)
    if not problems:
        return None
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return f"they are not what was verified: {'; '.join(problems[:_LISTED])}{more}", export_again


FIRST_PROMPT = (
    "Write a Verilog module named bus_gate with 8-bit input a, 8-bit input b and 8-bit output y. y is the bitwise AND "
    "of a and b."
)
FIRST_ANSWER_TOKENS = 64


class Servers:
    """The servers of a run: started when they are asked for, at most one at a time, none left when the block ends.

    With serve.weights: adapter, base and tuned model are two names of one server, of the base with the adapter.
    """

    def __init__(
        self,
        run: Run,
        *,
        prefix_caching: bool = False,
        skip_verify_check: bool = False,
        start: Callable[..., AbstractContextManager[Server]] = running_server,
        **where: Any,
    ) -> None:
        """`skip_verify_check`: the tuned weights are served whatever verify says of them. `where`: this_machine_as."""
        self._run, self._skip_verify_check, self._start = run, skip_verify_check, start
        self._settings = make_settings(run, prefix_caching=prefix_caching, **where)
        self.takes_images = self._settings.images
        self.serves_adapter = run.recipe.serve.weights == "adapter"  # whether base and tuned model are one server
        self.warnings: tuple[str, ...] = ()  # what a record of the tuned model's answers must say of its weights
        self.adapter_effect: float | None = None  # the most that a served adapter changes a first log-probability
        self._name = run.path.resolve().name
        self._tuned_folder = run.adapter if self.serves_adapter else run.merged
        self._checked = False
        self._stack = contextlib.ExitStack()
        self._current: tuple[Path, Server, Server] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def tuned(self) -> Server:
        """A server of the tuned weights, under the run directory's name.

        Raises RunError where they are not what verify has passed, unless `skip_verify_check`; then `warnings` says so.
        Raises EngineError where an adapter is loaded and not applied.
        """
        read_record(self._run, ExportRecord)
        return self._serve(self._tuned_folder)[1]

    def base(self) -> Server:
        """A server of the checkpoint that training started from, under the run directory's name and `-base`."""
        own_server = not self.serves_adapter
        return self._serve(open_checkpoint(self._run.recipe.checkpoint).folder if own_server else self._run.adapter)[0]

    def tuned_again(self, dead: Server) -> Server:
        """A server of the tuned weights at the address of one that has died."""
        self.stop()
        self._settings = self._settings.model_copy(update={"port": urlsplit(dead.url).port})
        return self.tuned()

    def stop(self) -> None:
        self._current = None
        self._stack.close()

    def check_verified(self) -> None:
        """Raises RunError where verify has not passed the tuned weights, unless `skip_verify_check`; see `warnings`."""
        if self._checked or (self._current is not None and self._current[0] == self._tuned_folder):
            return
        doubt = find_verification_issue(self._run, adapter=self.serves_adapter)
        if doubt is not None and not self._skip_verify_check:
            raise RunError(
                f"{self._tuned_folder}: weights not served: {doubt[0]}; run: {doubt[1]}; "
                "to serve them anyway, add --skip-verify-check to gemsmith serve, bench or eval"
            )
        doubts = () if doubt is None else (f"Served unverified weights: {doubt[0]}.",)
        self.warnings = (*doubts, *other_weights(self._run.recipe, read_record(self._run, ExportRecord).merged_into))
        self._checked = True

    def _serve(self, weights: Path) -> tuple[Server, Server]:
        """A server of merged weights, of the base, or of the base with the adapter, under both of its names."""
        if self._current is not None and self._current[0] == weights:
            self._current[1].prove()
            return self._current[1:]
        self.stop()
        run, name, settings, log, folder = self._run, self._name, self._settings, "vllm-tuned.log", weights
        if self.serves_adapter:
            config, log, folder = read_peft_config(weights), "vllm.log", open_checkpoint(run.recipe.checkpoint).folder
            refuse_vision(config)
            adapter = ServedAdapter(folder=str(weights.absolute()), rank=config.rank)
            settings = settings.model_copy(update={"adapter": adapter})
        if weights == self._tuned_folder:
            self.check_verified()
        else:
            name, log = base_name(name), "vllm-base.log"
        if folder != run.merged and is_hub_id(run.recipe.checkpoint):
            settings = settings.model_copy(update={"hub_id": run.recipe.checkpoint})
        refuse_without_template(folder, settings)
        first = tuned = self._stack.enter_context(self._start(folder, name=name, settings=settings, log=run.logs / log))
        if self.serves_adapter:
            first, expected = replace(tuned, model=base_name(name)), None  # where verify did not compute it
            with contextlib.suppress(RunError):
                expected = read_record(run, VerifyRecord).logits_effect
            self.adapter_effect = check_adapter_applied(first, tuned, expected=expected)
        self._current, self._checked = (weights, first, tuned), False
        return first, tuned


def other_weights(recipe: Recipe, merged_into: str) -> tuple[str, ...]:
    """Says it where the adapter is served on other weights than it was trained on."""
    keys = ["export.merge_into: trained"] * (merged_into == "original")
    keys += ["serve.weights: merged"] * (recipe.serve.weights == "adapter")
    if recipe.train.dtype not in KINDS or not keys:
        return ()
    return (
        f"The adapter was trained on the base in {recipe.train.dtype} and is served on its original weights: part of "
        f"what training gained may be lost. For the weights that it was trained on, set {' and '.join(keys)}.",
    )


def make_settings(run: Run, **chosen: Any) -> ServeSettings:
    """How the run's models are served; `chosen` as in settings_of."""
    return settings_of(run.recipe, images=takes_images(run), **chosen)


def with_room(run: Run, overrides: Sequence[str], tokens: int) -> Run:
    """The run, served with room for so many tokens, or as many as its model reads, unless the user has set how many."""
    key, recipe = "serve.max_model_len", run.recipe
    derived = {item.key for item in read_reasons(run.recipe_file.read_text(encoding="utf-8"))}
    if key not in derived or any(override.partition("=")[0].strip() == key for override in overrides):
        return run
    wanted = min(max(tokens, recipe.serve.max_model_len or 0), recipe_variant(recipe).context)
    return replace(run, recipe=with_values(recipe, [(key, wanted)]))


def takes_images(run: Run) -> bool:
    """Whether the run's models are served with what encodes images: where that is asked for, or its rows have some."""
    if run.recipe.serve.images or run.recipe.bench.images or run.recipe.data.format == IMAGE_FOLDER:
        return True
    try:
        return read_record(run, DataRecord).images > 0
    except RunError:
        return False


def serve(run: Run, servers: Servers) -> ServeRecord:
    """Starts the tuned model's server and asks it once; it stays up for as long as `servers` does."""
    clock = start_clock()
    server = servers.tuned()
    record = ServeRecord(
        provenance=make_provenance(run, "serve", clock, engine=server.vllm),
        warnings=servers.warnings,
        url=server.url,
        model=server.model,
        command=server.command,
        start_s=server.start_s,
        vllm=server.vllm,
        answer=ask_first(server),
        weights="adapter" if servers.serves_adapter else "merged",
        adapter_effect=servers.adapter_effect,
        server=server.facts,
    )
    return write_record(run, record)


def keep_serving(
    run: Run, machine_name: str | None, *, skip_verify_check: bool, restarts: int, ready: Callable[[], None]
) -> None:
    """Serves the tuned model until Ctrl-C, with prefix caching; recorded where the run's recipe says the same.

    `machine_name`: what this machine is; None: as it is. `ready` is called once nothing more is written to the run.
    Raises EngineError where vLLM dies, once it has been started again so many times.
    """
    where = this_machine_as(machine_name, run.recipe.hardware.catalog)
    with Servers(run, prefix_caching=True, skip_verify_check=skip_verify_check, **where) as servers:
        if differing_keys(load_recipe(run.recipe_file), run.recipe):
            ask_first(servers.tuned())
        else:
            serve(run, servers)
        server = servers.tuned()
        ready()
        print_warnings("serve", servers.warnings)
        for start in range(1, restarts + 2):
            try:
                wait_for_the_end(server, beside=base_name(server.model) if servers.serves_adapter else None)
                return
            except EngineError as error:
                if start > restarts:
                    raise
                open_console().print(f"{error}\nserve: warning: it died, and is started again ({start}/{restarts})")
            server = servers.tuned_again(server)


def wait_for_the_end(server: Server, *, beside: str | None = None) -> None:
    """Prints a curl line and waits for Ctrl-C. Raises EngineError where vLLM dies. `beside`: its other model's name."""
    console = open_console()
    if beside is not None:
        console.print(f"one server, two models: {server.model}, and the base as {beside}")
    console.print("Ctrl-C stops it. Try:")
    print(escape_control_chars(curl_line(server)), flush=True)
    try:
        server.process.wait()
    except KeyboardInterrupt:
        console.print("stopping vLLM")
        return
    server.check()


def curl_line(server: Server) -> str:
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if api_headers() else ""
    body = shlex.quote(json.dumps(_first_request(server)))
    return f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {body}"


def _first_request(server: Server) -> dict[str, Any]:
    messages = [{"role": "user", "content": FIRST_PROMPT}]
    return {"model": server.model, "messages": messages, "max_tokens": FIRST_ANSWER_TOKENS, "temperature": 0}


def ask_first(server: Server) -> str:
    """What the server answers to a first prompt. Raises EngineError where that is no answer."""
    request = Request(path="/v1/chat/completions", body=_first_request(server))
    return ask_each(server, [request], read_chat, to="a first prompt")[0].text


def check_adapter_applied(base: Server, tuned: Server, *, expected: float | None) -> float:
    """The most that the adapter changes a first token's log-probability over a few prompts.

    Raises EngineError where that is no more than rounding makes: vLLM has ignored the adapter (ADAPTER_IGNORED); and
    where the base answers otherwise beside the tuned model than alone: it got the adapter, too (SPARE_ADAPTER_ON_CPU).
    `expected`: how much verify saw the adapter change logits; one that changes next to nothing is no error.
    """
    # One at a time: in a batch, sums may come in another order.
    adapted, plain = (_ask_tokens([(server, prompt) for prompt in PROMPTS], 1) for server in (tuned, base))
    both = [(server, prompt) for prompt in PROMPTS for server in (base, tuned)]
    together = _ask_tokens(both, len(both))[::2]
    effect = max(difference(one.top[0], other.top[0]) for one, other in zip(plain, adapted, strict=True))
    strayed = max(difference(one.top[0], other.top[0]) for one, other in zip(plain, together, strict=True))
    rounding = _ROUNDING.get(base.facts.dtype or "", _ROUNDING_OTHERWISE)
    if strayed > rounding and strayed > effect / 10:
        raise EngineError(
            f"vLLM at {tuned.url} applies the adapter {tuned.model} to the base, too: next to the tuned model "
            f"{base.model} answers otherwise than alone, by {strayed:.2g} in log-probability; set serve.weights "
            "to merged"
        )
    if effect <= rounding and (expected is None or expected > 10 * rounding):
        raise EngineError(
            f"vLLM at {tuned.url} loaded the adapter {tuned.model} and ignores it ({ADAPTER_IGNORED.link}): its "
            f"answers' log-probabilities are the base's (they differ by {effect:.2g}); set serve.weights to merged"
        )
    return effect


def _ask_tokens(asked: Sequence[tuple[Server, list[int]]], concurrency: int) -> list[AnswerTokens]:
    """The greedy continuation of each prompt by ANSWER_TOKENS, by servers that are names of one."""

    def read(found: dict[str, Any] | Failure) -> AnswerTokens | Failure:
        answer = read_tokens(read_choice(found))
        if isinstance(answer, Failure) or len(answer.tokens) == ANSWER_TOKENS:
            return answer
        return Failure(reason="other tokens", detail=f"{list(answer.tokens)} where {ANSWER_TOKENS} were asked for")

    greedy = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": TOP, "ignore_eos": True}
    requests = [
        Request(path="/v1/completions", body=greedy | {"model": one.model, "prompt": ids}) for one, ids in asked
    ]
    server = asked[0][0]
    return ask_each(server, requests, read, to=server.model, concurrency=concurrency)
