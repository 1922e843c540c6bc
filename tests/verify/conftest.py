"""Trained runs, and a server that does what a test wants; see tests/support."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gemsmith.checkpoints.peft import Adapter
from gemsmith.export.stage import export
from gemsmith.runs.run import Run
from support.hostile_server import Hostile, hostile_server
from support.trained_run import make_adapter, make_trained_run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from a second thread, and on a busy machine torch's wait for each other by spinning: 4
    s became 50."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def make_run(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Run]:
    """Returns a trained run: `make_run("tiny-e2b", "bfloat16")`; `steps` replaces the saved adapters."""

    def make(
        variant: str = "tiny-12b", dtype: str = "bfloat16", steps: Mapping[int, Adapter] | None = None, **lora: object
    ) -> Run:
        steps = {20: make_adapter(variant)} if steps is None else steps
        return make_trained_run(tmp_path / "run", tiny_checkpoint(variant, dtype), steps=steps, **lora)

    return make


@pytest.fixture
def adapter_of() -> Callable[..., Adapter]:
    return make_adapter


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server


@pytest.fixture
def exported(make_run: Callable[..., Run]) -> Run:
    run = make_run("tiny-12b")
    export(run)
    return run
