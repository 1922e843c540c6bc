"""One decoder layer of Gemma 4 and what it is made of.

Axes: B batch, L length, H heads, K kv heads, D head dim, E model, F hidden, P per-layer input, X experts, A experts of
a token. Matmuls run in the model's dtype; norms, RoPE, softmax and the router in fp32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from gemsmith.arch import Variant
from gemsmith.models.attention import DenseAttention, rms_norm
from gemsmith.models.moe import mixture_of_experts
from gemsmith.models.splash import SplashAttention
from gemsmith.recipe.backends import Projection

KeyValue = tuple[jax.Array, jax.Array]
AttentionEngine = DenseAttention | SplashAttention
_Module = TypeVar("_Module", bound=nnx.Module)


class Layer(nnx.Module):
    """One decoder layer: attention, the MLP (beside it experts, where the variant has them), the per-layer input.

    `isolates_matmuls`: optimization barriers around its projections.
    """

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype, isolates_matmuls: bool = True) -> None:
        self.has_experts = variant.experts > 0
        norm = partial(RMSNorm, variant.embed_dim, eps=variant.rms_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(variant, number, dtype=dtype, isolates_matmuls=isolates_matmuls)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.mlp = MLP(variant.embed_dim, variant.ffn_of(number), dtype=dtype, isolates_matmuls=isolates_matmuls)
        if self.has_experts:
            self.router = Router(variant, dtype=dtype)
            self.experts = Experts(variant, dtype=dtype)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        if variant.per_layer_input:
            self.per_layer_input_gate = linear(variant.embed_dim, variant.per_layer_input, dtype=dtype)  # (E, P)
            self.per_layer_projection = linear(variant.per_layer_input, variant.embed_dim, dtype=dtype)  # (P, E)
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        hidden: jax.Array,
        *,
        engine: AttentionEngine,
        shared: KeyValue | None,
        per_layer_input: jax.Array | None,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, KeyValue]:
        """The next layer's input, (B, L, E), and the keys and values that were attended to."""
        attended, key_value = self.self_attn(self.input_layernorm(hidden), engine=engine, shared=shared)  # (B, L, E)
        hidden = hidden + self.post_attention_layernorm(attended)  # (B, L, E)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))  # (B, L, E)
        if self.has_experts:
            fed = self.post_feedforward_layernorm_1(fed)  # (B, L, E)
            # The router norms the residual itself; only the experts see the layer's norm.
            weights, experts = self.router(hidden)  # (B, L, A) each
            mixed = self.experts(self.pre_feedforward_layernorm_2(hidden), weights, experts, mesh=mesh)  # (B, L, E)
            fed = fed + self.post_feedforward_layernorm_2(mixed)  # (B, L, E)
        hidden = hidden + self.post_feedforward_layernorm(fed)  # (B, L, E)
        if per_layer_input is not None:
            gated = jax.nn.gelu(self.per_layer_input_gate(hidden), approximate=True) * per_layer_input  # (B, L, P)
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))  # (B, L, E)
        return hidden * self.layer_scalar[...], key_value


class Attention(nnx.Module):
    """Self-attention; local or global, with its own keys and values or with those of an earlier layer."""

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype, isolates_matmuls: bool) -> None:
        self.isolates_matmuls = isolates_matmuls
        self.head_dim, self.eps = variant.head_dim_of(number), variant.rms_eps
        self.shares_kv, self.has_v = variant.shares_kv(number), variant.has_v(number)
        query_width, kv_width = variant.heads * self.head_dim, variant.kv_heads_of(number) * self.head_dim
        self.q_proj = linear(variant.embed_dim, query_width, dtype=dtype)  # (E, H·D)
        self.q_norm = RMSNorm(self.head_dim, eps=self.eps, dtype=dtype)
        if not self.shares_kv:
            self.k_proj = linear(variant.embed_dim, kv_width, dtype=dtype)  # (E, K·D)
            self.k_norm = RMSNorm(self.head_dim, eps=self.eps, dtype=dtype)
        if self.has_v:
            self.v_proj = linear(variant.embed_dim, kv_width, dtype=dtype)  # (E, K·D)
        self.o_proj = linear(query_width, variant.embed_dim, dtype=dtype)  # (H·D, E)

    def __call__(self, x: jax.Array, *, engine: AttentionEngine, shared: KeyValue | None) -> tuple[jax.Array, KeyValue]:
        """The attended values, (B, L, E), and the keys and values, whose axes are ordered as the engine has them."""
        query = engine.heads(_project(self, "q", x), self.head_dim, eps=self.eps, weight=self.q_norm.weight[...])
        if shared is None:
            key = _project(self, "k", x)  # (B, L, K·D)
            # Where K = V, the value is K's projection, before K's norm and RoPE.
            value = _project(self, "v", x) if self.has_v else key  # (B, L, K·D)
            heads = partial(engine.heads, head_dim=self.head_dim, eps=self.eps)
            shared = heads(key, weight=self.k_norm.weight[...]), heads(value, rotated=False)
        key, value = shared
        attended = engine.attend(query, key, value)  # (B, L, H·D)
        return _project(self, "o", attended), (key, value)  # (B, L, E)


class MLP(nnx.Module):
    """down(gelu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, ffn: int, *, dtype: jnp.dtype, isolates_matmuls: bool) -> None:
        self.isolates_matmuls = isolates_matmuls
        self.gate_proj = linear(hidden, ffn, dtype=dtype)  # (E, F)
        self.up_proj = linear(hidden, ffn, dtype=dtype)  # (E, F)
        self.down_proj = linear(ffn, hidden, dtype=dtype)  # (F, E)

    def __call__(self, x: jax.Array) -> jax.Array:
        gated = jax.nn.gelu(_project(self, "gate", x), approximate=True) * _project(self, "up", x)  # (B, L, F)
        return _project(self, "down", gated)  # (B, L, E)


class Router(nnx.Module):
    """The top-k experts of each token, and their weights."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype) -> None:
        self.eps, self.experts_per_token = variant.rms_eps, variant.experts_per_token
        self.proj = linear(variant.embed_dim, variant.experts, dtype=dtype, preferred_element_type=jnp.float32)
        self.scale = nnx.Param(jnp.ones((variant.embed_dim,), dtype))  # (E,)
        self.per_expert_scale = nnx.Param(jnp.ones((variant.experts,), dtype))  # (X,)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Router weights (fp32) and numbers of the top-k experts, (B, L, A) each, of x (B, L, E).

        The weights of a token add up to 1 before each expert's own factor.
        """
        normed = rms_norm(x, self.eps) * self.scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5  # (B, L, E)
        probabilities = jax.nn.softmax(self.proj(normed.astype(x.dtype)), axis=-1)  # (B, L, X)
        top, experts = jax.lax.top_k(probabilities, self.experts_per_token)  # (B, L, A)
        weights = top / top.sum(axis=-1, keepdims=True)  # (B, L, A)
        return weights * self.per_expert_scale[...].astype(jnp.float32)[experts], experts


class Experts(nnx.Module):
    """Many small MLPs as stacked matrices, (X, in, out)."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype) -> None:
        experts, hidden, ffn = variant.experts, variant.embed_dim, variant.expert_ffn
        self.gate_up_proj = nnx.Param(jnp.zeros((experts, hidden, 2 * ffn), dtype))  # (X, E, 2F)
        self.down_proj = nnx.Param(jnp.zeros((experts, ffn, hidden), dtype))  # (X, F, E)

    def __call__(self, x: jax.Array, weights: jax.Array, experts: jax.Array, *, mesh: Mesh | None) -> jax.Array:
        return mixture_of_experts(x, self.gate_up_proj[...], self.down_proj[...], weights, experts, mesh=mesh)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight, in fp32 inside."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_norm(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def _project(module: Attention | MLP, name: Projection, x: jax.Array) -> jax.Array:
    """The module's projection of that name, (..., out), of x (..., in), in x's dtype.

    Adapters in float32 make a bfloat16 base's output float32. Under the name, remat may save it. The optimization
    barriers keep XLA from fusing elementwise work into the matmuls on both sides, where it is done again for every
    tile: on v5p, the MLP's matmuls took up to 52 ms instead of 22 for ten layers (benchmarks/tpu_compile.py).
    """
    barrier: Callable[[jax.Array], jax.Array] = jax.lax.optimization_barrier if module.isolates_matmuls else lambda x: x
    product: jax.Array = getattr(module, f"{name}_proj")(barrier(x)).astype(x.dtype)
    return barrier(checkpoint_name(product, name))


def linear(inputs: int, outputs: int, *, dtype: jnp.dtype, use_bias: bool = False, **options: Any) -> nnx.Linear:
    options |= {"kernel_init": nnx.initializers.zeros, "rngs": nnx.Rngs(0)}
    return nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=dtype, use_bias=use_bias, **options)


def stacked(layer: _Module, repeats: int) -> _Module:
    """A layer whose arrays, of zeros, have a first axis of so many repeats."""
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), state))  # (repeats, …)
