"""Runs whose training has ended: a tiny base and an Orbax checkpoint of a random adapter, in the layout that Tunix writes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from gemsmith.export.adapters import Adapter, LowRank
from gemsmith.recipe import build_recipe
from gemsmith.resolve import resolve
from gemsmith.run import Run, open_run
from gemsmith.zoo import find_variant, lora_targets

RANK, ALPHA = 4, 8.0


def make_adapter(variant: str, *, seed: int = 0, rank: int = RANK, alpha: float = ALPHA) -> Adapter:
    random = np.random.default_rng(seed)
    modules = {}
    for target in lora_targets(find_variant(variant)):
        out, inner = target.shape
        a = random.uniform(-1, 1, (rank, inner)) / np.sqrt(inner)
        b = 0.1 * random.standard_normal((out, rank))
        modules[target.module] = LowRank(a=a.astype(np.float32), b=b.astype(np.float32))
    return Adapter(modules=modules, rank=rank, alpha=alpha)


def save_steps(root: Path, steps: Mapping[int, Adapter]) -> None:
    """Writes `<root>/<step>/model_params` with leaves `layers/<N>/<module>/kernel_lora_a/value`, as Tunix's CheckpointManager does."""
    import orbax.checkpoint as ocp

    handlers = {"model_params": ocp.PyTreeCheckpointHandler(), "optimizer_state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers, options=ocp.CheckpointManagerOptions(max_to_keep=None)) as manager:
        for step, adapter in steps.items():
            manager.save(step, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(item=as_tree(adapter))))


def as_tree(adapter: Adapter) -> dict:
    import jax.numpy as jnp

    tree: dict = {}
    for module, pair in adapter.modules.items():
        place = tree
        for part in module.removeprefix("model.language_model.").split("."):
            place = place.setdefault(part, {})
        place["kernel_lora_a"] = {"value": jnp.asarray(pair.a.T)}
        place["kernel_lora_b"] = {"value": jnp.asarray(pair.b.T)}
    return tree


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from a second thread, and on a busy machine torch's wait for each other by spinning: 4 s became 50."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def make_run(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Run]:
    """Returns a trained run: `make_run("tiny-e2b", "bfloat16")`; `steps` replaces the saved adapters."""

    def make(variant: str = "tiny-12b", dtype: str = "bfloat16", steps: Mapping[int, Adapter] | None = None, **lora: object) -> Run:
        values = {
            "checkpoint": str(tiny_checkpoint(variant, dtype)),
            "data": {"train": {"task": "verilog", "rows": 8}, "max_length": 256},
            "lora": {"rank": RANK, "alpha": ALPHA, **lora},
        }
        recipe, derived = resolve(build_recipe(values))
        run = open_run(tmp_path / "run", recipe, derived)
        save_steps(run.checkpoints, steps if steps is not None else {20: make_adapter(variant)})
        return run

    return make


@pytest.fixture
def adapter_of() -> Callable[..., Adapter]:
    return make_adapter


@pytest.fixture
def save() -> Callable[[Path, Mapping[int, Adapter]], None]:
    return save_steps
