"""Mixture of experts without a capacity: every token is answered by all the experts that it asks, and no other product is computed.

Axes: N tokens, A experts that each token asks, C = N·A copies of tokens, X experts, E model, F hidden.
"""

from functools import partial

import jax
import jax.numpy as jnp

# Rows of one product. An expert's last block is filled up with others' rows, whose products are thrown away. On CPU a layer forward and
# back (16,384 copies, 128 experts, E 704, F 176) takes 0.55 CPU-s with 32 or 64 and 0.60 with 128; jax.lax.ragged_dot, which multiplies
# every copy by every expert there, 51.
ROWS = {"cpu": 64}
OTHER_ROWS = 512


def ask_experts(x: jax.Array, gate_up: jax.Array, down: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
    """The answers to x (N, E) of the experts whose numbers are in `chosen` (N, A), added up by `shares` (N, A): (N, E).

    An expert is down(gelu(gate(x)) · up(x)), with gate and up side by side in `gate_up` (X, E, 2F), and `down` (X, F, E). Gradients go to
    x and shares; experts are frozen, and theirs are zero.

        chosen  2 0   copies of token 0 0 1 1   sorted by expert   1 0 1 0
                0 1   ask expert        2 0 0 1                    0 0 1 2  (here 0: token 0 and token 1)
    """
    asked = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))
    back = jnp.argsort(order)
    loads = jnp.bincount(chosen.reshape(-1), length=down.shape[0]).astype(jnp.int32)
    copies = _permuted(jnp.repeat(x, asked, axis=0), order, back)
    gate, up = jnp.split(_products(copies, gate_up, loads, False), 2, axis=-1)
    # Shares count here, where a row is F wide, and not after `down`, where the backward pass would need the answers again.
    hidden = jax.nn.gelu(gate, approximate=True) * up * _permuted(shares.reshape(-1, 1), order, back)
    answers = _permuted(_products(hidden.astype(x.dtype), down, loads, False), back, order)
    return answers.reshape(*chosen.shape, -1).sum(axis=1, dtype=jnp.float32).astype(x.dtype)


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """x[order]. Its gradient is read in the order `back`, where JAX's own would be scattered."""
    del back
    return x[order]


_permuted.defvjp(lambda x, order, back: (x[order], back), lambda back, gradient: (gradient[back], None, None))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(rows: jax.Array, weights: jax.Array, loads: jax.Array, transposed: bool) -> jax.Array:
    """Each row's product with its expert's matrix (or that matrix transposed), the rows of expert 0 first: `loads` says how many."""
    return jax.lax.platform_dependent(
        rows, weights, loads, tpu=partial(_ragged_products, transposed=transposed), default=partial(_block_products, transposed=transposed)
    )


_products.defvjp(
    lambda rows, weights, loads, transposed: (_products(rows, weights, loads, transposed), (weights, loads)),
    lambda transposed, kept, gradient: (_products(gradient, *kept, not transposed), None, None),
)


def _ragged_products(rows: jax.Array, weights: jax.Array, loads: jax.Array, *, transposed: bool) -> jax.Array:
    dimensions = jax.lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(rows, weights, loads, dimensions)


def _block_products(rows: jax.Array, weights: jax.Array, loads: jax.Array, *, transposed: bool) -> jax.Array:
    """The same one block of rows after the other. What a block gives for rows of the next expert, that one's first block overwrites."""
    count, experts = rows.shape[0], weights.shape[0]
    size = min(ROWS.get(jax.default_backend(), OTHER_ROWS), count)
    blocks = -(-loads // size)
    last_blocks, starts = jnp.cumsum(blocks), jnp.cumsum(loads) - loads
    numbers = jnp.arange(count // size + experts)
    expert = jnp.searchsorted(last_blocks, numbers, side="right").clip(max=experts - 1)
    first = starts[expert] + (numbers - (last_blocks - blocks)[expert]) * size
    padded = jnp.pad(rows, ((0, size), (0, 0)))
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def add_block(number: jax.Array, products: jax.Array) -> jax.Array:
        some_rows = jax.lax.dynamic_slice_in_dim(padded, first[number], size)
        weight = jax.lax.dynamic_index_in_dim(weights, expert[number], keepdims=False)
        product = jax.lax.dot_general(some_rows, weight, contracted, preferred_element_type=jnp.float32).astype(rows.dtype)
        return jax.lax.dynamic_update_slice_in_dim(products, product, first[number], axis=0)

    products = jnp.zeros((count + size, weights.shape[1 if transposed else 2]), rows.dtype)
    return jax.lax.fori_loop(0, last_blocks[-1], add_block, products)[:count]
