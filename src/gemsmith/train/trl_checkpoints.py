"""Checkpoints of the TRL backend: each a folder that PEFT opens, and beside the adapter what exact continuation needs.

    checkpoints/<step>/adapter_config.json  adapter_model.safetensors  moments.safetensors  training.json

A folder has its name only once all of it is on disk, so whatever is called by a number is complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gemsmith.checkpoint.adapter import SHA256_KEY, Adapter, LowRank, read_peft_adapter, write_peft_adapter
from gemsmith.checkpoint.safetensors import check_digest, read_header, write_tensors
from gemsmith.errors import RecipeError
from gemsmith.recipe import Recipe
from gemsmith.run import Run

MOMENTS, METADATA = "moments.safetensors", "training.json"
_ORBAX = "_CHECKPOINT_METADATA"
Arrays = dict[str, np.ndarray]


class Checkpoints:
    """The saved steps in a folder; one process writes, any may read."""

    def __init__(self, run: Run) -> None:
        if "://" in str(run.recipe.train.checkpoint_folder):
            raise RecipeError(
                f"train.checkpoint_folder: {run.recipe.train.checkpoint_folder} was given, but train.backend trl saves to folders only; "
                "give one that all processes see, or null"
            )
        self.folder, self._recipe = run.checkpoints, run.recipe

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal() and (entry / METADATA).is_file())

    def others(self) -> list[int]:
        """Steps there that the JAX backend saved: an export would take theirs where they are later."""
        return sorted(int(file.parent.name) for file in self.folder.glob(f"*/{_ORBAX}") if file.parent.name.isdecimal())

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, step: int, matrices: Mapping[str, Arrays], moments: Arrays, metadata: Mapping[str, Any]) -> None:
        """Writes a step, and deletes those that are too many. `matrices`: module -> {"a": (R, in), "b": (out, R)}."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        beside, place = self.folder / f".{step}.partial", self.folder / str(step)
        try:
            write_peft_adapter(_adapter(self._recipe, matrices), beside, self._recipe.checkpoint, dropout=self._recipe.lora.dropout)
            # On a full disk safetensors' own raises no OSError.
            shapes = {name: value.shape for name, value in moments.items()}
            write_tensors(beside / MOMENTS, shapes, moments.__getitem__, metadata={}, sha256_key=SHA256_KEY)
            (beside / METADATA).write_text(json.dumps(metadata), encoding="utf-8")
            for file in beside.iterdir():
                _sync(file)
            shutil.rmtree(place, ignore_errors=True)
            beside.rename(place)
            _sync(self.folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for old in self.steps()[: -self._recipe.train.keep_checkpoints]:
            self.delete(old)

    def read_metadata(self, step: int) -> dict[str, Any]:
        with _as_value_error():
            return dict(json.loads((self.folder / str(step) / METADATA).read_text(encoding="utf-8")))

    def read(self, step: int) -> tuple[Adapter, Arrays]:
        """The adapter and the moments. Raises ValueError, OSError or CheckpointError where they are damaged."""
        folder = self.folder / str(step)
        with _as_value_error():
            check_digest(*read_header(folder / MOMENTS), SHA256_KEY, MOMENTS)
            return read_peft_adapter(folder), load_file(folder / MOMENTS)

    def delete(self, step: int) -> None:
        shutil.rmtree(self.folder / str(step))

    def delete_all(self) -> None:
        """Also what another backend left: a new training must not go on from it, nor an export find it."""
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _adapter(recipe: Recipe, matrices: Mapping[str, Arrays]) -> Adapter:
    lora = recipe.lora
    pairs = {module: LowRank(**sides) for module, sides in matrices.items()}
    return Adapter(modules=pairs, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(str(error)) from None
