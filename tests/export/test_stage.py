"""The stage export: adapter/, merged/ and the record are those of one export, whatever happens."""

import dataclasses
import errno
import hashlib
import os
from pathlib import Path

import pytest

from gemsmith.checkpoints.peft import Adapter, LoraPair, write_peft_adapter
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.export.stage import export
from gemsmith.runs.run import Run


def contents(run: Run) -> dict[str, str]:
    files = [run.record_file("export"), *run.adapter.iterdir(), *run.merged.iterdir()]
    return {str(file.relative_to(run.path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def save_peft_step(adapter: Adapter, folder: Path) -> None:
    """As the TRL backend of an earlier version saved them."""
    write_peft_adapter(adapter, folder, "base")
    (folder / "training.json").write_text("{}")


@pytest.fixture
def trained_on(make_run, adapter_of) -> Run:
    """A run that was exported and has since saved another step, with an adapter that overflows float16."""
    run, adapter = make_run(dtype="float16", steps={}), adapter_of("tiny-12b", seed=1)
    save_peft_step(adapter_of("tiny-12b"), run.checkpoints / "1")
    export(run)
    strong = {name: LoraPair(a=pair.a, b=1e7 * pair.b) for name, pair in adapter.modules.items()}
    save_peft_step(dataclasses.replace(adapter, modules=strong), run.checkpoints / "2")
    return run


def test_a_merge_that_is_refused_leaves_the_old_export_whole(trained_on):
    before = contents(trained_on)
    with pytest.raises(CheckpointError, match="NaN or infinity in F16"):
        export(trained_on)
    assert contents(trained_on) == before


def test_a_record_of_a_trl_step_needs_no_library_of_the_jax_backend(trained_on, adapter_of):
    save_peft_step(adapter_of("tiny-12b"), trained_on.checkpoints / "3")
    assert export(trained_on).provenance.versions.keys() == {"python", "numpy", "ml_dtypes"}


def test_a_full_disk_leaves_the_old_export_whole(trained_on, adapter_of, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # One that can be merged: step 2 might end at its overflow before the first write fails.
    save_peft_step(adapter_of("tiny-12b", seed=2), trained_on.checkpoints / "3")
    before = contents(trained_on)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MachineError, match="the disk became full"):
        export(trained_on)
    assert contents(trained_on) == before


@pytest.mark.parametrize("renames", range(5))
def test_killed_between_renames_no_record_tells_of_other_files(trained_on, adapter_of, monkeypatch, renames):
    save_peft_step(adapter_of("tiny-12b", seed=2), trained_on.checkpoints / "3")
    before, rename, done = contents(trained_on), Path.rename, []

    def stopped(self, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(self, target))

    monkeypatch.setattr(Path, "rename", stopped)
    try:
        export(trained_on)
    except KeyboardInterrupt:
        assert not trained_on.record_file("export").exists()
    else:
        assert renames == 4
    monkeypatch.undo()
    export(trained_on)
    after = contents(trained_on)
    assert (
        after.keys() == before.keys()
        and after["adapter/adapter_model.safetensors"] != before["adapter/adapter_model.safetensors"]
    )
    assert not list(trained_on.path.glob(".*.partial")) + list(trained_on.path.glob(".*.old"))
