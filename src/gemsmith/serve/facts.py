"""Whether what answers is the vLLM that was started here, and what it says of itself, in its log and its answers.

A server that is ours lists a random name beside the model's, which no other can.
"""

import contextlib
import json
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemsmith.runs.records import ServerFacts
from gemsmith.serve.settings import api_headers

_OPTION = "--served-model-name"
_MOST_BYTES = 2**20
_TIMEOUT_S = 10.0
TRUTH = {"True": True, "False": False}
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
# vLLM's one line about its engine, with everything that it has settled on (vllm/config/vllm.py, __str__, 0.32.0).
_ENGINE = re.compile(r"Initializing a V\d LLM engine \(v?([^)]+)\) with config: (.*)")


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


def ask_facts(url: str, *, models: bytes, log: Path) -> ServerFacts:
    """What the server at the address says of itself; `models` is its answer to /v1/models.

    /server_info would give all in one, but only beside switches that let a client run code there.
    """
    version, metrics = (ask(url, path, timeout_s=_TIMEOUT_S) or b"" for path in ("/version", "/metrics"))
    text = log.read_text(encoding="utf-8", errors="replace")
    return read_facts(models=models, version=version, metrics=metrics, log=text)


def read_facts(*, models: bytes, version: bytes, metrics: bytes, log: str) -> ServerFacts:
    """The facts in a server's answers, status line and headers before them, and in its log."""
    engine = _ENGINE.search(log)
    config = engine[2] if engine else ""
    cache = read_cache_config(_body(metrics))
    quantization, told = _word(config, "quantization"), _json(version).get("version")
    if not (isinstance(told, str) and told):
        told = engine[1] if engine else None
    cards = _json(models).get("data")
    lengths = [card.get("max_model_len") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    length = next((length for length in lengths if isinstance(length, int)), None)
    prefix_caching = cache.get("enable_prefix_caching") or _word(config, "enable_prefix_caching")
    read = {
        "version": told,
        "dtype": (_word(config, "dtype") or "").removeprefix("torch.") or None,
        "quantization": "none" if quantization == "None" else quantization,
        "kv_cache_dtype": cache.get("cache_dtype") or _word(config, "kv_cache_dtype"),
        "tensor_parallel": _number(_word(config, "tensor_parallel_size")),
        "data_parallel": _number(_word(config, "data_parallel_size")),
        "max_model_len": length or _number(_word(config, "max_seq_len")),
        "chunked_prefill": TRUTH.get(_word(config, "enable_chunked_prefill") or ""),
        "prefix_caching": TRUTH.get(prefix_caching or ""),
        "kv_blocks": _number(cache.get("num_gpu_blocks")),
        "kv_block_tokens": _number(cache.get("block_size")),
        "kv_cache_tokens": _number(cache.get("kv_cache_size_tokens")),
    }
    return ServerFacts.model_validate(read | {"unread": tuple(name for name, value in read.items() if value is None)})


def read_cache_config(metrics: str) -> dict[str, str]:
    """What a page of /metrics says of the cache, by vLLM's names; empty where it does not."""
    found = _INFO.search(metrics)
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


def _body(answer: bytes) -> str:
    return answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")


def _json(answer: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(_body(answer))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
