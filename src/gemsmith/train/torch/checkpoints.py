"""Checkpoints of the TRL backend: each a folder that PEFT opens, and beside the adapter what exact continuation needs.

    checkpoints/<step>/adapter_config.json  adapter_model.safetensors  moments.safetensors  training.json
                       model.safetensors    (instead of the adapter, where train.method is full; float32)

A folder has its name only once all of it is on disk, so whatever is called by a number is complete. training.json holds
the SHA-256 of the other files and its own.
"""

import json
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gemsmith.arch.tensors import class_names
from gemsmith.checkpoints import steps as saved_steps
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, LoraPair, read_peft_adapter, write_peft_adapter
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.checkpoints.safetensors import write_tensors
from gemsmith.errors import CheckpointError, CorruptCheckpointError
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run
from gemsmith.system.files import fsync_path
from gemsmith.system.locks import LOCK

MOMENTS = "moments.safetensors"
Arrays = dict[str, np.ndarray]


class PeftCheckpoints:
    """The saved steps in a folder; one process `writes`, any may read."""

    def __init__(self, run: Run, *, writes: bool = True) -> None:
        self.folder, self._recipe, self._writes = run.checkpoints, run.recipe, writes

    def steps(self) -> list[int]:
        found = saved_steps.checkpoint_steps(self.folder)
        return [step for step in found if saved_steps.is_peft_step(self.folder / str(step))]

    def others(self) -> list[int]:
        return sorted({*saved_steps.checkpoint_steps(self.folder)}.difference(self.steps()))

    def save(self, step: int, weights: Arrays, moments: Arrays, metadata: Mapping[str, Any]) -> None:
        """Writes a step, and deletes those that are too many, but for metadata's `best_step`.

        `weights`: a module's name and `.a` (R, in) or `.b` (out, R), or with train.method full a tensor's name.
        """
        if not self._writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        beside, place = self.folder / f".{step}.partial", self.folder / str(step)
        try:
            recipe, lora = self._recipe, self._recipe.lora
            files, written = {MOMENTS: moments}, {}
            if recipe.train.method == "full":
                beside.mkdir()
                files[saved_steps.TRAINED] = weights
            else:
                modules = dict.fromkeys(name.rpartition(".")[0] for name in weights)
                pairs = {name: LoraPair(a=weights[f"{name}.a"], b=weights[f"{name}.b"]) for name in modules}
                adapter = Adapter(modules=pairs, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
                names, dropout = class_names(recipe_variant(recipe)), lora.dropout
                written = write_peft_adapter(adapter, beside, recipe.checkpoint, dropout=dropout, class_names=names)
            for name, arrays in files.items():  # on a full disk safetensors' own raises no OSError
                shapes = {tensor: value.shape for tensor, value in arrays.items()}
                written[name] = write_tensors(beside / name, shapes, arrays.__getitem__)
            sealed = saved_steps.add_checksum(metadata, {name: file.sha256 for name, file in written.items()})
            (beside / saved_steps.TRAINING).write_text(json.dumps(sealed), encoding="utf-8")
            for file in beside.iterdir():
                fsync_path(file)
            shutil.rmtree(place, ignore_errors=True)
            beside.rename(place)
            fsync_path(self.folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        for old in self.steps()[: -self._recipe.train.save_total_limit]:
            if old != metadata.get("best_step"):
                shutil.rmtree(self.folder / str(old))

    def read_metadata(self, step: int) -> dict[str, Any]:
        return saved_steps.read_step_metadata(self.folder / str(step))

    def set_aside(self, step: int) -> str:
        return saved_steps.set_aside(self.folder / str(step), writes=self._writes)

    def read(self, step: int) -> tuple[Arrays, Arrays]:
        """The weights and the moments. Raises CorruptCheckpointError where they are not what was saved."""
        folder, full = self.folder / str(step), self._recipe.train.method == "full"
        names = (saved_steps.TRAINED,) if full else (CONFIG, WEIGHTS)
        saved_steps.check_files(folder, self.read_metadata(step), (*names, MOMENTS))
        try:
            if full:
                return load_file(folder / saved_steps.TRAINED), load_file(folder / MOMENTS)
            pairs = read_peft_adapter(folder).modules.items()
            weights = {f"{name}.{side}": getattr(pair, side) for name, pair in pairs for side in "ab"}
            return weights, load_file(folder / MOMENTS)
        except (CheckpointError, SafetensorError, ValueError) as error:
            raise CorruptCheckpointError(str(error)) from None

    def delete_all(self) -> None:
        """Also what another backend left: a new training must not resume from it, nor an export find it."""
        if self._writes and self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
