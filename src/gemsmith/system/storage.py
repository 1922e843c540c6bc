"""A folder in a bucket, object by object, through tensorstore: gs://, and file:// in tests and on a laptop.

What is needed of the store, which Google's has: an object is written whole or not at all, and a read or a list after a
write that has ended sees it. What is more than one object is made whole by order: what it consists of first, then the
object that says that it is there (see launch.sync).
"""

import contextlib
import json
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gemsmith.errors import MachineError, RunError, first_line
from gemsmith.system.files import bound_bucket_waits

_PIECE_BYTES = 64 * 2**20
# tensorstore's own would ask for a quarter of an hour where there is no network or no credentials; these for 80 s.
_RETRIES = {"max_retries": 8, "initial_delay": "1s", "max_delay": "16s"}
# Before a request is made again whose answer was broken.
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
# tensorstore itself asks again after most failures, but takes an answer whose connection was cut within its head for a
# whole one without a body: then it finds no JSON in it, or not the range that it asked for, or no byte.
_BROKEN = ("Failed to parse", "OUT_OF_RANGE", "Expecting value", "Content-Range header")
# So many answers without a byte are believed.
_EMPTY_READS = 3
T = TypeVar("T")


class Bucket:
    """The objects below one address, such as gs://bucket/folder. Raises MachineError where it cannot be reached."""

    def __init__(self, url: str) -> None:
        bound_bucket_waits()
        import tensorstore

        self.url = url.rstrip("/")
        _check_name_server(self.url)
        with _reaching(self.url):
            context = tensorstore.Context({"gcs_request_retries": _RETRIES})
            self._store = tensorstore.KvStore.open(self.url + "/", context=context).result()

    def names(self, prefix: str = "") -> list[str]:
        import tensorstore

        # The range ends before the first name behind all that begin with the prefix.
        ends = (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ()
        found = self._ask(lambda: self._store.list(tensorstore.KvStore.KeyRange(*ends)).result())
        # One that ends in a slash is how the console and gcsfuse say that there is a folder.
        return sorted(key.decode() for key in found if not key.endswith(b"/"))

    def read(self, name: str, byte_range: slice | None = None) -> bytes | None:
        """The object, or some of its bytes; None where there is no such object."""
        content = b""
        for _ in range(_EMPTY_READS):
            found = self._ask(lambda: self._store.read(name, byte_range=byte_range or slice(0, None)).result())
            if found.state != "value":
                return None
            if content := found.value:
                break
        return content

    def write(self, name: str, content: bytes) -> None:
        self._ask(lambda: self._store.write(name, content).result())

    def delete(self, name: str) -> None:
        self._ask(lambda: self._store.write(name, None).result())

    def download(self, name: str, target: Path) -> None:
        """Copies an object into a file, which is whole or not there. Weights are copied piece by piece."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("wb") as file:
            for begin, end in self._byte_ranges(name):
                content = self.read(name, slice(begin, end))
                if content is None:
                    raise RunError(f"{self.url}/{name}: was deleted while it was read; run the same command again")
                file.write(content)
        partial.replace(target)

    def generation(self, name: str) -> str:
        """The version of an object, which another write changes. Raises MachineError where there is none."""
        return str(self._ask(lambda: self._store.read(name, byte_range=slice(0, 1)).result()).stamp.generation.hex())

    def _byte_ranges(self, name: str) -> Iterator[tuple[int, int | None]]:
        """Byte ranges that cover an object; of weights several, by their header: tensorstore does not tell sizes."""
        if not name.endswith(".safetensors"):
            yield 0, None
            return
        header_bytes = int.from_bytes(self.read(name, slice(0, 8)) or b"", "little")
        with _reaching(f"{self.url}/{name}"):
            header = json.loads(self.read(name, slice(8, 8 + header_bytes)) or b"{}")
        entries = [entry for key, entry in header.items() if key != "__metadata__"]
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in entries), default=0)
        yield from ((begin, min(begin + _PIECE_BYTES, end)) for begin in range(0, end, _PIECE_BYTES))

    def _ask(self, operation: Callable[[], T]) -> T:
        with _reaching(self.url):
            for pause_s in _PAUSES_S:
                try:
                    return operation()
                except ValueError as error:
                    if not any(sign in str(error) for sign in _BROKEN):
                        raise
                time.sleep(pause_s)
            return operation()

    def upload(self, file: Path, name: str) -> None:
        """Copies a file into an object; it is held in memory meanwhile."""
        self.write(name, file.read_bytes())


def _check_name_server(url: str) -> None:
    """Raises MachineError where Google's host has no address, which tensorstore would ask for again for 80 s."""
    if not url.startswith("gs://") or "TENSORSTORE_GCS_HTTP_URL" in os.environ or urllib.request.getproxies():
        return
    why: str | None = None
    for pause_s in (0.0, 1.0, 2.0):
        time.sleep(pause_s)
        try:
            socket.getaddrinfo("storage.googleapis.com", 443)
        except OSError as error:
            why = error.strerror
        else:
            return
    raise MachineError(
        f"{url}: cannot be reached: no address of storage.googleapis.com is found ({why}); see to the network"
    )


def files_below(folder: Path, *, hidden: bool = False) -> Iterator[tuple[str, Path]]:
    """Name and path of every file of a folder, in order; of a run's the hidden ones are locks and halves of files."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and (hidden or not any(part.startswith(".") for part in parts)):
            yield "/".join(parts), path


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turns tensorstore's errors into one line."""
    try:
        yield
    except (ValueError, TimeoutError) as error:
        raise MachineError(
            f"{url}: cannot be reached ({first_line(error)}); check the address, and log in with: gcloud auth "
            "application-default login"
        ) from None
