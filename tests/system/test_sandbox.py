"""What a command in the sandbox sees, may do, and leaves."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.system.sandbox import Sandbox, SandboxLimits, find_sandbox


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    try:
        return find_sandbox()
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everyone may reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run(sandbox: Sandbox, folder: Path, script: str, **more):
    limits = SandboxLimits(**({"wall_s": 20, "file_bytes": 2**20} | more.pop("limits", {})))
    folder.chmod(0o777)
    return sandbox.run(["sh", "-c", script], folder, limits=limits, **more)


def test_the_environment_and_the_home_are_not_there(sandbox, folder, monkeypatch):
    monkeypatch.setenv("A_SECRET", "xyzzy")
    seen = run(sandbox, folder, "env; cat /proc/*/environ; ls -a / ~ /root /home /etc")
    assert "xyzzy" not in seen.text and "PATH=/usr/bin" in seen.text
    assert all(f"'{place}': No such file" in seen.text for place in ("/root", "/home", "/etc"))


def test_the_network_is_not_there(sandbox, folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"use IO::Socket; IO::Socket::INET->new('127.0.0.1:{server.getsockname()[1]}') or die 'none'"
        assert "none" in run(sandbox, folder, f'perl -e "{connect}"').text
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_nothing_in_the_folder_can_be_written_but_one_file(sandbox, folder):
    assert run(sandbox, folder, "touch here").code != 0 and not (folder / "here").exists()
    outcome = run(sandbox, folder, "echo a > here && echo b > there", writes="here")
    assert outcome.code != 0 and [file.name for file in folder.iterdir()] == ["here"]
    assert (folder / "here").read_text() == "a\n"


def test_there_is_no_place_to_write_without_a_bound(sandbox, folder):
    script = (
        "for d in / /dev /dev/shm /tmp /job /usr /proc; do for i in 1 2 3; do cat /usr/bin/bash > $d/x$i; done; done"
    )
    run(sandbox, folder, script + "; du -sk / --exclude=/usr --exclude=/proc > kept", writes="kept")
    # Each of /tmp and /dev/shm holds its bound of 1 MiB at most.
    assert int((folder / "kept").read_text().split()[0]) <= 2 * 2**10 + 64


def test_a_command_cannot_make_itself_root_of_a_namespace(sandbox, folder):
    for command in ("unshare --user true", "unshare --user --map-root-user --mount true", "bwrap --ro-bind / / true"):
        assert run(sandbox, folder, command).code not in (0, None)


def test_a_large_file_is_refused(sandbox, folder):
    outcome = run(sandbox, folder, "head -c 9000000 /dev/zero > big", writes="big")
    assert outcome.code != 0 and (folder / "big").stat().st_size <= 2**20


def test_all_of_tmp_has_a_bound(sandbox, folder):
    outcome = run(sandbox, folder, "for i in 1 2 3 4 5; do head -c 400000 /dev/zero > /tmp/$i || exit 9; done")
    assert outcome.code not in (0, None)


def test_printing_without_end_meets_the_limit(sandbox, folder):
    outcome = run(sandbox, folder, "yes", limits={"wall_s": 10})
    assert outcome.code != 0 and len(outcome.text) <= 2**16


def test_memory_has_a_bound(sandbox, folder):
    outcome = run(sandbox, folder, "head -c 300000000 /dev/zero | tail -c 299999999 | wc -c",
                  limits={"memory_bytes": 2**27})  # fmt: skip
    assert "299999999" not in outcome.text


@pytest.mark.slow
def test_a_fork_bomb_ends_with_its_time_and_leaves_no_process(sandbox, folder):
    mark = f"sleep 98{os.getpid()}"
    outcome = run(sandbox, folder, f"f() {{ f | f & }}; {mark} & f; {mark}", limits={"wall_s": 3})
    assert outcome.code != 0
    ended = time.monotonic() + 60
    while (left := subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False).stdout) and (
        time.monotonic() < ended
    ):
        time.sleep(0.1)
    assert left == ""


def test_without_bubblewrap_it_is_one_line_unless_one_insists(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        MachineError,
        match=r"^bwrap is not installed, .*; install Debian's package bubblewrap, or "
        r".*--unsafe",
    ):
        find_sandbox()
    assert find_sandbox(unsafe=True).bubblewrap is None


def test_a_bubblewrap_that_does_not_work_is_one_line(folder, monkeypatch):
    folder.chmod(0o755)
    broken = folder / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no user namespaces' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(MachineError, match=r"^bwrap does not work here \(bwrap: no user namespaces\)"):
        find_sandbox()
