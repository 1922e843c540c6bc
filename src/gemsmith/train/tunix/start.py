"""Puts an adapter that training starts from into a model on its devices."""

import jax
import numpy as np
from flax import nnx

from gemsmith.checkpoint.adapter import Adapter
from gemsmith.models import Gemma4
from gemsmith.recipe import Recipe
from gemsmith.train.tunix.lora import targets_of


def set_adapter(model: Gemma4, recipe: Recipe, adapter: Adapter) -> None:
    """Gives an adapted model these matrices, each laid out as the model's own are."""
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    for path, tensors in targets_of(model.variant, recipe.lora).items():
        pairs = [adapter.modules[tensor.module] for tensor in tensors]
        for name, matrices in (
            ("kernel_lora_a", [pair.a.T for pair in pairs]),
            ("kernel_lora_b", [pair.b.T for pair in pairs]),
        ):
            leaf = state[(*path, name)]
            state[(*path, name)] = leaf.replace(_laid_out(np.stack(matrices), leaf.get_value()))
    nnx.update(model, nnx.from_flat_state(list(state.items())))


def _laid_out(value: np.ndarray, like: jax.Array) -> jax.Array:
    assert value.shape == like.shape, f"{value.shape} for {like.shape}"
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])
