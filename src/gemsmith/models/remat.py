"""What the backward pass keeps of the forward pass, and what it computes again."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENDED = "attended"
"""Attention's output, and what its kernel needs in the backward pass."""
LORA = "lora"
"""What adapters' A give: R wide, so it costs next to nothing to keep."""
NAMES = (*PROJECTIONS, ATTENDED, LORA)

Remat = Literal["none", "layer"] | tuple[str, ...]


def rematerialised(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The layer's function, whose backward pass computes again what `remat` does not keep.

    "none" keeps all, "layer" only the layer's inputs; names keep the results that `checkpoint_name` gave them, and the inputs.
    """
    if remat == "none":
        return function
    names: Sequence[str] = () if remat == "layer" else remat
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    # Layers run in a scan, where forward and backward are loops of their own: nothing to keep XLA from merging.
    return jax.checkpoint(function, policy=policy, prevent_cse=False)
