"""Whether what answers at an address is the vLLM that was started here.

It lists a random name beside the model's, which no other can.
"""

import contextlib
import re
import secrets
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from gemsmith.serve.engine import api_headers

_OPTION = "--served-model-name"
_MOST_BYTES = 2**20


def new_nonce() -> str:
    return f"gemsmith-{secrets.token_hex(8)}"


def with_nonce(command: Sequence[str], nonce: str) -> list[str]:
    """A command line of vLLM with the nonce as one more name, behind those of the last --served-model-name.

    vLLM lists and takes all of them, and calls itself by the first.
    """
    words = list(command)
    last = max(place for place, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == _OPTION)
    option, equals, value = words[last].partition("=")
    words[last : last + 1] = [option, value] if equals else [option]
    end = next((place for place in range(last + 1, len(words)) if words[place].startswith("-")), len(words))
    return [*words[:end], nonce, *words[end:]]


def ask_models(url: str, *, timeout_s: float) -> bytes | None:
    """What a server answers to GET /v1/models in the time, status line first; None where none listens."""
    return ask(url, "/v1/models", timeout_s=timeout_s)


def ask(url: str, path: str, *, timeout_s: float) -> bytes | None:
    """What a server answers to GET in the time, status line first; None where none listens.

    A socket and no HTTP client: those limit the time of each read, so that a byte now and then holds them for hours,
    and follow redirects.
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


def has_nonce(answer: bytes, nonce: str) -> bool:
    return f'"{nonce}"'.encode() in answer


def describe_answer(answer: bytes) -> str:
    """A stranger's answer in two words, safe to print."""
    if not answer:
        return "no answer"
    status = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return f"HTTP {status[1].decode()}" if status else "not HTTP"
