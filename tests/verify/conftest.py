"""Trained runs, and a server that does what a test wants; see tests/support."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
        return make_trained_run(tmp_path / "run", tiny_checkpoint(variant, dtype), steps=steps, **lora)

    return make


@pytest.fixture
def adapter_of() -> Callable[..., Adapter]:
    return make_adapter


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_server() as server:
        yield server


@pytest.fixture(scope="session")
def exported_once(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_trained_run(tmp_path_factory.mktemp("exported") / "run", tiny_checkpoint("tiny-12b", "bfloat16"))
    export(run)
    return run


@pytest.fixture
def exported(exported_once: Run, tmp_path: Path) -> Run:
    """A copy of an exported run."""
    shutil.copytree(exported_once.path, tmp_path / "run")
    return replace(exported_once, path=tmp_path / "run")
