"""The adapter in a run's saved step, of either backend; Orbax has stacks of layers, transposed.

training:       kernel_lora_a (layers, in, R), kernel_lora_b (layers, R, out)
PEFT and here:  A (R, in), B (out, R), W + scale * B A
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch import Variant, lora_targets, trained_tensors
from gemsmith.checkpoints import steps
from gemsmith.checkpoints.peft import WEIGHTS, Adapter, LoraPair, check_fit, read_peft_adapter, refuse_broken, some
from gemsmith.checkpoints.peft_config import CONFIG
from gemsmith.checkpoints.safetensors import read_header
from gemsmith.errors import CheckpointError, CorruptCheckpointError, RunError
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import Run, read_record

MODEL = "model_params"
"""Orbax's folder of what was trained within a step's; the moments of the optimizer lie in another."""
NO_ADAPTER = Adapter(modules={}, rank=1, alpha=1.0)  # what is merged where the weights themselves were trained


def find_step(run: Run, step: int | None = None) -> int:
    """The saved step asked for, or that train.json names, else the last. Raises RunError naming those there."""
    saved, record = steps.checkpoint_steps(run.checkpoints), run.record_file("train")
    if step is None and saved and record.exists():
        step = int(read_record(run, TrainRecord).last_checkpoint.rpartition("/")[2])
        if step not in saved:
            raise RunError(
                f"{run.checkpoints}: holds {', '.join(map(str, saved))}, and step {step} is what training kept, says "
                f"{record}; put that step back, or delete that file and resume from step {saved[-1]} with: gemsmith "
                f"train {run.path}"
            )
    if not saved:
        again = " --force" if record.exists() else ""
        raise RunError(f"{run.checkpoints}: holds no complete checkpoint; run first: gemsmith train {run.path}{again}")
    if step is not None and step not in saved:
        remedy = "allowed: one of those, or null for that of train.keep"
        raise RunError(f"export.step: {step} was given, {run.checkpoints} holds {', '.join(map(str, saved))}; {remedy}")
    return saved[-1] if step is None else step


def latest_restorable_step(run: Run, *, but: int) -> int | None:
    """The last saved step, other than one that is damaged, whose adapter can be exported; it is read to know that."""
    for step in reversed(steps.checkpoint_steps(run.checkpoints)):
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
        metadata = steps.read_step_metadata(folder)
        if steps.is_peft_step(folder):
            steps.check_files(folder, metadata, (steps.TRAINED,))
            weights = {name: place.copy() for name, place in read_header(folder / steps.TRAINED)[0].items()}
        else:
            weights = _read_orbax(folder, metadata, variant, lora=False)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: is damaged ({error})") from None
    if odd := sorted(weights.keys() ^ {tensor.name for tensor in trained_tensors(variant)}):
        raise CheckpointError(f"{folder}: {some(odd)} is missing, or not of {variant.name}; export another step")
    return weights


def read_run_adapter(run: Run, step: int | None = None) -> Adapter:
    """The adapter of a run's saved step (default: the last one), float32, read without a model.

    Raises CorruptCheckpointError where the step is not what was saved, RunError or CheckpointError where it does not
    exist, modules are missing or too many, shapes contradict the recipe, a value is not finite, or a B is all zero.
    """
    folder = run.checkpoints / str(find_step(run, step))
    variant, lora = recipe_variant(run.recipe), run.recipe.lora
    try:
        metadata = steps.read_step_metadata(folder)
        if steps.is_peft_step(folder):
            steps.check_files(folder, metadata, (CONFIG, WEIGHTS))
            try:
                adapter = read_peft_adapter(folder)
            except CheckpointError as error:
                raise CorruptCheckpointError(str(error)) from None
        else:
            sides = _read_orbax(folder, metadata, variant, lora=True)
            modules = sorted({name.rpartition(".")[0] for name in sides})
            if halves := [module for module in modules if not {f"{module}.a", f"{module}.b"} <= sides.keys()]:
                raise CheckpointError(f"{folder}: has only one of A and B for {some(halves)}; export another step")
            pairs = {module: LoraPair(a=sides[f"{module}.a"], b=sides[f"{module}.b"]) for module in modules}
            adapter = Adapter(modules=pairs, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{folder}: is damaged ({error})") from None
    if (adapter.rank, adapter.alpha, adapter.rslora) != (lora.rank, lora.alpha, lora.rslora):
        raise CheckpointError(
            f"{folder}: has rank {adapter.rank} and alpha {adapter.alpha:g}, the recipe {lora.rank} and {lora.alpha:g}"
        )
    check_fit(adapter, lora_targets(variant, lora.targets), source=str(folder))
    check_values(adapter, source=str(folder))
    return adapter


def _read_orbax(folder: Path, metadata: Mapping[str, Any], variant: Variant, *, lora: bool) -> dict[str, np.ndarray]:
    """What training saved, as the checkpoint has it, by a tensor's name; of LoRA by its module's with `.a` or `.b`.

    A stack of the 31B, layers.3.mlp.up_proj.kernel_lora_b (layers, R, out), gives B (out, R) of the modules
    model.language_model.layers.3.mlp.up_proj, ….9.mlp.up_proj, …
    """
    from gemsmith.models.sharding import by_path, is_transposed

    places = {".".join(map(str, path)): tensors for path, tensors in by_path(variant).items()}
    arrays, sums, odd = dict[str, np.ndarray](), dict[str, str](), list[str]()
    for path, value in restore_trained(folder / MODEL, lora=lora):
        sums["/".join(path)] = steps.checksum(value)
        leaf, _, side = ".".join(path).removesuffix(".value").partition("_lora_")
        tensors = places.get(leaf, [])
        stack = value if tensors and tensors[0].layer is not None else value[None]
        if not tensors or stack.ndim != 1 + len(tensors[0].shape) or len(stack) != len(tensors):
            odd.append(f"{'.'.join(path)} is {list(value.shape)}, {variant.name} has {len(tensors)} layers there")
            continue
        for tensor, one in zip(tensors, stack, strict=True):
            turned = np.swapaxes(one, -1, -2) if side or is_transposed(tensor) else one
            arrays[f"{tensor.module}.{side}" if side else tensor.name] = contiguous(turned)
    steps.compare_checksums(metadata, MODEL, sums)
    if odd:
        raise CheckpointError(f"{folder}: {odd[0]}; was Gemsmith the trainer?")
    return arrays


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

    def restore() -> dict[tuple[str, ...], Any]:
        import orbax.checkpoint as ocp
        from etils import epath

        # The handler, not its Checkpointer: which warns of no step's metadata in an item's folder.
        handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(folder.absolute())
        leaves = ocp.tree.to_flat_dict(handler.metadata(path).tree)
        wanted = [keys for keys in leaves if not lora or any("lora_" in key for key in keys)]
        item = dict.fromkeys(leaves, ocp.PLACEHOLDER) | {keys: leaves[keys] for keys in wanted}
        as_numpy = dict.fromkeys(leaves, ocp.RestoreArgs(restore_type=np.ndarray))
        trees = {"item": ocp.tree.from_flat_dict(item), "restore_args": ocp.tree.from_flat_dict(as_numpy)}
        restored = ocp.tree.to_flat_dict(handler.restore(path, args=ocp.args.PyTreeRestore(**trees)))
        return {keys: restored[keys] for keys in wanted}

    restored = steps.read_or_damage(restore)
    for keys in list(restored):
        yield keys, np.asarray(restored.pop(keys), dtype=np.float32)


def contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.float32)
