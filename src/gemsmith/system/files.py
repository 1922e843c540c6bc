"""Files and folders that are whole or not there, whatever stops the process.

What each needs of the file system, which a bucket mounted by gcsfuse does not give in full:

    atomic_write        rename over a file, atomic; fsync
    atomic_replace_dir  rename of a folder, atomic; flock, which is done without where there is none
    locks.locked        POSIX record locks, which are done without where there are none
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gemsmith.errors import MachineError, RunError
from gemsmith.system.locks import warn_no_locks

_SYSTEM = ("/bin/", "/boot/", "/dev/", "/etc/", "/lib/", "/lib64/", "/proc/", "/sbin/", "/sys/", "/usr/")
_FREE = ("/dev/shm/", "/usr/local/")


def sha256_file(path: Path) -> str:
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The hash of a value of JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def regular_file(path: Path, *, most_bytes: int | None = None) -> Path:
    """The path, to be read. Raises OSError where it is a pipe or a device, which may never end, or too large."""
    try:
        status = path.stat()
    except ValueError:  # a NUL in it
        raise OSError(errno.ENOTSUP, "is no file's name", str(path)) from None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # reading a folder is an error of its own
        raise OSError(errno.ENOTSUP, "is not a regular file", str(path))
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"has {status.st_size:,} bytes, more than {most_bytes:,}", str(path))
    return path


def is_system_folder(path: Path | str) -> bool:
    """Whether a folder is the root or one of the operating system's own, where nobody's files go, not root's either.

    >>> is_system_folder("/etc/../etc/a"), is_system_folder("/usr/local/a"), is_system_folder("etc")
    (True, False, False)
    """
    found = os.path.join(os.path.realpath(path), "")
    return found == os.sep or (found.startswith(_SYSTEM) and not found.startswith(_FREE))


def expanduser(path: str | Path) -> Path:
    """The path with a leading ~ or ~user as that home; as it is where there is no such user.

    Path.expanduser raises RuntimeError there, and a file may well be called ~a.jpg.

    >>> expanduser("~no one/a.jpg")
    PosixPath('~no one/a.jpg')
    """
    return Path(os.path.expanduser(path))


def fsync_path(path: Path) -> None:
    """Returns once a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    with atomic_write(path) as file:
        file.write(text)


def partial_path(path: Path) -> Path:
    """Where this process writes what is to take the place of `path`; what killed ones of this host left is deleted."""
    begin = f".{path.name}.{os.uname().nodename}."  # in a folder that hosts share, another's process is not seen
    for left in path.parent.glob(f"{glob.escape(begin)}*"):
        if (number := left.name.rpartition(".")[2]).isdecimal():
            try:
                os.kill(int(number), 0)  # asks for no more than whether there is one
            except (ProcessLookupError, OverflowError):
                left.unlink(missing_ok=True)
            except PermissionError:  # another user's
                pass
    return path.with_name(f"{begin}{os.getpid()}")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """A text file that takes the place of `path` once it is complete and on disk; on any error that stays."""
    beside = partial_path(path)
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_replace_dir(path: Path) -> Iterator[Path]:
    """An empty folder beside `path` that takes its place once the block has ended well; on any error that stays.

    Killed between its two renames, `path` is gone and the old one beside it; the next call puts it back first. Raises
    RunError where `path` is a symbolic link, or another process is at it.
    """
    beside, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    if path.is_symlink():
        remedy = f"name the folder itself ({path.resolve()})"
        raise RunError(f"{path}: is a symbolic link, which would be replaced by a folder; {remedy}")
    beside.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(beside, os.O_RDONLY)
    try:
        _lock_empty(beside, descriptor)
        if old.exists() and not path.exists():
            old.rename(path)
        try:
            yield beside
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            beside.rename(path)
        except BaseException:
            if old.exists() and not path.exists():  # Ctrl-C between the two renames
                old.rename(path)
            shutil.rmtree(beside, ignore_errors=True)
            raise
        # From here on the name `beside` may be another process's.
        shutil.rmtree(old, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock_empty(path: Path, descriptor: int) -> None:
    """Makes an open folder this process's until it is closed; whatever a killed one left there is deleted."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"{path}: another process is writing there; wait for it, or stop it") from None
    except OSError as error:
        warn_no_locks(str(path), error)
    # Whoever held the lock before may have renamed the folder: then this is no longer the one at the path.
    if not path.exists() or os.stat(path).st_ino != os.fstat(descriptor).st_ino:
        raise RunError(f"{path}: another process has just written there; run the same command again")
    for left in path.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def bucket_path(url: str) -> Path:
    # Orbax opens buckets through etils, and that through gcsfs.
    if missing := [name for name in ("etils", "gcsfs") if importlib.util.find_spec(name) is None]:
        remedy = f"run: pip install {' '.join(missing)}"
        raise MachineError(f"train.checkpoint_folder: {url} needs {' and '.join(missing)}; {remedy}")
    from etils import epath

    bound_bucket_waits()
    return epath.Path(url)


def bound_bucket_waits() -> None:
    """Has tensorstore give up on an answer that brings no byte for a minute, and ask again; by itself it waits on."""
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
