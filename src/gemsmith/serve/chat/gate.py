"""Who may ask the page's server, and with how much.

A site that the user visits can send requests to this machine, which their Origin tells, or let its own name point here,
which their Host tells. A program on this machine is not kept out.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_BYTES = 64 * 2**20


class Gate:
    """An ASGI middleware: 403 for who has no business here, 413 for a body of more than MOST_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def refuse(status: int, line: str) -> None:
            refusal: ASGIApp = WebSocketClose(code=1008)
            if scope["type"] == "http":
                refusal = PlainTextResponse(f"{line}\n", status, headers={"connection": "close"})
            await refusal(scope, receive, send)

        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if not _is_ours(headers):
            return await refuse(403, "open the page by its own address: another site may not use it")
        body: list[Message] = []
        read_bytes = max((int(value) for value in headers.getlist("content-length") if value.isdigit()), default=0)
        while scope["type"] == "http" and read_bytes <= MOST_BYTES and (not body or body[-1].get("more_body")):
            body.append(await receive())
            read_bytes = max(read_bytes, sum(len(part.get("body", b"")) for part in body))
        if read_bytes > MOST_BYTES:
            return await refuse(413, f"a request has at most {MOST_BYTES:,} bytes")

        async def read() -> Message:
            return body.pop(0) if body else await receive()

        return await self._app(scope, read, send)


def _is_ours(headers: Headers) -> bool:
    """Whether the request was sent to this machine by a name of its own, and by no other site's page."""
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    try:
        if len(hosts) != 1 or urlsplit(f"//{hosts[0]}").hostname not in HOSTS:
            return False
    except ValueError:
        return False
    # An image or a script that another site's page asks for has no Origin; a link to the page is followed.
    foreign = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
    return not foreign and all(origin in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins)
