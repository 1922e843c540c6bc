"""Training that starts from an adapter in a PEFT folder, `train.start_adapter`: A and B as they are there, in float32."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from gemsmith.checkpoint.adapter import WEIGHTS, Adapter, check_finite, check_fit, read_peft_adapter
from gemsmith.errors import RecipeError
from gemsmith.models import Gemma4
from gemsmith.recipe import Recipe
from gemsmith.run import sha256_file
from gemsmith.train.lora import targets_of
from gemsmith.zoo import Variant, lora_targets


def read_start_adapter(recipe: Recipe, variant: Variant) -> Adapter | None:
    """The adapter of train.start_adapter, None where the recipe names none.

    Raises RecipeError for another rank or scale than lora says, CheckpointError for modules or shapes that are not those of model and
    lora.targets, for values that are not finite, and for a folder that cannot be read.
    """
    folder = recipe.train.start_adapter
    if folder is None:
        return None
    adapter, lora = read_peft_adapter(Path(folder)), recipe.lora
    for key, found, wanted in (
        ("rank", adapter.rank, lora.rank),
        ("alpha", adapter.alpha, lora.alpha),
        ("rslora", adapter.rslora, lora.rslora),
    ):
        if found != wanted:
            raise RecipeError(
                f"train.start_adapter: {folder} has {key} {_plain(found)}, lora.{key} is {_plain(wanted)}; set lora.{key}={_plain(found)}"
            )
    source = f"{folder} (train.start_adapter)"
    check_fit(adapter, lora_targets(variant, lora.targets), source=source)
    check_finite(adapter, source=source, otherwise="start from another")
    return adapter


def start_adapter_hash(recipe: Recipe) -> str | None:
    """SHA-256 of the weights of train.start_adapter."""
    folder = recipe.train.start_adapter
    return None if folder is None else sha256_file(Path(folder) / WEIGHTS)


def set_adapter(model: Gemma4, recipe: Recipe, adapter: Adapter) -> None:
    """Gives an adapted model these matrices, each laid out as the model's own are."""
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    for path, tensors in targets_of(model.variant, recipe.lora).items():
        pairs = [adapter.modules[tensor.module] for tensor in tensors]
        for name, matrices in (("kernel_lora_a", [pair.a.T for pair in pairs]), ("kernel_lora_b", [pair.b.T for pair in pairs])):
            leaf = state[(*path, name)]
            state[(*path, name)] = leaf.replace(_laid_out(np.stack(matrices), leaf.get_value()))
    nnx.update(model, nnx.from_flat_state(list(state.items())))


def _laid_out(value: np.ndarray, like: jax.Array) -> jax.Array:
    assert value.shape == like.shape, f"{value.shape} for {like.shape}"
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])


def _plain(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
