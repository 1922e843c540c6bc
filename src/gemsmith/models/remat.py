"""What the forward pass saves for the backward pass, on the device or in the host's memory, and what is recomputed."""

from collections.abc import Callable
from typing import Any

import jax

from gemsmith.execution import Remat


def rematerialised(
    function: Callable[..., Any],
    remat: Remat,
    *,
    offload: tuple[str, ...] = (),
    dequantises: bool = False,
    in_turn: bool = False,
) -> Callable[..., Any]:
    """The function of a layer, or of a block of them, whose backward pass recomputes what `remat` does not save.

    "none" saves all, "layer" only the function's inputs; names save the results that `checkpoint_name` gave them, and
    the inputs. Results named in `offload` wait in the host's memory. A function that `dequantises` weights never saves
    those. `in_turn`: nothing is recomputed before the gradient that needs it is there; else XLA may recompute several
    functions at once, and hold all of that.
    """
    if remat == "none" and not dequantises:
        return function
    names = () if remat in ("none", "layer") else remat
    policy: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(*names)
    if remat == "none":
        policy = _all_but_weights
    elif offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
    # JAX's barrier is there to keep XLA from merging both passes, which in a scan are loops of their own; what it does
    # here is order them. With weights left out of it XLA gathers ahead: 26B-A4B on v6e 7 % faster, with two thirds more
    # memory (docs/log).
    return jax.checkpoint(function, policy=policy, prevent_cse=in_turn)


def _all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result may be saved: not what a custom_vjp gives, which dequantises frozen weights.

    Any other custom_vjp has a gradient, and has been resolved by the time a policy is asked.
    """
    return str(primitive) != "custom_vjp_call"
