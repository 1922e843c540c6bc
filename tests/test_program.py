import gc
import os
import signal
import subprocess
import time

import pytest

from gemsmith.cli import cli


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


def test_a_folder_that_cannot_be_written_is_one_line(gemsmith, recipe, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = gemsmith("data", recipe, "--run", "file/run")
    assert code == 2 and err.count("\n") == 1 and "not a directory" in err
    for folder in ("/proc/run", "/sys/run"):
        code, _, err = gemsmith("data", recipe, "--run", folder)
        assert code == 2 and err.count("\n") == 1 and f"({folder}); name another place" in err


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
    assert code == 2 and err.endswith(
        "own.jinja line 1 refuses it: no\\x1b[31m way\\u202e; change the row, or set data.template to one that takes "
        "it\n"
    )
    assert err.count("\n") == 1
