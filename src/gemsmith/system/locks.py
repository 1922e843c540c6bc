"""One process at a time in a folder, by a lock that says who holds it.

The death of its holder frees it, also by SIGKILL. It is a POSIX record lock on <folder>/.lock. Unlike flock's, no
forked process has it too, so none that outlives its parent keeps it; and it works over NFS. Closing any descriptor of
the file gives it up, so the process that holds it must not open the file once more.
"""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import struct
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from gemsmith.errors import RunError
from gemsmith.system.characters import escape_control_chars

LOCK = ".lock"
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
# A holder writes who it is right after it has taken the lock.
_READINGS, _BETWEEN_READINGS_S = 5, 0.02
_LONGEST_COMMAND, _LONGEST_TEXT_BYTES = 200, 4096

_held: set[Path] = set()


@contextlib.contextmanager
def locked(folder: Path, *, what: str = "run directory") -> Iterator[None]:
    """Makes the folder if it does not exist, and keeps other processes out of it until the block ends.

    Raises RunError where another is in it; `what` is what users call it. Without locks, a line on stderr says so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place, file, process = folder.resolve(), folder / LOCK, os.getpid()
    if place in _held:
        yield
        return
    holder = {
        "pid": process,
        "host": socket.gethostname(),
        "command": shlex.join(["gemsmith", *sys.argv[1:]]),
        "since": datetime.now(UTC).isoformat(" ", "seconds").removesuffix("+00:00") + " UTC",
    }
    descriptor = _take(file, f"{what} {folder}")
    try:
        os.ftruncate(descriptor, 0)  # what a holder left that was killed
        try:
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except OSError as error:
            # The lock holds without its text, and what is to be written next will say that the disk is full.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        _held.add(place)
        yield
    finally:
        _held.discard(place)
        if os.getpid() == process:  # a forked child that ends here has no lock
            file.unlink(missing_ok=True)
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process is in the folder, asked without taking the lock; False where the file system has none."""
    if folder.resolve() in _held:
        return True
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    # struct flock, where F_GETLK writes the lock of another process that keeps a write lock away.
    layout, place = ("qqihh4x", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)
    asked = [0] * 5
    asked[place] = fcntl.F_WRLCK
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *asked))
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return False
    finally:
        os.close(descriptor)
    return int(struct.unpack(layout, answer)[place]) != fcntl.F_UNLCK


def warn_no_locks(place: str, error: OSError) -> None:
    """Says on stderr that the file system of `place` has no locks; raises any other error again."""
    if error.errno not in _WITHOUT_LOCKS:
        raise error
    reason = os.strerror(error.errno).lower()
    note = f"note: {place}: its file system has no locks ({reason}), so a second run there would not be stopped"
    print(escape_control_chars(note), file=sys.stderr)


def _take(file: Path, place: str) -> int:
    """A descriptor of the file, which is locked."""
    while True:
        try:
            # Not through a link: the file at its other end would be overwritten.
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            what = "is a symbolic link, and Gemsmith locks a file of its own there"
            raise RunError(f"{file}: {what}; delete the link") from None
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD_BY_ANOTHER:
                    holder = _read_holder(descriptor)
                    raise RunError(f"{place}: is in use by {holder}; wait until it has ended, or stop it") from None
                warn_no_locks(place, error)
            # Whoever held the lock before deletes the file when it ends: then another process would lock a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _read_holder(descriptor: int) -> str:
    for _ in range(_READINGS):
        try:
            found = json.loads(os.pread(descriptor, _LONGEST_TEXT_BYTES, 0))
            command = " ".join(str(found["command"]).split())[:_LONGEST_COMMAND]
            return f"`{command}` (process {found['pid']} on {found['host']}, since {found['since']})"
        except (ValueError, KeyError, TypeError):
            time.sleep(_BETWEEN_READINGS_S)
    return "another process"
