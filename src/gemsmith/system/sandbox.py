"""Commands that run what a stranger wrote: without network, home, environment or anything that survives, by bubblewrap.

Only /usr and one folder are there, read-only but for one file. Time, memory, what is written and the number of
processes are bounded; user namespaces, in which a command would be its own root, are off.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import MachineError

FOLDER = "/job"  # where the command finds its folder
_READ_BYTES = 2**16
_USR = (
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
    "--symlink", "usr/lib64", "/lib64",
)  # fmt: skip
_ALONE = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
    "--uid", "65534", "--gid", "65534", "--clearenv", "--setenv", "PATH", "/usr/bin", "--proc", "/proc",
    "--dev", "/dev",
)  # fmt: skip
# What bubblewrap makes itself has no bound.
_NO_MORE = ("--remount-ro", "/dev", "--remount-ro", "/")
# The kernel counts no processes of root's, and the sandbox's user is whoever started it.
_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# bubblewrap's own first process shows its environment to what it starts.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    wall_s: float = 60.0
    memory_bytes: int = 2**30  # address space of each process
    file_bytes: int = 8 * 2**20  # of each file, and of all of /tmp and of /dev/shm
    processes: int = 512  # of the user, all sandboxes together


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    code: int | None  # its exit status, negative for a signal; None where it ran out of time
    text: str  # the end of what it printed, stdout and stderr together

    @property
    def was_stopped(self) -> bool:
        """Whether it met a limit other than time: a signal, or bubblewrap's word for one."""
        return self.code is not None and (self.code < 0 or self.code > 128)


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs commands; see find_sandbox."""

    bubblewrap: str | None  # None: without one, since the user insisted

    def run(
        self, command: Sequence[str], folder: Path, *, limits: SandboxLimits, writes: str | None = None
    ) -> SandboxResult:
        """What came of the command, whose working directory is the folder, as FOLDER; it can write the file `writes`.

        Everyone must be able to read the folder, and those above it: the sandbox's user has no rights of its own.
        """
        if writes is not None:
            (folder / writes).touch()
            (folder / writes).chmod(0o666)
        bounds = (f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", f"--nproc={limits.processes}")
        limited = ("prlimit", *bounds, "--core=0", "--")
        if self.bubblewrap is None:
            return _run([*limited, *(word.replace(FOLDER, str(folder)) for word in command)], limits, cwd=folder)
        size = ("--size", str(limits.file_bytes))
        memory = (*size, "--tmpfs", "/tmp", *size, "--tmpfs", "/dev/shm")
        output = () if writes is None else ("--bind", str(folder / writes), f"{FOLDER}/{writes}")
        inside = (*_USR, *_ALONE, *memory, "--ro-bind", str(folder), FOLDER, *output, *_NO_MORE)
        user = _NOBODY if os.geteuid() == 0 else ()
        return _run([*user, self.bubblewrap, *inside, "--chdir", FOLDER, *limited, *command], limits)


def find_sandbox(*, unsafe: bool = False) -> Sandbox:
    """A sandbox that works here. Raises MachineError where there is none; `unsafe` does without."""
    if unsafe:
        return Sandbox(bubblewrap=None)
    remedy = "install Debian's package bubblewrap, or insist with --unsafe: then generated code runs with your rights"
    path = shutil.which("bwrap")
    if path is None:
        raise MachineError(f"bwrap is not installed, and generated code is run in nothing less; {remedy}")
    sandbox = Sandbox(bubblewrap=path)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        tried = sandbox.run(["true"], Path(folder), limits=SandboxLimits(wall_s=30))
    if tried.code != 0:
        said = tried.text.strip().splitlines()[-1:] or ["no answer"]
        raise MachineError(f"bwrap does not work here ({said[0]}), and generated code is run in nothing less; {remedy}")
    return sandbox


def _run(command: Sequence[str], limits: SandboxLimits, *, cwd: Path | None = None) -> SandboxResult:
    # Into a file, so that what prints without end meets the limit on files and not this process's memory.
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # bubblewrap's end is that of all it started; without it, that of the process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _READ_BYTES))
        return SandboxResult(code=code, text=printed.read().decode(errors="replace"))
