"""Processes that end with a block, and what their logs say."""

import time
from pathlib import Path

import pytest

from gemsmith.errors import MachineError
from gemsmith.system import process


def test_the_first_error_of_a_long_log_is_shown_before_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("start\nValueError: the root cause\n" + "at line\n" * 40 + "RuntimeError: see root cause above\n")
    lines = process.last_lines(log, count=3).splitlines()
    assert lines == ["ValueError: the root cause", "...", "at line", "at line", "RuntimeError: see root cause above"]


def test_a_log_without_lines_is_said_to_be_empty_and_colors_are_taken_out(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("\n \n")
    assert process.last_lines(log) == "(empty)"
    log.write_text("\x1b[36m(Engine)\x1b[0;0m ready\n" + "x" * 400)
    assert process.last_lines(log).splitlines() == ["(Engine) ready", "x" * 300]


def test_a_log_that_names_a_full_disk_is_the_machines_error(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("ready")
    process.refuse_full_disk(log)
    log.write_text("OSError: [Errno 28] No space left on device")
    with pytest.raises(MachineError, match="no space left on the disk"):
        process.refuse_full_disk(log)


def test_a_command_ends_with_its_block_and_its_output_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    with process.supervised(["echo", "said"], environment={"PATH": "/usr/bin:/bin"}, log=log) as running:
        assert running.wait(60) == 0
    assert log.read_text() == "said\n"


@pytest.mark.parametrize("end", ["exit", "sleep 600"])
def test_what_a_command_leaves_in_its_temporary_folder_goes_with_it(tmp_path: Path, end: str) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", f"mktemp -u -p $TMPDIR; touch $TMPDIR/a; echo ready; {end}"]
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    with process.supervised(command, environment=environment, log=log, grace_s=1):
        while "ready" not in log.read_text():
            time.sleep(0.02)
    folder = Path(log.read_text().splitlines()[0]).parent
    assert folder.parent == tmp_path and [file.name for file in tmp_path.iterdir()] == ["log"]
