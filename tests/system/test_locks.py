import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from gemsmith.errors import RunError
from gemsmith.system.locks import LOCK, is_locked, locked

HOLDER = """
import os, sys, time
from pathlib import Path
from gemsmith.system.locks import locked
with locked(Path(sys.argv[-1])):
    forked = os.fork() if "fork" in sys.argv else None
    if forked != 0:
        print(forked, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def hold():
    """Starts a process that holds a folder's lock: `hold(folder)`; with "fork", one whose child lives on, and whose
    number it prints."""
    started = []

    def start(folder, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *arguments, str(folder)], stdout=subprocess.PIPE, text=True
        )
        started.append((process, process.stdout.readline().strip()))
        return started[-1]

    yield start
    for process, forked in started:
        process.kill()
        if forked.isdigit():
            os.kill(int(forked), signal.SIGKILL)
        process.communicate()


def test_a_second_process_is_told_at_once_who_is_there(hold, tmp_path):
    holder, _ = hold(tmp_path / "run", "train", "a recipe\n.yaml")
    with pytest.raises(RunError) as error, locked(tmp_path / "run"):
        pass
    pattern = (
        r"run directory \S+/run: is in use by `gemsmith train 'a recipe .yaml' \S+/run` \(process (\d+) on \S+, since "
        r"\S+ \S+ UTC\); "
    )
    assert int(re.match(pattern, str(error.value))[1]) == holder.pid
    assert holder.poll() is None


def test_the_lock_of_a_killed_process_is_free_and_what_it_wrote_is_replaced(hold, tmp_path):
    holder, _ = hold(tmp_path, "train")
    holder.kill()
    holder.wait()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_one_that_comes_while_the_holder_ends_locks_the_file_that_is_there_then(tmp_path, monkeypatch):
    lockf, files = fcntl.lockf, []

    def ended_meanwhile(descriptor, how):
        files.append(os.fstat(descriptor).st_ino)
        if len(files) == 1:
            (tmp_path / LOCK).rename(tmp_path / "kept")  # as deleted, but no other file gets its number
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", ended_meanwhile)
    with locked(tmp_path):
        assert (tmp_path / LOCK).stat().st_ino == files[-1] != files[0]


def test_a_forked_child_that_outlives_the_holder_does_not_keep_the_lock(hold, tmp_path):
    holder, forked = hold(tmp_path, "fork")
    with pytest.raises(RunError, match=f"process {holder.pid} on"), locked(tmp_path):
        pass
    holder.kill()
    holder.wait()
    os.kill(int(forked), 0)  # it is there
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 7}', "\x00\xff"])
def test_a_holder_that_does_not_say_who_it_is_keeps_others_out_all_the_same(hold, tmp_path, text):
    hold(tmp_path)
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(RunError, match="is in use by another process; wait"), locked(tmp_path):
        pass


def test_a_process_may_lock_a_folder_twice_and_keeps_it_until_the_first_block_ends(tmp_path):
    second = (
        f"import pathlib; from gemsmith.system.locks import locked; locked(pathlib.Path({str(tmp_path)!r})).__enter__()"
    )
    with locked(tmp_path):
        with locked(tmp_path / ".." / tmp_path.name):
            pass
        assert (
            b"is in use by" in subprocess.run([sys.executable, "-c", second], capture_output=True, check=False).stderr
        )
    subprocess.run([sys.executable, "-c", second], check=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_of_and_used(tmp_path, monkeypatch, capsys, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with locked(tmp_path):
        pass
    err = capsys.readouterr().err
    assert err.startswith(f"note: run directory {tmp_path}: its file system has no locks (") and err.count("\n") == 1


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match=r"\.lock: is a symbolic link, .*; delete the link"), locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_a_full_disk_does_not_stop_a_command_before_it_has_begun(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk", "64k")
    (disk / LOCK).touch()
    (disk / "filler").write_bytes(b"0" * 65536)
    with locked(disk):
        assert (disk / LOCK).read_text() == ""


def test_whether_a_folder_is_locked_is_asked_without_taking_the_lock(hold, tmp_path):
    assert not is_locked(tmp_path / "run")
    holder, _ = hold(tmp_path / "run")
    assert is_locked(tmp_path / "run") and holder.poll() is None
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / LOCK).exists() and not is_locked(tmp_path / "run")
    with locked(tmp_path / "run"):
        assert is_locked(tmp_path / "run")
        with pytest.raises(subprocess.CalledProcessError):  # asking has not given the lock up
            subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path / "run")], check=True, stderr=subprocess.DEVNULL)
