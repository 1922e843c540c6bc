"""Trained runs; see tests/support/trained_run.py."""

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from gemsmith.checkpoints.peft import Adapter, read_peft_adapter, write_peft_adapter
from gemsmith.runs.records import ExportRecord
from gemsmith.runs.run import Run
from support.trained_run import make_adapter, make_trained_run, stacks_of


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
def stacks() -> Callable[..., Iterator[tuple[int, list[str], np.ndarray, np.ndarray]]]:
    return stacks_of


@pytest.fixture
def base(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A base of one's own, which tests may damage."""
    return shutil.copytree(tiny_checkpoint("tiny-31b", "bfloat16"), tmp_path / "base")


@pytest.fixture
def adapter(adapter_of: Callable[..., Adapter], tmp_path: Path) -> Path:
    write_peft_adapter(adapter_of("tiny-31b"), tmp_path / "adapter", "base")
    return tmp_path / "adapter"


@pytest.fixture
def rewrite() -> Callable[[Path, Callable], None]:
    def rewrite(adapter_folder: Path, change: Callable) -> None:
        """Writes the folder's adapter again, changed."""
        old = read_peft_adapter(adapter_folder)
        modules = change({name: old.modules[name] for name in old.modules})
        config = (adapter_folder / "adapter_config.json").read_bytes()
        write_peft_adapter(dataclasses.replace(old, modules=modules), adapter_folder, "base")
        (adapter_folder / "adapter_config.json").write_bytes(config)

    return rewrite


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(name="contents")
def give_contents():
    return contents


def verify_files(out: Path) -> bool:
    record = ExportRecord.model_validate_json((out / "export.json").read_bytes())
    recorded = {f"{part}/{file.name}": file.sha256 for part in ("adapter", "merged") for file in getattr(record, part)}
    return recorded == {name: value for name, value in contents(out).items() if name != "export.json"}


@pytest.fixture(name="verify_files")
def give_verify_files():
    return verify_files
