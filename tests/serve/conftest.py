"""A folder that a server may serve, and whether processes are still there."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"]}))
    return folder


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    def is_running(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    return is_running


@pytest.fixture
def wait_until_gone(is_running: Callable[[int], bool]) -> Callable[..., list[int]]:
    def wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> list[int]:
        """Those that are still there after the time."""
        deadline_s = time.monotonic() + timeout_s
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return left

    return wait_until_gone
