import errno
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from gemsmith.cli import cli
from gemsmith.errors import CheckpointError
from support.cases import each


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_meets_the_garbage_collector_is_not_lost(gemsmith, monkeypatch, number, expected):
    def collect() -> None:
        sent = []

        def callback(phase: str, _: object) -> None:
            if not sent:
                sent.append(phase)
                os.kill(os.getpid(), number)

        gc.callbacks.append(callback)
        try:
            gc.collect()
            assert sent
            time.sleep(10)
        finally:
            gc.callbacks.remove(callback)

    monkeypatch.setattr(cli.commands["schema"], "callback", collect)
    code, out, err = gemsmith("schema")
    assert (code, out) == (expected, "") and err.strip().startswith("note: stopped by") and "Traceback" not in err


def ending_with(deed):
    """A command whose library does `deed` with what SIGTERM raises in it."""

    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except Exception:  # noqa: BLE001 - as a library does
            print("went on")
        except BaseException as error:  # noqa: BLE001
            deed(error)

    return command


def fail_with(kind):
    def fail(_):
        raise kind("checkpoints/20: is damaged; delete it")

    return fail


def test_sigterm_is_no_failure_that_a_library_may_swallow(gemsmith, monkeypatch):
    def again(error):
        raise error

    monkeypatch.setattr(cli.commands["schema"], "callback", ending_with(again))
    assert gemsmith("schema") == (143, "", "note: stopped by SIGTERM; the same command resumes where it was\n")


@pytest.mark.parametrize("kind", [CheckpointError, RuntimeError, KeyboardInterrupt])
def test_what_a_library_makes_of_sigterm_is_told_as_the_stop_that_it_is(gemsmith, monkeypatch, kind):
    monkeypatch.setattr(cli.commands["schema"], "callback", ending_with(fail_with(kind)))
    code, out, err = gemsmith("schema")
    assert (code, out) == (143, "") and err.strip().count("\n") == 0
    assert err.strip().startswith("note: stopped by SIGTERM; the same command resumes where it was; it ended with: ")
    assert "is damaged" in err


BEFORE_IT_BEGINS = """
import sys
class Finder:
    def find_spec(name, path, target=None):
        if name == "gemsmith.cli.plan":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
import gemsmith.cli
"""
WHILE_A_LIBRARY_MAKES_A_CLASS = """
from gemsmith.cli import cli, main
def command():
    exec("import os; os.kill(os.getpid(), 2)")
def wrapped():
    class Name:
        def __set_name__(self, *of):
            command()
    class Made:
        name = Name()
import sys
cli.commands["schema"].callback = locals()[sys.argv[1]]
main(["schema"])
"""


@each(
    ("script", "of", "said"),
    [
        (BEFORE_IT_BEGINS, "", " before anything was done\n"),
        (WHILE_A_LIBRARY_MAKES_A_CLASS, "command", "; the same command resumes where it was\n"),
        (WHILE_A_LIBRARY_MAKES_A_CLASS, "wrapped", "; it ended with: RuntimeError: "),
    ],
)
def test_ctrl_c_is_130_and_one_line_wherever_it_comes(tmp_path, script, of, said):
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "script", of]  # as `python -m gemsmith`
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    line = ended.stderr.lstrip()  # of the line in which the terminal shows ^C
    assert ended.returncode == 130 and line.startswith("note: stopped by Ctrl-C") and said in line, ended
    assert line.count("\n") == 1 and ended.stdout == ""


def test_ctrl_c_says_what_training_says_of_it(gemsmith, monkeypatch):
    def stop():
        raise KeyboardInterrupt("stopped by Ctrl-C: step 7 is saved; continue with: gemsmith train runs/my")

    monkeypatch.setattr(cli.commands["schema"], "callback", stop)
    code, _, err = gemsmith("schema")
    assert code == 130 and err.strip() == (
        "note: stopped by Ctrl-C: step 7 is saved; continue with: gemsmith train runs/my"
    )


AT_THE_END = """
import atexit, os, signal, sys, time
class Kept:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        for number in numbers:
            kill(pid, number)
sys.kept = Kept()
def send():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
atexit.register(send)
from gemsmith.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("word", "code"), [("schema", 0), ("no-such-verb", 2)])
def test_signals_change_nothing_once_the_result_stands(word, code):
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END, word], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("\n") == (code == 2) and "Traceback" not in ended.stderr


UNREAD = """
import json, os, sys
from gemsmith.cli import cli, main
def command():
    with open("kept", "w") as kept:  # of the first number that is free
        for number in (0, 1, 2):
            os.set_inheritable(number, True)  # an error where it is not open
        print("of a person", file=sys.stderr)
        os.system("echo of a library >&2")
        kept.write("whole")
    open("done", "w").close()
    sys.stdin.isatty()
cli.commands["schema"].callback = command
main(sys.argv[1:])
"""


@each(
    ("streams", "word", "code"),
    [("2>&1 | true", "schema", 0), ("2>/dev/full", "schema", 0), ("<&- >&- 2>&-", "schema", 0)]
    + [(streams, "no-such-verb", 2) for streams in ("2>&1 | true", "2>/dev/full", "<&- >&- 2>&-")],
)
def test_a_command_whose_streams_nobody_reads_does_its_work(tmp_path, streams, word, code):
    """As of `2>&1 | tee log`, where Ctrl-C ends tee at once and training still has a step to save."""
    shell = f'"$0" -c "$1" {word} {streams}; exit ${{PIPESTATUS[0]}}'
    command = ["bash", "-c", shell, sys.executable, f"import time; time.sleep(0.1)\n{UNREAD}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
    if not code:
        assert (tmp_path / "kept").read_text() == "whole" and (tmp_path / "done").exists()


def fail_at_files(number, name=None):
    """In place of a call of the operating system."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number), name)

    return fail


def test_a_folder_that_cannot_be_written_or_fails_or_goes_is_one_line(gemsmith, recipe, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    code, _, err = gemsmith("data", recipe, "--run", "file/run")
    assert code == 2 and err.count("\n") == 1 and "not a directory" in err
    for folder in ("/proc/run", "/sys/run"):
        code, _, err = gemsmith("data", recipe, "--run", folder)
        assert code == 2 and err.count("\n") == 1 and f"{folder}: is the system's; name a folder of your own" in err
    for call, fault, said in (
        ("fsync", fail_at_files(errno.EIO), "input/output error; see to that and run the same command again"),
        ("fsync", fail_at_files(errno.ESTALE), "stale file handle; "),
        ("replace", fail_at_files(errno.ENOENT, "run/.plan.json"), "no such file or directory (run/.plan.json); see "),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fault)
            code, _, err = gemsmith("plan", recipe, "--run", tmp_path / "run")
        assert code == 2 and err.count("\n") == 1 and said in err, err
    assert gemsmith("plan", recipe, "--run", tmp_path / "run")[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
@pytest.mark.parametrize("size", ["48k", "200k"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_space(gemsmith, recipe, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine does not let a tmpfs be mounted")
    try:
        code, _, err = gemsmith("data", recipe, "--set", "data.train.rows=3000", "--run", disk / "run")
        assert code == 2 and "no space left on" in err.lower() and err.strip().count("\n") == 0
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        assert gemsmith("data", recipe, "--set", "data.train.rows=3000", "--run", disk / "run")[0] == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_an_error_quotes_is_spelled_out_on_its_one_line(gemsmith, recipe, tmp_path):
    for arguments in (
        ("data", "no\nsuch\x1b[2J.yaml"),
        ("plan", recipe.name, "--set", "a\nb\x9b=1"),
        ("no\x1bsuch",),
        ("plan", "--\x1b\n"),
    ):
        code, _, err = gemsmith(*arguments)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
        assert not set("\x1b\x9b") & set(err) and (r"\x1b" in err or r"\x9b" in err)
    (tmp_path / "own.jinja").write_text("{{ raise_exception('no\x1b[31m\nway\u202e') }}")
    code, _, err = gemsmith("data", recipe.name, "--set", "data.template=own.jinja")
    refused = (
        "own.jinja line 1 refuses it: no\\x1b[31m way\\u202e; change the row, or set data.template to one that takes it"
    )
    assert code == 2 and f"{refused}; 20 of 20 rows cannot be used" in err
    assert err.count("\n") == 1
