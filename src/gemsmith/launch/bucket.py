"""A folder in a bucket, object by object, through tensorstore: gs://, and file:// in tests and on a laptop.

What a step here needs of the store, which Google's has:

    an object    is written whole or not at all; a reader sees the old one or the new one
    a read       after a write that has ended sees it, and so does a list

It needs no rename, no lock and no folder, none of which a bucket has. What is more than one object is made whole by
order: what it consists of first, then the object that says that it is there (see mirror).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gemsmith.checkpoint.fetch import byte_ranges
from gemsmith.errors import MachineError, RunError, first_line


class Bucket:
    """The objects below one address, such as gs://bucket/folder. Raises MachineError where it cannot be reached."""

    def __init__(self, url: str) -> None:
        import tensorstore

        self.url = url.rstrip("/")
        with _reaching(self.url):
            self._store = tensorstore.KvStore.open(self.url + "/").result()

    def names(self, prefix: str = "") -> list[str]:
        import tensorstore

        keys = tensorstore.KvStore.KeyRange(prefix, _after(prefix)) if prefix else tensorstore.KvStore.KeyRange()
        with _reaching(self.url):
            found = [key.decode() for key in self._store.list(keys).result()]
        # An emulator of the service was seen to list all, whatever the range.
        return sorted(name for name in found if name.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        """None where there is no such object."""
        with _reaching(self.url):
            found = self._store.read(name).result()
        return found.value if found.state == "value" else None

    def write(self, name: str, content: bytes) -> None:
        with _reaching(self.url):
            self._store.write(name, content).result()

    def delete(self, name: str) -> None:
        with _reaching(self.url):
            self._store.write(name, None).result()

    def download(self, name: str, target: Path) -> None:
        """Copies an object into a file, which is whole or not there. Weights are copied piece by piece."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("wb") as file, _reaching(self.url):
            for begin, end in byte_ranges(self._store, name):
                found = self._store.read(name, byte_range=slice(begin, end)).result()
                if found.state != "value":
                    raise RunError(f"{self.url}/{name}: was deleted while it was read; run the same command again")
                file.write(found.value)
        partial.replace(target)

    def upload(self, file: Path, name: str) -> None:
        """Copies a file into an object; it is held in memory meanwhile."""
        self.write(name, file.read_bytes())


def files_below(folder: Path, *, hidden: bool = False) -> Iterator[tuple[str, Path]]:
    """Name and path of every file of a folder, in order; of a run's the hidden ones are locks and halves of files."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and (hidden or not any(part.startswith(".") for part in parts)):
            yield "/".join(parts), path


def _after(prefix: str) -> str:
    """The first name behind all that begin with the prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


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
