"""AdamW as torch and Hugging Face's Trainer run it, as a chain of Optax transformations.

The learning rate is an argument of each update, so that it is computed once, in Python's floats, and recorded as it was used.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gemsmith.recipe import Optimizer


def make_optimizer(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Clip by the global norm, Adam, decoupled decay of every adapter matrix, times -learning_rate."""
    clip = optax.identity() if optimizer.clip_norm is None else clip_as_torch(optimizer.clip_norm)
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay),
        scale_by_given_rate(),
    )


def clip_as_torch(max_norm: float) -> optax.GradientTransformation:
    """Gradients times min(1, max_norm / (norm + 1e-6)), which is torch's clip_grad_norm_; Optax's own has no 1e-6."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001 - Optax's signature
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda grad: grad * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # noqa: ARG005 - Optax's signature


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
    """Updates times minus the `learning_rate` that is given with them."""

    def update(updates: Any, state: Any, params: Any = None, *, learning_rate: Any, **_: Any) -> tuple[Any, Any]:  # noqa: ARG001
        return jax.tree.map(lambda value: -learning_rate * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # noqa: ARG005
