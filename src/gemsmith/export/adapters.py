"""The adapter in a run's saved step, of either backend.

Orbax has stacks of layers, transposed:

training:       kernel_lora_a (layers, in, R), kernel_lora_b (layers, R, out)
PEFT and here:  A (R, in), B (out, R), W + scale * B A
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch import Tensor, Variant, VisionTower, lora_targets, trained_tensors
from gemsmith.arch.tensors import PREFIX, TOWER_LAYERS
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, LoraPair, check_fit, read_peft_adapter, refuse_broken, some
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.checkpoints.safetensors import read_header
from gemsmith.checkpoints.steps import (
    TRAINED,
    check_files,
    checkpoint_steps,
    checksum,
    compare_checksums,
    is_peft_step,
    read_or_damage,
    read_step_metadata,
)
from gemsmith.errors import CheckpointError, CorruptCheckpointError, RunError
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, read_record

MODEL = "model_params"
"""Orbax's folder of what was trained within a step's; the moments of the optimizer lie in another."""
NO_ADAPTER = Adapter(modules={}, rank=1, alpha=1.0)
"""What is merged where the weights themselves were trained."""


def find_step(run: Run, step: int | None = None) -> int:
    """The saved step asked for, or that train.json names, else the last. Raises RunError naming those there."""
    steps, record = checkpoint_steps(run.checkpoints), run.record_file("train")
    if step is None and steps and record.exists():
        step = int(read_record(run, TrainRecord).last_checkpoint.rpartition("/")[2])
        if step not in steps:
            raise RunError(
                f"{run.checkpoints}: holds {', '.join(map(str, steps))}, and step {step} is what training kept, says "
                f"{record}; put that step back, or delete that file and resume from step {steps[-1]} with: gemsmith "
                f"train {run.path}"
            )
    if not steps:
        again = " --force" if record.exists() else ""
        raise RunError(f"{run.checkpoints}: holds no complete checkpoint; run first: gemsmith train {run.path}{again}")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        remedy = "allowed: one of those, or null for that of train.keep"
        raise RunError(f"export.step: {step} was given, {run.checkpoints} holds {there}; {remedy}")
    return steps[-1] if step is None else step


def latest_restorable_step(run: Run, *, but: int) -> int | None:
    """The last saved step, other than one that is damaged, whose adapter can be exported; it is read to know that."""
    for step in reversed(checkpoint_steps(run.checkpoints)):
        with contextlib.suppress(CheckpointError):
            if step != but and read_trained(run, step):
                return step
    return None


def read_trained(run: Run, step: int | None = None) -> Adapter | dict[str, np.ndarray]:
    """The adapter of a run's saved step, or the weights where train.method is full. Raises as either."""
    return read_run_weights(run, step) if run.recipe.train.method == "full" else read_run_adapter(run, step)


def read_run_weights(run: Run, step: int | None = None) -> dict[str, np.ndarray]:
    """What train.method full trained by a saved step, float32, as the checkpoint's. Raises as read_run_adapter."""
    folder, variant = run.checkpoints / str(find_step(run, step)), recipe_variant(run.recipe)
    try:
        metadata = read_step_metadata(folder)
        if is_peft_step(folder):
            check_files(folder, metadata, (TRAINED,))
            weights = {name: place.copy() for name, place in read_header(folder / TRAINED)[0].items()}
        else:
            weights = _read_orbax_weights(folder, metadata, variant)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: is damaged ({error})") from None
    if odd := sorted(weights.keys() ^ {tensor.name for tensor in trained_tensors(variant)}):
        raise CheckpointError(f"{folder}: {some(odd)} is missing, or not of {variant.name}; export another step")
    return weights


def _read_orbax_weights(folder: Path, metadata: Mapping[str, Any], variant: Variant) -> dict[str, np.ndarray]:
    from gemsmith.models.sharding import is_transposed, path_of

    places: dict[str, list[Tensor]] = {}
    for tensor in trained_tensors(variant):
        places.setdefault("/".join(map(str, path_of(variant, tensor))), []).append(tensor)
    weights, sums = {}, {}
    for path, stack in restore_trained(folder / MODEL, lora=False):
        sums["/".join(path)] = checksum(stack)
        tensors = places.get("/".join(path).removesuffix("/value"), [])
        for tensor, value in zip(tensors, stack if tensors and tensors[0].layer is not None else [stack], strict=False):
            weights[tensor.name] = contiguous(np.swapaxes(value, -1, -2) if is_transposed(tensor) else value)
    compare_checksums(metadata, MODEL, sums)
    return weights


def read_run_adapter(run: Run, step: int | None = None) -> Adapter:
    """The adapter of a run's saved step (default: the last one), float32, read without a model.

    Raises CorruptCheckpointError where the step is not what was saved, RunError or CheckpointError where it does not
    exist, modules are missing or too many, shapes contradict the recipe, a value is not finite, or a B is all zero.
    """
    folder = run.checkpoints / str(find_step(run, step))
    variant, lora = recipe_variant(run.recipe), run.recipe.lora
    try:
        metadata = read_step_metadata(folder)
        if is_peft_step(folder):
            check_files(folder, metadata, (CONFIG, WEIGHTS))
            try:
                adapter = read_peft_adapter(folder)
            except CheckpointError as error:
                raise CorruptCheckpointError(str(error)) from None
        else:
            modules = _read_orbax(folder, metadata, variant)
            adapter = Adapter(modules=modules, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: is damaged ({error})") from None
    if (adapter.rank, adapter.alpha, adapter.rslora) != (lora.rank, lora.alpha, lora.rslora):
        raise CheckpointError(
            f"{folder}: has rank {adapter.rank} and alpha {adapter.alpha:g}, the recipe {lora.rank} and {lora.alpha:g}"
        )
    check_fit(adapter, lora_targets(variant, lora.targets), source=str(folder))
    check_values(adapter, source=str(folder))
    return adapter


def _read_orbax(folder: Path, metadata: Mapping[str, Any], variant: Variant) -> dict[str, LoraPair]:
    stacks, sums = {}, {}
    for path, stack in restore_trained(folder / MODEL):
        stacks[path], sums["/".join(path)] = stack, checksum(stack)
    compare_checksums(metadata, MODEL, sums)
    sides: dict[str, dict[str, np.ndarray]] = {}
    for path in list(stacks):
        (modules, side), stack = _modules_of(path, variant), stacks.pop(path)
        stack = stack[None] if stack.ndim == 2 else stack
        if len(stack) != len(modules):
            raise CheckpointError(
                f"{folder}: {'.'.join(path)} holds {len(stack)} layers, {variant.name} has {len(modules)} there"
            )
        for module, value in zip(modules, stack, strict=True):
            sides.setdefault(module, {})[side] = contiguous(value.T)
    if halves := [module for module, found in sides.items() if len(found) != 2]:
        raise CheckpointError(f"{folder}: has only one of A and B for {some(halves)}; export another step")
    return {name: LoraPair(**found) for name, found in sides.items()}


def check_values(adapter: Adapter, *, source: str) -> None:
    """Raises CheckpointError where an adapter would break the model (not finite) or do nothing (all of B is zero)."""
    broken, idle = [], []
    for name, pair in adapter.modules.items():
        if not pair.finite:
            broken.append(name)
        elif not (pair.b.any() and pair.a.any()):
            idle.append(name)
    refuse_broken(broken, source=source, otherwise="export an earlier step")
    if idle:
        raise CheckpointError(
            f"adapter {source}: is all zero in {len(idle)} of {len(adapter.modules)} modules ({some(idle)}), so it "
            "would change nothing there; train for more steps"
        )


def delta_norm(pair: LoraPair, scale: float) -> float:
    """Frobenius norm of scale * B A without making it: ||BA||² = sum((BᵀB) * (AAᵀ))."""
    a, b = pair.a.astype(np.float64), pair.b.astype(np.float64)
    return abs(scale) * math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))


def restore_trained(folder: Path, *, lora: bool = True) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Every LoRA matrix of an Orbax tree, or every array, by its path; nothing else of it is read, and none is kept.

    As float32 numpy: jax would put them on chips that may not be here. Raises CorruptCheckpointError.
    """

    def is_wanted(keys: Sequence[str]) -> bool:
        return not lora or any("lora_" in key for key in keys)

    def restore() -> Any:
        import orbax.checkpoint as ocp
        from etils import epath

        # The handler, not its Checkpointer: which warns of no step's metadata in an item's folder.
        handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(folder.absolute())
        tree = handler.metadata(path).tree
        wanted = _map_leaves(tree, lambda keys, leaf: leaf if is_wanted(keys) else ocp.PLACEHOLDER)
        as_numpy = _map_leaves(tree, lambda *_: ocp.RestoreArgs(restore_type=np.ndarray))
        return handler.restore(path, args=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy))

    for keys, value in _take_leaves(read_or_damage(restore)):
        if is_wanted(keys):
            yield keys, np.asarray(value, dtype=np.float32)


def _map_leaves(tree: Any, function: Any, path: tuple[str, ...] = ()) -> Any:
    if not isinstance(tree, Mapping):
        return function(path, tree)
    return {key: _map_leaves(value, function, (*path, str(key))) for key, value in tree.items()}


def _take_leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree, which is emptied on the way, so that what has been used need not be kept."""
    if isinstance(tree, dict):
        for key in list(tree):
            yield from _take_leaves(tree.pop(key), (*path, str(key)))
    else:
        yield path, tree


def _modules_of(path: Sequence[str], variant: Variant) -> tuple[list[str], str]:
    """HF modules, one for each layer of the stack, and side of a LoRA leaf.

    Its path in the 31B:

    layers.3.mlp.up_proj.kernel_lora_b  ->  model.language_model.layers.3.mlp.up_proj, ….9.mlp.up_proj, … and "b"

    A tower's layers are one stack, vision_tower.encoder.layers, and embed_vision is none.
    """
    leaf = ".".join(path)
    visual = re.fullmatch(r"(?:.+\.)?((?:vision_tower|embed_vision)\..+)\.kernel_lora_([ab])(?:\.value)?", leaf)
    if visual and isinstance(variant.vision, VisionTower):
        module, side = f"model.{visual[1]}", visual[2]
        if not module.startswith(TOWER_LAYERS):
            return [module], side
        inside = module.removeprefix(TOWER_LAYERS)
        return [f"{TOWER_LAYERS}{layer}.{inside}" for layer in range(variant.vision.layers)], side
    match = re.fullmatch(r"(?:.+\.)?layers\.(\d+)\.(.+)\.kernel_lora_([ab])(?:\.value)?", leaf)
    if not match or int(match[1]) >= len(variant.stacks):
        raise CheckpointError(
            f"checkpoint leaf {leaf}: is not layers.<N>.<module>.kernel_lora_a or _b of {variant.name}; was "
            "Gemsmith the trainer?"
        )
    return [f"{PREFIX}layers.{layer}.{match[2]}" for layer in variant.stacks[int(match[1])]], match[3]


def contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.float32)
