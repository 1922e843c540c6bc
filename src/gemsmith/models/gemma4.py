"""Gemma 4's text model: every variant, once, with HF's names.

Axes: B batch, L length, H heads, K kv heads, D head dim, E model, F hidden, V vocabulary, N = B·L tokens, P per-layer input.
Matmuls run in the model's dtype; norms, rotation, softmax and logits in fp32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gemsmith.models.attention import Rope, attention, inverse_frequencies, rope, rotate
from gemsmith.zoo import Variant

REMAT = ("none", "layer")

KeyValue = tuple[jax.Array, jax.Array]


class Gemma4(nnx.Module):
    """Logits from tokens, positions and segments, each (B, L); segment 0 is padding, and positions restart in each document.

    Qwix adapters: inject with `methods=("hidden",)`, which both `hidden` and `__call__` go through (Qwix intercepts that one method
    and no other), while `remat` is "none"; set `model.remat = "layer"` afterwards.
    """

    def __init__(self, variant: Variant, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, remat: str = "none", rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(dtype)
        self.variant, self.dtype, self.remat = variant, dtype, remat
        self.embed_tokens = _embedding(variant.vocabulary, variant.hidden, dtype=dtype, rngs=rngs)
        if variant.per_layer_input:
            width = variant.layers * variant.per_layer_input
            self.embed_tokens_per_layer = _embedding(variant.vocabulary, width, dtype=dtype, rngs=rngs)
            self.per_layer_model_projection = _linear(variant.hidden, width, dtype=dtype, rngs=rngs)
            self.per_layer_projection_norm = RMSNorm(variant.per_layer_input, variant, dtype=dtype)
        self.layers = nnx.List([Layer(variant, number, dtype=dtype, rngs=rngs) for number in range(variant.layers)])
        self.norm = RMSNorm(variant.hidden, variant, dtype=dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        """The logits, (B, L, V) in fp32."""
        return self.logits(self.hidden(tokens, positions, segments))

    def hidden(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        """What the logits are made from, (B, L, E): the last layer's output after the final norm."""
        hidden = self._embed(tokens)
        per_layer = self._per_layer_inputs(tokens, hidden)
        ropes = self._ropes(positions)
        latest: dict[bool, KeyValue] = {}
        for number, layer in enumerate(self.layers):
            is_global, shares = self.variant.is_global(number), self.variant.shares_kv(number)
            inputs = {
                "angles": ropes[is_global],
                "positions": positions,
                "segments": segments,
                "shared": latest[is_global] if shares else None,
                "per_layer_input": None if per_layer is None else per_layer[:, :, number],
            }
            hidden, key_value = _run_layer(layer, hidden, inputs, remat=self.remat)
            if self.variant.kv_shared_layers and not shares:
                latest[is_global] = key_value
        return self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits, softcap · tanh(hidden · embeddingᵀ / softcap), (B, L, V) in fp32."""
        logits = jnp.einsum("ble,ve->blv", hidden, self.embed_tokens.embedding[...], preferred_element_type=jnp.float32)
        softcap = self.variant.softcap
        return softcap * jnp.tanh(logits / softcap) if softcap else logits

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # The factor is rounded to the model's dtype, as in training: in bf16, sqrt(5376) is 73.5.
        return self.embed_tokens(tokens) * jnp.asarray(self.variant.hidden**0.5, self.dtype)

    def _per_layer_inputs(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array | None:
        """What each layer gets beside the residual, (B, L, layers, P): half from the token's id, half from its embedding."""
        width = self.variant.per_layer_input
        if not width:
            return None
        shape = (*tokens.shape, self.variant.layers, width)
        identity = self.embed_tokens_per_layer(tokens).reshape(shape) * jnp.asarray(width**0.5, self.dtype)
        context = self.per_layer_model_projection(embedded).reshape(shape) * jnp.asarray(self.variant.hidden**-0.5, self.dtype)
        return (self.per_layer_projection_norm(context) + identity) * jnp.asarray(2**-0.5, self.dtype)

    def _ropes(self, positions: jax.Array) -> dict[bool, Rope]:
        """The angles of global (True) and local (False) layers."""
        variant = self.variant
        return {
            True: rope(positions, inverse_frequencies(variant.global_head_dim, variant.rope_theta_global, variant.rotary_fraction_global)),
            False: rope(positions, inverse_frequencies(variant.head_dim, variant.rope_theta_local, 1.0)),
        }


def _run_layer(layer: "Layer", hidden: jax.Array, inputs: dict[str, Any], *, remat: str) -> tuple[jax.Array, KeyValue]:
    """The layer's output; with remat "layer" only its input is kept for the backward pass, and the rest computed again."""
    if remat == "none":
        return layer(hidden, **inputs)
    assert remat == "layer", remat
    graph, state = nnx.split(layer)

    def block(state: nnx.State, hidden: jax.Array, inputs: dict[str, Any]) -> tuple[tuple[jax.Array, KeyValue], nnx.State]:
        inner = nnx.merge(graph, state)
        output = inner(hidden, **inputs)
        assert len(jax.tree.leaves(nnx.state(inner))) == len(jax.tree.leaves(state)), "inject adapters before remat is set"
        return output, nnx.state(inner, nnx.RngState)

    output, random = jax.checkpoint(block)(state, hidden, inputs)
    # Dropout's counters moved on inside; without this, every layer and step would drop the same elements.
    nnx.update(layer, random)
    return output


class Layer(nnx.Module):
    """One decoder layer: attention, then the MLP (beside it experts, where the variant has them), then the per-layer input."""

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.has_experts = variant.experts > 0
        norm = partial(RMSNorm, variant.hidden, variant, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(variant, number, dtype=dtype, rngs=rngs)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.mlp = MLP(variant.hidden, variant.ffn_of(number), dtype=dtype, rngs=rngs)
        if self.has_experts:
            self.router = Router(variant, dtype=dtype, rngs=rngs)
            self.experts = Experts(variant, dtype=dtype, rngs=rngs)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        if variant.per_layer_input:
            self.per_layer_input_gate = _linear(variant.hidden, variant.per_layer_input, dtype=dtype, rngs=rngs)
            self.per_layer_projection = _linear(variant.per_layer_input, variant.hidden, dtype=dtype, rngs=rngs)
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        hidden: jax.Array,
        *,
        angles: Rope,
        positions: jax.Array,
        segments: jax.Array,
        shared: KeyValue | None,
        per_layer_input: jax.Array | None,
    ) -> tuple[jax.Array, KeyValue]:
        """The next layer's input, (B, L, E), and the keys and values that were attended to."""
        normed = self.input_layernorm(hidden)
        attended, key_value = self.self_attn(normed, angles=angles, positions=positions, segments=segments, shared=shared)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.has_experts:
            fed = self.post_feedforward_layernorm_1(fed) + self._consult_experts(hidden)
        hidden = hidden + self.post_feedforward_layernorm(fed)
        if per_layer_input is not None:
            gated = _gelu(self.per_layer_input_gate(hidden)) * per_layer_input
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return hidden * self.layer_scalar[...], key_value

    def _consult_experts(self, hidden: jax.Array) -> jax.Array:
        """The experts' part. The router sees the residual itself and norms it in its own way; only the experts see the layer's norm."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        shares, chosen = self.router(flat)
        answer = self.experts(self.pre_feedforward_layernorm_2(flat), shares, chosen)
        return self.post_feedforward_layernorm_2(answer.reshape(hidden.shape))


class Attention(nnx.Module):
    """Self-attention; local or global, with its own keys and values or with those of an earlier layer."""

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.head_dim, self.eps = variant.head_dim_of(number), variant.rms_eps
        self.window = None if variant.is_global(number) else variant.sliding_window
        self.shares_kv, self.has_v = variant.shares_kv(number), variant.has_v(number)
        query_width, kv_width = variant.heads * self.head_dim, variant.kv_heads_of(number) * self.head_dim
        self.q_proj = _linear(variant.hidden, query_width, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(self.head_dim, variant, dtype=dtype)
        if not self.shares_kv:
            self.k_proj = _linear(variant.hidden, kv_width, dtype=dtype, rngs=rngs)
            self.k_norm = RMSNorm(self.head_dim, variant, dtype=dtype)
        if self.has_v:
            self.v_proj = _linear(variant.hidden, kv_width, dtype=dtype, rngs=rngs)
        self.o_proj = _linear(query_width, variant.hidden, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, *, angles: Rope, positions: jax.Array, segments: jax.Array, shared: KeyValue | None
    ) -> tuple[jax.Array, KeyValue]:
        """The attended values, (B, L, E), and the keys and values, (B, L, K, D) each."""
        query = rotate(self.q_norm(self._heads(self.q_proj, x)), angles)
        key, value = self._keys_and_values(x, angles) if shared is None else shared
        attended = attention(query, key, value, positions=positions, segments=segments, window=self.window)
        return _project(self.o_proj, attended.reshape(*x.shape[:-1], -1)), (key, value)

    def _keys_and_values(self, x: jax.Array, angles: Rope) -> KeyValue:
        """Where K = V, the value is K's projection, before K's norm and rotation."""
        key = self._heads(self.k_proj, x)
        value = self._heads(self.v_proj, x) if self.has_v else key
        return rotate(self.k_norm(key), angles), _rms_norm(value, self.eps).astype(value.dtype)

    def _heads(self, linear: nnx.Linear, x: jax.Array) -> jax.Array:
        projected = _project(linear, x)
        return projected.reshape(*x.shape[:-1], -1, self.head_dim)


class MLP(nnx.Module):
    """down(gelu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, ffn: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.gate_proj = _linear(hidden, ffn, dtype=dtype, rngs=rngs)
        self.up_proj = _linear(hidden, ffn, dtype=dtype, rngs=rngs)
        self.down_proj = _linear(ffn, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _project(self.down_proj, _gelu(_project(self.gate_proj, x)) * _project(self.up_proj, x))


class Router(nnx.Module):
    """Which experts each token asks, and how much each one's answer counts."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.eps, self.experts_per_token = variant.rms_eps, variant.experts_per_token
        self.proj = _linear(variant.hidden, variant.experts, dtype=dtype, rngs=rngs, preferred_element_type=jnp.float32)
        self.scale = nnx.Param(jnp.ones((variant.hidden,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((variant.experts,), dtype))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Shares (fp32) and numbers of the chosen experts, (N, experts per token) each, of x (N, E).

        The shares of the chosen ones add up to 1 before each expert's own factor.
        """
        normed = _rms_norm(x, self.eps) * self.scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        probabilities = jax.nn.softmax(self.proj(normed.astype(x.dtype)), axis=-1)
        top, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
        shares = top / top.sum(axis=-1, keepdims=True)
        return shares * self.per_expert_scale[...].astype(jnp.float32)[chosen], chosen


class Experts(nnx.Module):
    """Many small MLPs as stacked matrices, (experts, in, out)."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        make = nnx.initializers.lecun_normal(batch_axis=(0,))
        experts, hidden, ffn = variant.experts, variant.hidden, variant.expert_ffn
        self.gate_up_proj = nnx.Param(make(rngs.params(), (experts, hidden, 2 * ffn), dtype))
        self.down_proj = nnx.Param(make(rngs.params(), (experts, ffn, hidden), dtype))

    def __call__(self, x: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """The chosen experts' answers to x (N, E), added up by their shares: (N, E).

        Each token is copied once for every expert it asks; the copies are sorted by expert, so that each expert's lie together.
        """
        per_token, experts = chosen.shape[1], self.down_proj.shape[0]
        order = jnp.argsort(chosen.reshape(-1))
        loads = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
        gate, up = jnp.split(jax.lax.ragged_dot(x[order // per_token], self.gate_up_proj[...], loads), 2, axis=-1)
        answers = jax.lax.ragged_dot(_gelu(gate) * up, self.down_proj[...], loads)
        answers = answers[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return (answers * shares[:, :, None]).sum(axis=1).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight, in fp32 inside."""

    def __init__(self, width: int, variant: Variant, *, dtype: jnp.dtype) -> None:
        self.eps = variant.rms_eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (_rms_norm(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def _rms_norm(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _project(linear: nnx.Linear, x: jax.Array) -> jax.Array:
    """The projection in the input's dtype: fp32 adapters make that of a bf16 base fp32."""
    return linear(x).astype(x.dtype)


def _linear(
    inputs: int, outputs: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, preferred_element_type: jax.typing.DTypeLike | None = None
) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, preferred_element_type=preferred_element_type, rngs=rngs
    )


def _embedding(count: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(count, width, dtype=dtype, param_dtype=dtype, rngs=rngs)
