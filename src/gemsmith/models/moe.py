"""Mixture of experts without a capacity: a token goes through all its top-k experts, and nothing else is computed.

Axes: B batch, L length, A experts of a token (top-k), C = B·L·A copies of tokens, X experts, E model, F hidden.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, PartitionSpec

from gemsmith.models.sharding import BATCH

# Rows of one product. An expert's last block is filled up with others' rows, whose products are thrown away. On CPU a
# layer forward and back (16,384 copies, 128 experts, E 704, F 176) takes 0.55 CPU-s with 32 or 64 and 0.60 with 128;
# jax.lax.ragged_dot, which multiplies every copy by every expert there, 51.
ROWS = {"cpu": 64}
OTHER_ROWS = 512


def mixture_of_experts(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, experts: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """The weighted sum over each token's top-k experts, (B, L, E), of x (B, L, E).

    `experts` (B, L, A) are their numbers, `weights` (B, L, A) the router's weights. An expert is down(gelu(gate(x)) ·
    up(x)), with gate and up side by side in `gate_up` (X, E, 2F), and `down` (X, F, E). On a mesh each device computes
    its own tokens with the experts that tp gave it; the sum over tp is the result.
    """
    if mesh is None:
        return _mixture(x, gate_up, down, weights, experts, choices=down.shape[0])
    divides = gate_up.shape[0] % mesh.shape["tp"] == 0
    tokens, by_expert = PartitionSpec(BATCH, "sequence", None), PartitionSpec("tp" if divides else None, None, None)
    split = mesh.shape["tp"] > 1 and divides

    def of_device(
        x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, experts: jax.Array
    ) -> jax.Array:
        count = gate_up.shape[0]
        if not split:
            return _mixture(x, gate_up, down, weights, experts, choices=count)
        own = experts - jax.lax.axis_index("tp") * count  # (B, L, A)
        own = jnp.where((own >= 0) & (own < count), own, count)
        return jax.lax.psum(_mixture(x, gate_up, down, weights, own, choices=count + 1), "tp")

    specs = (tokens, by_expert, by_expert, tokens, tokens)
    sharded = jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return sharded(x, gate_up, down, weights, experts)


def _mixture(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, experts: jax.Array, *, choices: int
) -> jax.Array:
    """The mixture of the experts numbered below `choices`; if that is X + 1, the choice X counts for nothing.

    experts  2 0   copies of token 0 0 1 1   sorted by expert   0 1 1 0
             0 1   go to expert    2 0 0 1                      0 0 1 2
    """
    top_k = experts.shape[-1]  # A
    order = jnp.argsort(experts.reshape(-1))  # (C,)
    back = jnp.argsort(order)  # (C,)
    loads = jnp.bincount(experts.reshape(-1), length=choices).astype(jnp.int32)  # (choices,)
    copies = _permuted(jnp.repeat(x.reshape(-1, x.shape[-1]), top_k, axis=0), order, back)  # (C, E)
    gate, up = jnp.split(_products(copies, gate_up, loads, False), 2, axis=-1)  # (C, F) each
    # Router weights count here, where a row is F wide: after `down` the backward pass would need the outputs.
    hidden = jax.nn.gelu(gate, approximate=True) * up * _permuted(weights.reshape(-1, 1), order, back)  # (C, F)
    outputs = _permuted(_products(hidden.astype(x.dtype), down, loads, False), back, order)  # (C, E)
    return outputs.reshape(*experts.shape, -1).sum(axis=-2, dtype=jnp.float32).astype(x.dtype)  # (B, L, E)


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """x[order]. Its gradient is read in the order `back`, where JAX's own would be scattered."""
    del back
    return x[order]


_permuted.defvjp(lambda x, order, back: (x[order], back), lambda back, gradient: (gradient[back], None, None))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(rows: jax.Array, weights: jax.Array, loads: jax.Array, transposed: bool) -> jax.Array:
    """Each row's product with its expert's matrix (or that matrix transposed), the rows of expert 0 first.

    `loads` (X or X + 1) says how many rows each expert has, and then how many at the end have none; their product is 0.
    """
    of_experts = loads[: weights.shape[0]]
    ragged, in_blocks = (partial(make, transposed=transposed) for make in (_ragged_products, _block_products))
    made = jax.lax.platform_dependent(rows, weights, of_experts, tpu=ragged, default=in_blocks)  # (C, out)
    if of_experts.shape == loads.shape:
        return made
    return jnp.where((jnp.arange(rows.shape[0]) < of_experts.sum())[:, None], made, 0)  # (C, out)


def _products_forward(rows: Any, weights: Any, loads: Any, transposed: bool) -> tuple[jax.Array, tuple[Any, ...]]:
    """The products, and the rows where the weights have a gradient: those of frozen ones are not saved."""
    saved = (weights.value, loads.value, rows.value if weights.perturbed else None)
    return _products(rows.value, weights.value, loads.value, transposed), saved


def _products_backward(transposed: bool, saved: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
    weights, loads, rows = saved
    if isinstance(gradient, SymbolicZero):
        return None, None, None
    of_weights = None
    if rows is not None:
        pair = (gradient, rows) if transposed else (rows, gradient)
        of_weights = jax.lax.ragged_dot_general(*pair, loads[: weights.shape[0]], _BY_EXPERT)  # (X, in, out)
    return _products(gradient, weights, loads, not transposed), of_weights, None


_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)

# A sum over the rows of each expert: one matrix for each.
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _ragged_products(rows: jax.Array, weights: jax.Array, loads: jax.Array, *, transposed: bool) -> jax.Array:
    dimensions = jax.lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(rows, weights, loads, dimensions)  # (C, out)


def _block_products(rows: jax.Array, weights: jax.Array, loads: jax.Array, *, transposed: bool) -> jax.Array:
    """The same one block of rows after the other; what one gives for rows of the next expert, that one overwrites."""
    count, experts = rows.shape[0], weights.shape[0]
    size = min(ROWS.get(jax.default_backend(), OTHER_ROWS), count)
    blocks = -(-loads // size)  # (X,)
    last_blocks, starts = jnp.cumsum(blocks), jnp.cumsum(loads) - loads  # (X,), (X,)
    numbers = jnp.arange(count // size + experts)  # (blocks,)
    expert = jnp.searchsorted(last_blocks, numbers, side="right").clip(max=experts - 1)  # (blocks,)
    first = starts[expert] + (numbers - (last_blocks - blocks)[expert]) * size  # (blocks,)
    padded = jnp.pad(rows, ((0, size), (0, 0)))  # (C + size, in)
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def add_block(number: jax.Array, products: jax.Array) -> jax.Array:
        some_rows = jax.lax.dynamic_slice_in_dim(padded, first[number], size)  # (size, in)
        weight = jax.lax.dynamic_index_in_dim(weights, expert[number], keepdims=False)  # (in, out), or that transposed
        product = jax.lax.dot_general(some_rows, weight, contracted, preferred_element_type=jnp.float32)
        product = product.astype(rows.dtype)
        return jax.lax.dynamic_update_slice_in_dim(products, product, first[number], axis=0)  # (C + size, out)

    products = jnp.zeros((count + size, weights.shape[1 if transposed else 2]), rows.dtype)  # (C + size, out)
    return jax.lax.fori_loop(0, last_blocks[-1], add_block, products)[:count]  # (C, out)
