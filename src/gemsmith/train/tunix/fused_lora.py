"""A projection and its LoRA adapter fused into one matmul: x W + u B = [x, u] [W; B], with u = x A.

In two matmuls, u B is written and read again, as large as the projection's result. XLA for TPU puts W and B together
while it multiplies, so that only x is copied, which is narrower (docs/log has what that gave). Elsewhere W would be
copied.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def fused_lora_matmul(x: jax.Array, u: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + u B, (..., out), of x (..., in), u (..., R), W (in, out) and B (R, out), rounded once."""
    both = jax.lax.optimization_barrier(jnp.concatenate([x, u], axis=-1))  # (..., in + R)
    return both @ jnp.concatenate([w, b], axis=0)  # (..., in + R) @ (in + R, out)


def _forward(x: jax.Array, u: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return fused_lora_matmul(x, u, w, b), (x, u, w, b)


def _backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of the two matmuls: fused, that of [x, u] would be split again. XLA drops W's own where unused."""
    x, u, w, b = saved
    return gradient @ w.T, gradient @ b.T, _outer(x, gradient), _outer(u, gradient)


def _outer(x: jax.Array, gradient: jax.Array) -> jax.Array:
    return jnp.einsum("...i,...o->io", x, gradient)  # (in, out)


fused_lora_matmul.defvjp(_forward, _backward)
