"""A bucket on this machine, behind Google's JSON API of storage, which can be told to fail as the real one does.

It has what tensorstore asks for: list, read, write, delete. gcp-storage-emulator 2026.7.19 was tried first; it answers
no write of an empty object, and lists all names whatever the range.
"""

import contextlib
import io
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

FAULTS = ("503", "429", "cut before", "cut after", "no answer")
"""Two answers that ask to be asked again; a connection cut before the request is done, one cut after it is done, half
the answer told, and one on which nothing comes."""
PATIENCE_S = 1
"""After which its clients give up on an answer."""


@dataclass
class BucketServer:
    """One bucket and its server, with `requests` so far, and how many of them met which fault."""

    url: str = ""
    fault_share: float = 0.0
    seed: int = 0
    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Name -> generation, content."""
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find its gs:// here, and to look for no credentials."""
        patience = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(PATIENCE_S)}
        return {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"} | patience

    def next_fault(self) -> str | None:
        with self._lock:
            self.requests += 1
            fault = self._draw.choice(FAULTS) if self._draw.random() < self.fault_share else None
            self.faults.update([fault] if fault else [])
            return fault

    def answer(self, method: str, address: str, content: bytes, byte_range: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers: what Google's API answers, of which here only what a client reads."""
        url = urlsplit(address)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        _, _, name = url.path.partition("/o/")
        with self._lock:
            if method == "POST":
                return self._write(query["name"], content)
            if not name:
                return self._list(query)
            found = self.objects.get(unquote(name))
            if found is None:
                return 404, b"{}", {}
            if method == "DELETE":
                del self.objects[unquote(name)]
                return 204, b"", {}
            return _read(*found, byte_range)

    def _write(self, name: str, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        generation = self.objects.get(name, (0, b""))[0] + 1
        self.objects[name] = (generation, content)
        return 200, json.dumps(self._describe(name)).encode(), {}

    def _list(self, query: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        first, end = query.get("startOffset", ""), query.get("endOffset")
        names = sorted(name for name in self.objects if name >= first and (end is None or name < end))
        return 200, json.dumps({"items": [self._describe(name) for name in names]}).encode(), {}

    def _describe(self, name: str) -> dict[str, str]:
        generation, content = self.objects[name]
        return {"name": name, "generation": str(generation), "size": str(len(content))}


def _read(generation: int, content: bytes, byte_range: str) -> tuple[int, bytes, dict[str, str]]:
    """`byte_range` is empty, or bytes=FIRST-LAST with LAST left out where it is the end."""
    headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
    if not byte_range:
        return 200, content, headers
    first, _, last = byte_range.removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last) + 1 if last else len(content), len(content))
    if begin >= end:
        return 416, b"", headers
    return 206, content[begin:end], headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}


@contextlib.contextmanager
def bucket_server(*, fault_share: float = 0.0, seed: int = 0) -> Iterator[BucketServer]:
    """The server of a bucket of any name, until the block ends.

    `fault_share` of the requests, drawn by the seed, meet one of FAULTS.
    """
    bucket = BucketServer(fault_share=fault_share, seed=seed)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = bucket.next_fault()
            if fault and fault.isdecimal():
                self.reply(int(fault), b"", {})
                return
            self.close_connection = fault is not None
            if fault == "no answer":
                time.sleep(60 * PATIENCE_S)
            if fault in ("cut before", "no answer"):
                return
            answer = bucket.answer(self.command, self.path, content, self.headers.get("Range") or "")
            if fault is None:
                self.reply(*answer)
                return
            socket, self.wfile = self.wfile, io.BytesIO()
            self.reply(*answer)
            whole, self.wfile = self.wfile.getvalue(), socket
            self.wfile.write(whole[: len(whole) // 2])

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.do()

        def do_POST(self) -> None:
            self.do()

        def do_DELETE(self) -> None:
            self.do()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Says nothing of a client that was killed."""

    server = Server(("127.0.0.1", 0), Handler)
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
