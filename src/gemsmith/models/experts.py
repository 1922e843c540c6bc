"""What the chosen experts answer. Axes: N tokens, X experts, C experts per token, E model, F an expert's hidden units."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from gemsmith.models.sharding import BATCH


def ask_experts(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, shares: jax.Array, chosen: jax.Array, *, mesh: Mesh | None = None
) -> jax.Array:
    """The chosen experts' answers to x (B, L, E), added up by their shares: (B, L, E).

    gate_up (X, E, 2 F), down (X, F, E), shares and chosen (B, L, C). On a mesh, each device asks for its own tokens, and those of its
    experts that tp gave it; the sum over tp is the answer.
    """
    if mesh is None:
        return _ask(x, gate_up, down, shares, chosen)
    tokens, experts = PartitionSpec(BATCH, "sequence", None), PartitionSpec("tp", None, None)
    if gate_up.shape[0] % mesh.shape["tp"]:
        experts = PartitionSpec(None, None, None)
    split = mesh.shape["tp"] > 1 and experts[0] == "tp"

    def ask_own(x: jax.Array, gate_up: jax.Array, down: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        if not split:
            return _ask(x, gate_up, down, shares, chosen)
        own = chosen - jax.lax.axis_index("tp") * gate_up.shape[0]
        own = jnp.where((own >= 0) & (own < gate_up.shape[0]), own, gate_up.shape[0])
        return jax.lax.psum(_ask(x, gate_up, down, shares, own), "tp")

    sharded = jax.shard_map(ask_own, mesh=mesh, in_specs=(tokens, experts, experts, tokens, tokens), out_specs=tokens, check_vma=False)
    return sharded(x, gate_up, down, shares, chosen)


def _ask(x: jax.Array, gate_up: jax.Array, down: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
    """Each token is copied once for every expert it asks; the copies are sorted by expert, so that each expert's lie together.

    A token that asks expert X, of which there is none, gets nothing from it.
    """
    shape, (experts, per_token) = x.shape, (gate_up.shape[0], chosen.shape[-1])
    x, chosen = x.reshape(-1, shape[-1]), chosen.reshape(-1)
    order = jnp.argsort(chosen)
    loads = jnp.bincount(chosen, length=experts + 1)[:experts].astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // per_token], gate_up, loads), 2, axis=-1)
    answers = jax.lax.ragged_dot(jax.nn.gelu(gate, approximate=True) * up, down, loads)
    answers = jnp.where((chosen[order] < experts)[:, None], answers, 0)[jnp.argsort(order)]
    shares = shares.reshape(-1, per_token, 1)
    return (answers.reshape(-1, per_token, shape[-1]) * shares).sum(axis=1).astype(x.dtype).reshape(shape)
