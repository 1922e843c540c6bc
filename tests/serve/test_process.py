"""Processes that end with a block, and what their logs say."""

from pathlib import Path

from gemsmith.serve import process


def test_the_first_error_of_a_long_log_is_shown_before_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("start\nValueError: the root cause\n" + "at line\n" * 40 + "RuntimeError: see root cause above\n")
    lines = process.last_lines(log, count=3).splitlines()
    assert lines == ["ValueError: the root cause", "...", "at line", "at line", "RuntimeError: see root cause above"]
