"""Runs whose data stage has ended: a base of two layers, so that a step compiles in seconds, and a few packed rows."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from gemsmith.data import prepare_data
from gemsmith.recipe import Recipe
from gemsmith.recipe_file import build_recipe
from gemsmith.run import Run, open_run
from gemsmith.testing.tiny import make_checkpoint
from gemsmith.zoo import find_variant

SMALL = replace(
    find_variant("tiny-12b"),
    name="custom",
    layers=2,
    embed_dim=32,
    ffn=64,
    heads=2,
    kv_heads=2,
    head_dim=16,
    global_head_dim=32,
    model_type="gemma4",
)


@pytest.fixture(scope="session", autouse=True)
def compiled_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of the same recipe compile the same step: JAX keeps it from one test to the next, and for processes that
    tests start."""
    folder, seconds = str(tmp_path_factory.mktemp("compiled")), 0.5
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(seconds)}


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(SMALL, tmp_path_factory.mktemp("small") / "base", dtype="float32", shards=1)


def make_recipe(checkpoint: Path, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "data": {"train": {"task": "verilog", "rows": 12}, "max_length": 256},
        "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"optimizer_steps": 6, "rows_per_step": 2, "dtype": "float32", "remat": "none", "checkpoint_every": 2},
    }
    for name, keys in sections.items():
        values[name] = values[name] | keys if isinstance(values.get(name), dict) else keys
    return build_recipe(values)


@pytest.fixture(scope="session")
def prepare(small_checkpoint: Path) -> Callable[..., Run]:
    """Returns a run that can be trained: `prepare(folder, train={"optimizer_steps": 4})`."""

    def make(folder: Path, **sections: Any) -> Run:
        run = open_run(folder, make_recipe(small_checkpoint, **sections))
        prepare_data(run)
        return run

    return make


@pytest.fixture
def prepared_run(prepare: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """`prepare` in the test's own folder: `prepared_run(train={"optimizer_steps": 4})`."""
    return partial(prepare, tmp_path / "run")


@pytest.fixture
def small_recipe(small_checkpoint: Path) -> Callable[..., Recipe]:
    """Returns the recipe of the base of two layers: `small_recipe(lora={"dropout": 0.0})`."""
    return partial(make_recipe, small_checkpoint)
