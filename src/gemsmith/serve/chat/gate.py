"""Who may ask the page's server, and with how much.

A site that the user visits can send requests to this machine, which their Origin tells, or let its own name point here,
which their Host tells. A program on this machine is not kept out.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 * 2**20


class Gate:
    """An ASGI middleware: 403 for who has no business here, 413 for a body of more than MOST_BYTES."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        if not _is_ours(headers):
            return await _refuse(scope, send, 403, "open the page by its own address: another site may not use it")
        body: list[Message] = []
        read_bytes = max(
            (int(value) for name, value in headers if name == "content-length" and value.isdigit()), default=0
        )
        while scope["type"] == "http" and read_bytes <= MOST_BYTES and (not body or body[-1].get("more_body")):
            body.append(await receive())
            read_bytes = max(read_bytes, sum(len(part.get("body", b"")) for part in body))
        if read_bytes > MOST_BYTES:
            return await _refuse(scope, send, 413, f"a request has at most {MOST_BYTES:,} bytes")

        async def read() -> Message:
            return body.pop(0) if body else await receive()

        return await self._app(scope, read, send)


def _is_ours(headers: list[tuple[str, str]]) -> bool:
    """Whether the request was sent to this machine by a name of its own, and by no other site's page."""
    given = {name: [value for other, value in headers if other == name] for name, _ in headers}
    hosts, origins = given.get("host", []), given.get("origin", [])
    try:
        if len(hosts) != 1 or urlsplit(f"//{hosts[0]}").hostname not in HOSTS:
            return False
    except ValueError:
        return False
    # An image or a script that another site's page asks for has no Origin; a link to the page is followed.
    foreign = given.get("sec-fetch-site") == ["cross-site"] and given.get("sec-fetch-mode") != ["navigate"]
    return not foreign and all(origin in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins)


async def _refuse(scope: Message, send: Send, status: int, line: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    return await send({"type": "http.response.body", "body": f"{line}\n".encode()})
