"""What is load-tested: an address that answers as OpenAI's API does, whoever started what is behind it."""

import asyncio
import contextlib
import email.utils
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx

from gemsmith.errors import CheckpointError, EngineError, InputError, suggest
from gemsmith.serve.client.chat import MOST_BYTES, Failure, read_count, read_object
from gemsmith.serve.server import Server
from gemsmith.serve.settings import KEY_VARIABLE, client_options
from gemsmith.system.files import sha256_file, sha256_json

KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")
# Before the second and later tries, and none after that. Together longer than the 5 s after which vLLM's watchdog ends
# a server whose engine is dead: a request that such a server refuses must not be taken for a failed one.
WAITS_S = (0.5, 1.0, 2.0, 4.0)
# The longest that a server's own Retry-After is waited for.
MOST_WAIT_S = 30.0
_BUSY = (429, 502, 503, 504)
_TIMEOUT_S = 30.0
_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A model at an address, such as http://127.0.0.1:8000."""

    url: str
    model: str
    tokenizer: Path  # a folder with the tokenizer.json of the model
    facts: Mapping[str, str] = field(default_factory=dict)  # what the numbers of a cell that is measured here depend on
    prefix_caching: bool | None = None  # None: not known without asking
    check: Callable[[], None] = lambda: None  # raises EngineError where its process has ended; costs nothing
    prove: Callable[[], None] = lambda: None  # raises EngineError where it does not answer any more; asks it


@dataclass(frozen=True, kw_only=True)
class RemoteServer:
    """A model of a server that somebody else runs: its address without /v1, and what it lists that makes answers."""

    log: ClassVar[str] = "the log of that server"
    url: str
    model: str
    root: str | None = None  # what it says its weights are
    parent: str | None = None  # what it says an adapter is of
    max_model_len: int | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return key_headers()

    @property
    def digest(self) -> str:
        """SHA-256 of all that is known of what makes its answers."""
        return sha256_json([self.url, self.model, self.root])

    def check(self) -> None:
        """Raises EngineError where nobody listens at its address any more; asks it."""
        try:
            options: dict[str, Any] = {"headers": self.headers, "timeout": _CONNECT_S, **client_options(self.url)}
            with httpx.stream("GET", f"{self.url}/v1/models", **options):
                return
        except httpx.ConnectError as error:
            raise EngineError(
                f"{self.url} does not answer any more ({error}); the answers so far are kept, and the same command "
                "asks for the others"
            ) from None
        except httpx.HTTPError:  # it is there, and busy
            return


AnyServer = Server | RemoteServer


def find_server(url: str, model: str | None, *, of: str = "") -> RemoteServer:
    """The model of this name at the address, or its only one. Raises InputError as find_models."""
    (server,) = find_models(url, () if model is None else (model,), of=of)
    return server


def endpoint_of(server: Server, *, weights_sha256: str) -> Endpoint:
    """That of a server which Gemsmith has started."""
    words = list(server.command[1:])
    if "--port" in words:  # another at each start, and no part of what makes the answers
        place = words.index("--port")
        del words[place : place + 2]
    return Endpoint(
        url=server.url,
        model=server.model,
        tokenizer=server.folder,
        facts={"model": server.model, "weights": weights_sha256, "vllm": server.vllm, "command": " ".join(words)},
        prefix_caching="--enable-prefix-caching" in server.command,
        check=server.check,
        prove=server.prove,
    )


def find_endpoint(url: str, model: str | None, tokenizer: Path | None) -> Endpoint:
    """That of any OpenAI-compatible server. Raises InputError as find_models, CheckpointError without its tokenizer."""
    server = find_server(url, model)
    # The one that is given, or that the server says it serves, where that is on this machine.
    folder = tokenizer or (Path(server.root) if isinstance(server.root, str) and server.root else None)
    if folder is None or not (folder / "tokenizer.json").is_file():
        if tokenizer is not None:
            raise CheckpointError(
                f"--tokenizer {tokenizer}: has no tokenizer.json; give the folder of the model's weights"
            )
        raise InputError(
            "--tokenizer is missing: prompts of an exact number of tokens need the model's; give a folder with its "
            "tokenizer.json"
        )
    facts = {key: str(value) for key, value in asdict(server).items() if value is not None}
    version = _ask(f"{server.url}/version")
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        facts["version"] = version["version"]

    def prove() -> None:  # a server that refuses is there
        if isinstance(found := _ask(f"{server.url}/v1/models"), Failure) and found.reason == "no answer":
            raise EngineError(f"{server.url} does not answer any more ({found.detail})")

    return Endpoint(
        url=server.url,
        model=server.model,
        tokenizer=folder,
        facts=facts | {"tokenizer": sha256_file(folder / "tokenizer.json")},
        prove=prove,
    )


def find_models(url: str, names: Sequence[str], *, of: str = "") -> list[RemoteServer]:
    """The models of these names at the address; without names its only one.

    Raises InputError where it does not answer, has no such model, or has several and none is named, naming the options
    --url and --model, with `of` before their names, such as "base-".
    """
    parsed = httpx.URL()
    with contextlib.suppress(httpx.InvalidURL):
        parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"--{of}url {url}: must be http://host:port or https://host")
    if parsed.userinfo or parsed.query:
        raise InputError(
            f"--{of}url: has a password or a query in it, which would be in records; put a key into "
            f"${' or $'.join(KEY_VARIABLES)}"
        )
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    found = _ask(f"{url}/v1/models")
    if isinstance(found, Failure):
        key = f"; set ${' or $'.join(KEY_VARIABLES)}" if found.reason in ("http 401", "http 403") else ""
        raise InputError(
            f"--{of}url {url}: GET /v1/models: {found.reason} ({found.detail}){key or '; is the server up?'}"
        )
    models = found.get("data")
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise InputError(f"--{of}url {url}: GET /v1/models lists no model, so it is not OpenAI's API")
    cards: dict[str, dict[str, Any]] = {str(card.get("id")): card for card in models}
    # vLLM lists a model once for each of its names; the first is the one that it goes by.
    first = {json.dumps(card.get("root", name)): name for name, card in reversed(cards.items())}
    known = [name for name in cards if name in first.values()]
    if not names and len(known) > 1:
        raise InputError(f"--{of}model is missing; {url} has {', '.join(known)}")
    servers = []
    for one in dict.fromkeys(names or known):
        if one not in cards:
            raise InputError(f"--{of}model {one}: {url} has {', '.join(known)}{suggest(one, known)}; name one of them")
        root, parent = (cards[one].get(key) for key in ("root", "parent"))
        # Of an adapter vLLM gives no length.
        lengths = (card.get("max_model_len") for card in (cards[one], cards.get(str(parent), {})))
        length = next(filter(None, map(read_count, lengths)), None)
        servers.append(RemoteServer(url=url, model=one, root=root, parent=parent, max_model_len=length))
    return servers


def api_key() -> str | None:
    """The key that requests are sent with, from the environment."""
    return next((key for name in KEY_VARIABLES if (key := os.environ.get(name))), None)


def key_headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}


def ask_until_ready(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """What `ask` returns; asked again a few times where a server is busy, no sooner than its Retry-After says."""
    for wait_s in WAITS_S:
        response = ask()
        if response.status_code not in _BUSY:
            return response
        response.close()
        time.sleep(max(wait_s, retry_after_s(response)))
    return ask()


def retry_after_s(response: httpx.Response) -> float:
    """The seconds, at most MOST_WAIT_S, that a Retry-After asks for, a number or a date (RFC 9110, 10.2.3); else 0."""
    header, wait_s = response.headers.get("Retry-After", ""), 0.0
    try:
        wait_s = float(header)
    except ValueError:
        with contextlib.suppress(ValueError, OverflowError):
            wait_s = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    return min(max(0.0, wait_s), MOST_WAIT_S) if math.isfinite(wait_s) else 0.0


async def ask_whole(client: httpx.AsyncClient, method: str, url: str, **asked: Any) -> httpx.Response:
    """The whole answer, without what is longer than MOST_BYTES."""
    body = bytearray()
    async with client.stream(method, url, **asked) as response:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > MOST_BYTES:
                break
    waiting = {"Retry-After": response.headers.get("Retry-After", "")}
    return httpx.Response(response.status_code, headers=waiting, content=bytes(body))


def _ask(url: str) -> dict[str, Any] | Failure:
    async def ask() -> httpx.Response:
        async with asyncio.timeout(_TIMEOUT_S), httpx.AsyncClient(headers=key_headers(), **client_options(url)) as one:
            return await ask_whole(one, "GET", url, timeout=_TIMEOUT_S)

    try:
        response = ask_until_ready(lambda: asyncio.run(ask()))
    except TimeoutError:
        return Failure(reason="no answer", detail=f"not within {_TIMEOUT_S:.0f} s")
    except httpx.HTTPError as error:
        return Failure(reason="no answer", detail=f"{type(error).__name__} {error}".strip())
    return read_object(response.status_code, response.content)
