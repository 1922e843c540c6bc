"""vLLM's bench client as a process: started once, handed one cell after another, ended with the block."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemsmith.bench.cell import LoadSpec
from gemsmith.bench.requests import ImageRows, make_prompts
from gemsmith.errors import EngineError
from gemsmith.recipe.serving import AT_ONCE
from gemsmith.serve.client.endpoint import Endpoint, api_key
from gemsmith.serve.settings import OFFLINE, clean_environment
from gemsmith.serve.vllm_issues import ON_CPU
from gemsmith.system.files import sha256_file, write_text
from gemsmith.system.process import last_lines, refuse_full_disk, supervised

CLIENT = Path(__file__).with_name("client.py")
# Only of a burst, which has no requests of its own to warm up with.
WARMUP_REQUESTS = 2
POLL_S = 0.2
ASKED, HEARD, DEVICES = "asked.jsonl", "heard", "devices.jsonl"
_TEXTS = {"backend": "openai", "dataset-name": "custom"}
_CHATS = {"backend": "openai-chat", "endpoint": "/v1/chat/completions", "dataset-name": "custom_image"}
# The client has nothing to save when it is told to end.
GRACE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client that runs; its files are in `folder`."""

    endpoint: Endpoint
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    rows: ImageRows | None = None  # what requests are made of; None: of random text


@contextlib.contextmanager
def running_client(
    python: Path, endpoint: Endpoint, folder: Path, *, rows: ImageRows | None = None
) -> Iterator[Client]:
    asked, heard, log = folder / ASKED, folder / HEARD, folder / "client.log"
    write_text(asked, "")
    command = [str(python), str(CLIENT), str(asked), str(heard)]
    # vLLM imports torchvision where it is; on_cpu declares nothing where it need not.
    environment = clean_environment() | OFFLINE | {"NO_PROXY": "*", "no_proxy": "*", "PYTHONPATH": ON_CPU}
    if key := api_key():
        environment["OPENAI_API_KEY"] = key
    with supervised(command, environment=environment, log=log, grace_s=GRACE_S) as process:
        yield Client(endpoint=endpoint, folder=folder, log=log, process=process, rows=rows)


def measure(client: Client, ask: LoadSpec, *, heard: Callable[[int], None] = lambda _: None) -> Any:
    """What the client saved of one cell, and `prompts_sha256` and `devices`.

    `heard` gets how many requests have ended. Raises EngineError where client or server ends, or no token comes.
    """
    prompts, result = client.folder / f"{ask.name}-prompts.jsonl", client.folder / ask.result_file
    result.unlink(missing_ok=True)
    if client.rows is None:
        tokenizer, tokens = client.endpoint.tokenizer, ask.load.input_tokens
        texts = make_prompts(tokenizer, tokens=tokens, prompts=ask.requests, seed=ask.seed)
        write_text(prompts, "".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    else:
        client.rows.write_requests(prompts, requests=ask.requests, seed=ask.seed)
    arguments = client_arguments(client.endpoint, ask, client.folder, images=client.rows is not None)
    seen = len(_read_devices(client))
    with (client.folder / ASKED).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"arguments": arguments, "timeout_s": ask.timeout_s}) + "\n")
    found = _wait_for(client, ask, heard)
    digest = sha256_file(prompts)
    prompts.unlink()  # as many bytes as all prompts have, and made again from the seed
    if not isinstance(found, dict):
        return found
    # Where none can be watched, the only line says why.
    lines = _read_devices(client)
    return found | {"prompts_sha256": digest, "devices": lines[seen:] or lines[-1:]}


def _read_devices(client: Client) -> list[Any]:
    if urlsplit(client.endpoint.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return ["the server is on another machine"]
    file = client.folder / DEVICES
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def client_arguments(endpoint: Endpoint, ask: LoadSpec, folder: Path, *, images: bool = False) -> list[str]:
    """The arguments of `vllm bench serve` for one cell; prompts with images are chats, which take them in parts."""
    load = ask.load
    asked = {
        **(_CHATS if images else _TEXTS),
        "base-url": endpoint.url,
        "model": endpoint.model,
        "served-model-name": endpoint.model,
        "tokenizer": endpoint.tokenizer,
        "dataset-path": folder / f"{ask.name}-prompts.jsonl",
        "custom-output-len": load.output_tokens,
        "num-prompts": ask.requests,
        "request-rate": load.request_rate,
        "seed": ask.seed,
        "temperature": 0,
        "num-warmups": WARMUP_REQUESTS if load.request_rate >= AT_ONCE and not ask.count.warmup else 0,
        # It asks again and again, and says nothing of it; whether the server is there has been seen.
        "ready-check-timeout-sec": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,90,99",
        "result-dir": folder,
        "result-filename": ask.result_file,
        **({} if load.max_concurrency is None else {"max-concurrency": load.max_concurrency}),
    }
    flags = "--skip-chat-template --disable-shuffle --ignore-eos --save-result --save-detailed --disable-tqdm"
    return [*(word for key, value in asked.items() for word in (f"--{key}", str(value))), *flags.split()]


def failure_lines(log: Path) -> str:
    """The client's own lines on why requests failed; the end of its output where it has none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines if line.startswith("Error ")) or last_lines(log)


def _wait_for(client: Client, ask: LoadSpec, heard: Callable[[int], None]) -> Any:
    """The cell's result once it is there whole."""
    before, heard_s = _heard(client), time.monotonic()
    while True:
        ended = client.process.poll() is not None  # asked first: what a client that has ended wrote is all there
        try:
            return json.loads((client.folder / ask.result_file).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not there yet, or half of it
            client.endpoint.check()
            if ended:
                refuse_full_disk(client.log)
                raise EngineError(
                    f"bench: {ask}: vLLM's bench client failed (exit code {client.process.returncode}); the end of its "
                    f"output:\n{last_lines(client.log)}"
                ) from None
        if (now := _heard(client)) != before:
            before, heard_s = now, time.monotonic()
            heard(now[1] if now else 0)
        if time.monotonic() - heard_s > ask.idle_timeout_s:
            raise EngineError(
                f"bench: {ask}: no token has come for {ask.idle_timeout_s:.0f} s, and vLLM's bench client has not "
                f"ended its requests; see {client.log}"
            )
        time.sleep(POLL_S)


def _heard(client: Client) -> tuple[int, int] | None:
    """When the client last heard a token, by the clock of its file, and how many requests had ended."""
    file = client.folder / HEARD
    try:
        return file.stat().st_mtime_ns, int(file.read_text(encoding="utf-8") or 0)
    except FileNotFoundError:
        return None
