"""An OpenAI server that streams what a test tells it to."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gemsmith.serve.client.stream import ChatModel


@dataclass
class Speaker:
    """Says `pieces` one after the other, `wait_s` apart, and then `ending`; `asked` are the bodies it was sent."""

    url: str = ""
    pieces: tuple[str, ...] = ("Hel", "lo")
    ending: tuple[str, ...] = ()
    status: int = 200
    wait_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def voice(self, label: str = "tuned") -> ChatModel:
        return ChatModel(label=label, url=self.url, model=f"demo-{label}")


def chunk(**values: Any) -> str:
    return "data: " + json.dumps(values)


def ended(reason: str = "stop", tokens: int = 7) -> tuple[str, ...]:
    return (
        chunk(choices=[{"delta": {}, "finish_reason": reason}]),
        chunk(choices=[], usage={"completion_tokens": tokens}),
        "data: [DONE]",
    )


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    told = Speaker(ending=ended())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "demo-tuned"}]}')

        def do_POST(self) -> None:
            told.keys.append(self.headers["Authorization"])
            told.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(told.status)
            self.end_headers()
            try:
                for piece in told.pieces:
                    self.say(chunk(choices=[{"delta": {"content": piece}, "finish_reason": None}]))
                    time.sleep(told.wait_s)
                for line in told.ending:
                    self.say(line)
            except OSError:
                told.hung_up.set()

        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield told
    with contextlib.suppress(OSError):
        server.shutdown()
    server.server_close()
