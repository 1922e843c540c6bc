"""A folder that a server may serve, and whether processes are still there."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemsmith.arch import find_variant, lora_targets
from gemsmith.checkpoints.folder import open_checkpoint
from gemsmith.checkpoints.peft import Adapter, LoraPair, write_peft_adapter
from gemsmith.runs.records import ExportRecord, FileSum, VerifyRecord
from gemsmith.runs.run import Run, make_provenance, read_record, start_clock, write_record
from support.hostile_server import Hostile, hostile_server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"]}))
    return folder


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server


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
    def wait_until_gone(pids: list[int], timeout_s: float = 60.0) -> list[int]:
        """Those that are still there after the time."""
        deadline_s = time.monotonic() + timeout_s
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return left

    return wait_until_gone


@pytest.fixture
def adapted_run(exported_run: Callable[..., Run]) -> Callable[..., Run]:
    """Returns a run as exported_run does, with an adapter beside its merged weights, that is served with its base."""

    def make(sections: dict[str, Any] | None = None, *, logits_effect: float | None = None) -> Run:
        run = exported_run({"serve": {"weights": "adapter"}} | (sections or {}))
        modules = {
            target.module: LoraPair(a=np.ones((8, target.shape[1]), "f4"), b=np.zeros((target.shape[0], 8), "f4"))
            for target in lora_targets(find_variant("tiny-31b"))
        }
        written = write_peft_adapter(Adapter(modules=modules, rank=8, alpha=8.0), run.adapter, "base")
        sums = tuple(FileSum(name=name, bytes=one.bytes, sha256=one.sha256) for name, one in written.items())
        base = open_checkpoint(run.recipe.checkpoint).fingerprint()
        record = read_record(run, ExportRecord).model_copy(update={"adapter": sums, "base_sha256": base})
        write_record(run, record)
        verified = {"provenance": make_provenance(run, "verify", start_clock()), "logits_effect": logits_effect}
        write_record(run, read_record(run, VerifyRecord).model_copy(update=verified))
        return run

    return make
