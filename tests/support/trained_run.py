"""Runs whose training has ended: a tiny base and an Orbax checkpoint of a random adapter, laid out as Tunix does."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from gemsmith.arch import find_variant, lora_targets
from gemsmith.checkpoints.peft import Adapter, LoraPair
from gemsmith.recipe.load import build_recipe
from gemsmith.runs.resolve import resolve
from gemsmith.runs.run import Run, open_run
from support.made import made_once

RANK, ALPHA = 4, 8.0


def make_adapter(variant: str, *, seed: int = 0, rank: int = RANK, alpha: float = ALPHA) -> Adapter:
    random = np.random.default_rng(seed)
    modules = {}
    for target in lora_targets(find_variant(variant)):
        out, inner = target.shape
        a = random.uniform(-1, 1, (rank, inner)) / np.sqrt(inner)
        b = 0.1 * random.standard_normal((out, rank))
        modules[target.module] = LoraPair(a=a.astype(np.float32), b=b.astype(np.float32))
    return Adapter(modules=modules, rank=rank, alpha=alpha)


def save_steps(root: Path, steps: Mapping[int, Adapter], variant: str) -> None:
    """Writes `<root>/<step>/model_params` as Tunix's CheckpointManager does.

    Its leaves are `layers/<N>/<module>/kernel_lora_a/value`.
    """
    import orbax.checkpoint as ocp

    handlers = {"model_params": ocp.PyTreeCheckpointHandler(), "optimizer_state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(
        root, item_handlers=handlers, options=ocp.CheckpointManagerOptions(max_to_keep=None)
    ) as manager:
        for step, adapter in steps.items():
            manager.save(
                step, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(item=as_tree(adapter, variant)))
            )


def stacks_of(adapter: Adapter, variant: str) -> Iterator[tuple[int, list[str], np.ndarray, np.ndarray]]:
    """Every whole stack's number, the words of a module in it, and A (layers, in, R) and B (layers, R, out)."""
    prefix = "model.language_model.layers."
    kinds = dict.fromkeys(name.removeprefix(prefix).partition(".")[2] for name in adapter.modules)
    for number, layers in enumerate(find_variant(variant).stacks):
        for kind in kinds:
            pairs = [adapter.modules.get(f"{prefix}{layer}.{kind}") for layer in layers]
            if all(pairs):
                a, b = (np.stack([getattr(pair, side).T for pair in pairs]) for side in "ab")
                yield number, kind.split("."), a, b


def as_tree(adapter: Adapter, variant: str) -> dict:
    import jax.numpy as jnp

    tree: dict = {}
    for number, words, a, b in stacks_of(adapter, variant):
        place = tree
        for word in ("layers", str(number), *words):
            place = place.setdefault(word, {})
        place["kernel_lora_a"] = {"value": jnp.asarray(a)}
        place["kernel_lora_b"] = {"value": jnp.asarray(b)}
    return tree


def make_trained_run(
    folder: Path, checkpoint: Path, *, steps: Mapping[int, Adapter] | None = None, **lora: object
) -> Run:
    """A run in `folder` of a checkpoint, with these adapters as its saved steps, or a random one as step 20, which is
    kept beside the checkpoint: to copy one takes a tenth of the time in which Orbax saves one."""
    values = {
        "checkpoint": str(checkpoint),
        "data": {"train": {"task": "verilog", "rows": 8}, "max_length": 256},
        "lora": {"rank": RANK, "alpha": ALPHA, **lora},
    }
    recipe, derived = resolve(build_recipe(values))
    run = open_run(folder, recipe, derived)
    variant = str(recipe.model)
    if steps is not None:
        save_steps(run.checkpoints, steps, variant)
        return run
    saved = checkpoint.with_name(f"{checkpoint.name}-steps")
    made_once(saved, lambda folder: save_steps(folder, {20: make_adapter(variant)}, variant))
    shutil.copytree(saved, run.checkpoints, dirs_exist_ok=True)
    return run
