"""AdamW as torch and Hugging Face's Trainer run it, as a chain of Optax transformations.

The learning rate is an argument of each update, so that it is computed once, in Python's floats, and recorded as it was
used.
"""

import math
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
        adam_as_torch(optimizer.beta1, optimizer.beta2, optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay),
        scale_by_given_rate(),
    )


def clip_as_torch(max_norm: float) -> optax.GradientTransformation:
    """Gradients times min(1, max_norm / (norm + 1e-6)), which is torch's clip_grad_norm_; Optax's own has no 1e-6."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:  # noqa: ARG001 - Optax's signature
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda grad: grad * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # noqa: ARG005 - Optax's signature


def adam_as_torch(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam's direction, with bias corrections as exact as torch's.

    Optax's own takes 1 - beta2^count in float32, which at the first step is 1.3e-5 off, and so every early update
    6.5e-6.
    """

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:  # noqa: ARG001
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment(grads, state.nu, beta2, 2)
        correction1, correction2 = (-jnp.expm1(count * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        directions = jax.tree.map(lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + epsilon), mu, nu)
        return directions, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
    """Updates times minus the `learning_rate` that is given with them."""

    def update(updates: Any, state: Any, params: Any = None, *, learning_rate: Any, **_: Any) -> tuple[Any, Any]:  # noqa: ARG001
        return jax.tree.map(lambda value: -learning_rate * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # noqa: ARG005
