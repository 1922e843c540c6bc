"""Gemma 4's text model: every variant, once, with HF's names.

Axes: B batch, L length, H heads, K kv heads, D head dim, E model, F hidden, V vocabulary, N = B·L tokens, P per-layer input.
Matmuls run in the model's dtype; norms, rotation, softmax and logits in fp32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from gemsmith.models.attention import DenseAttention
from gemsmith.models.experts import ask_experts
from gemsmith.models.heads import inverse_frequencies, rms_norm, rope
from gemsmith.models.quantised import holds_codes, plain
from gemsmith.models.remat import Remat, rematerialised
from gemsmith.models.sharding import BATCH, constrain, gathered, gathered_specs
from gemsmith.models.splash import SplashAttention, make_kernel
from gemsmith.sizing import chains_layers
from gemsmith.zoo import Stretch, Variant

KeyValue = tuple[jax.Array, jax.Array]
Engine = DenseAttention | SplashAttention


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the forward pass runs; what it computes does not depend on it.

    `attention`: "dense" blocks anywhere, or the "splash" kernel on TPU ("splash-interpret" runs that one on CPU, slowly, for tests).
    `joins_adapters`: a projection and its adapter are one matmul where that saves time on TPU.
    """

    attention: str = "dense"
    joins_adapters: bool = False
    remat: Remat = "none"
    offload: tuple[str, ...] = ()
    mesh: Mesh | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What stands in a row for its pictures.

    `embeddings` (B, M, E) replace the tokens at `places` (B, M), counted along the row; a place of L or more is unused.
    `spans` (B, L): the tokens of one picture have the same number, others 0; in the sliding layers of variants with
    `bidirectional_images` they see each other in both directions.
    """

    embeddings: jax.Array
    places: jax.Array
    spans: jax.Array


class Gemma4(nnx.Module):
    """Logits from tokens, positions and segments, each (B, L); segment 0 is padding, and positions restart in each document.

    Layers that repeat are one entry of `layers`, whose arrays have a first axis of that many repeats (`Variant.stacks`); the forward
    pass scans over it. Weights are zero until they are loaded.
    """

    def __init__(self, variant: Variant, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, execution: Execution | None = None) -> None:
        dtype = jnp.dtype(dtype)
        self.variant, self.dtype, self.execution = variant, dtype, execution or Execution()
        self.embed_tokens = _embedding(variant.vocabulary, variant.hidden, dtype=dtype)
        if variant.per_layer_input:
            width = variant.layers * variant.per_layer_input
            self.embed_tokens_per_layer = _embedding(variant.vocabulary, width, dtype=dtype)
            self.per_layer_model_projection = _linear(variant.hidden, width, dtype=dtype)
            self.per_layer_projection_norm = RMSNorm(variant.per_layer_input, variant, dtype=dtype)
        self.layers = nnx.List([_stack(Layer(variant, layers[0], dtype=dtype), len(layers)) for layers in variant.stacks])
        self.norm = RMSNorm(variant.hidden, variant, dtype=dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, pictures: Pictures | None = None) -> jax.Array:
        """The logits, (B, L, V) in fp32."""
        return self.logits(self.hidden(tokens, positions, segments, pictures))

    def hidden(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, pictures: Pictures | None = None) -> jax.Array:
        """What the logits are made from, (B, L, E): the last layer's output after the final norm."""
        hidden, identities = self._embed(tokens, pictures)
        per_layer = self._per_layer_inputs(identities, hidden)
        engines = self._engines(positions, segments, None if pictures is None else pictures.spans)
        latest: dict[bool, KeyValue] | None = None
        first = 0
        for stretch in self.variant.pattern:
            layers = self.layers[first : first + stretch.period]
            inputs = None if per_layer is None else per_layer[stretch.first : stretch.first + stretch.period * stretch.repeats]
            hidden, latest = self._run_stretch(stretch, layers, hidden, engines, latest, inputs)
            first += stretch.period
        return self.norm(hidden)

    def logits(self, hidden: jax.Array, embedding: jax.Array | None = None) -> jax.Array:
        """The logits, softcap · tanh(hidden · embeddingᵀ / softcap), (B, L, V) in fp32; of another table, if one is given."""
        table = self.embed_tokens.embedding[...] if embedding is None else embedding
        logits = jnp.einsum("ble,ve->blv", hidden, table, preferred_element_type=jnp.float32)
        softcap = self.variant.softcap
        return softcap * jnp.tanh(logits / softcap) if softcap else logits

    def _embed(self, tokens: jax.Array, pictures: Pictures | None) -> tuple[jax.Array, jax.Array]:
        """Every token's embedding, (B, L, E), and the token that per-layer inputs are looked up by: at pictures, 0."""
        identities = tokens
        if pictures is not None:
            rows = jnp.arange(tokens.shape[0])[:, None]
            identities = tokens.at[rows, pictures.places].set(0, mode="drop")
        # The factor is rounded to the model's dtype, as in training: in bf16, sqrt(5376) is 73.5.
        embedded = self.embed_tokens(identities) * jnp.asarray(self.variant.hidden**0.5, self.dtype)
        if pictures is not None:
            embedded = embedded.at[rows, pictures.places].set(pictures.embeddings.astype(self.dtype), mode="drop")
        return self._laid_out(embedded), identities

    def _per_layer_inputs(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array | None:
        """What each layer gets beside the residual, (layers, B, L, P): half from the token's id, half from its embedding."""
        width = self.variant.per_layer_input
        if not width:
            return None
        shape = (*tokens.shape, self.variant.layers, width)
        identity = self.embed_tokens_per_layer(tokens).reshape(shape) * jnp.asarray(width**0.5, self.dtype)
        context = self.per_layer_model_projection(embedded).reshape(shape) * jnp.asarray(self.variant.hidden**-0.5, self.dtype)
        both = (self.per_layer_projection_norm(context) + identity) * jnp.asarray(2**-0.5, self.dtype)
        return jnp.moveaxis(both, 2, 0)

    def _engines(self, positions: jax.Array, segments: jax.Array, spans: jax.Array | None) -> dict[bool, Engine]:
        """How global (True) and local (False) layers attend to these tokens."""
        variant, how = self.variant, self.execution.attention

        def engine(*, head_dim: int, theta: float, fraction: float, window: int | None, spans: jax.Array | None) -> Engine:
            angles = rope(positions, inverse_frequencies(head_dim, theta, fraction))
            if how == "dense" or spans is not None:  # the kernel's mask cannot depend on the rows
                return DenseAttention(angles=angles, positions=positions, segments=segments, window=window, spans=spans)
            options: dict[str, Any] = {"mesh": self.execution.mesh, "interpret": how == "splash-interpret"}
            kernel = make_kernel(positions.shape[1], heads=variant.heads, window=window, **options)
            return SplashAttention(angles=angles, segments=segments, kernel=kernel, **options)

        everywhere = engine(
            head_dim=variant.global_head_dim,
            theta=variant.rope_theta_global,
            fraction=variant.rotary_fraction_global,
            window=None,
            spans=None,
        )
        nearby = engine(
            head_dim=variant.head_dim,
            theta=variant.rope_theta_local,
            fraction=1.0,
            window=variant.sliding_window,
            spans=spans if variant.bidirectional_images else None,
        )
        return {True: everywhere, False: nearby}

    def _run_stretch(
        self,
        stretch: Stretch,
        layers: list["Layer"],
        hidden: jax.Array,
        engines: dict[bool, Engine],
        latest: dict[bool, KeyValue] | None,
        per_layer: jax.Array | None,
    ) -> tuple[jax.Array, dict[bool, KeyValue] | None]:
        """The output of the stretch's last layer, and the keys and values that later layers share: a scan over the repeated block."""
        variant, shares = self.variant, self.variant.shares_kv(stretch.first)
        keeps = variant.kv_shared_layers > 0 and not shares
        graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
        kinds = [variant.is_global(stretch.first + place) for place in range(stretch.period)]
        if per_layer is not None:
            per_layer = per_layer.reshape(stretch.repeats, stretch.period, *per_layer.shape[1:])

        how, mesh, dequantises = self.execution, self.execution.mesh, holds_codes(states)
        chains = chains_layers(variant, how.remat, dequantises=dequantises)
        rerun = partial(rematerialised, remat=how.remat, offload=how.offload, dequantises=dequantises)
        specs = [gathered_specs(variant, stretch.first + place, mesh=mesh) if mesh else {} for place in range(stretch.period)]

        def run_layer(place: int, state: Any, hidden: jax.Array, shared: Any, extra: Any) -> tuple[jax.Array, KeyValue]:
            layer = nnx.merge(graphs[place], plain(gathered(state, specs[place], mesh)))
            hidden, key_value = layer(hidden, engine=engines[kinds[place]], shared=shared, per_layer_input=extra, mesh=mesh)
            return self._laid_out(hidden), key_value

        def run_block(carry: tuple[jax.Array, Any], sliced: tuple[Any, Any]) -> tuple[tuple[jax.Array, Any], None]:
            (hidden, kept), (states, extras) = carry, sliced
            for place, is_global in enumerate(kinds):
                run = partial(run_layer, place) if chains else rerun(partial(run_layer, place), in_turn=True)
                shared = latest[is_global] if shares and latest else None
                hidden, key_value = run(states[place], hidden, shared, None if extras is None else extras[place])
                kept = {**kept, is_global: key_value} if keeps else kept
            return (hidden, kept), None

        kept = (latest or self._no_keys_and_values(hidden, engines)) if keeps else None
        (hidden, kept), _ = jax.lax.scan(rerun(run_block) if chains else run_block, (hidden, kept), (states, per_layer))
        return hidden, kept if keeps else latest

    def _no_keys_and_values(self, hidden: jax.Array, engines: dict[bool, Engine]) -> dict[bool, KeyValue]:
        variant = self.variant

        def empty(engine: Engine, kv_heads: int, head_dim: int) -> KeyValue:
            projected = jax.ShapeDtypeStruct((*hidden.shape[:2], kv_heads * head_dim), hidden.dtype)
            heads = jax.eval_shape(lambda x: engine.heads(x, head_dim, eps=variant.rms_eps), projected)
            zeros = jnp.zeros(heads.shape, heads.dtype)
            return zeros, zeros

        return {
            True: empty(engines[True], variant.global_kv_heads, variant.global_head_dim),
            False: empty(engines[False], variant.kv_heads, variant.head_dim),
        }

    def _laid_out(self, hidden: jax.Array) -> jax.Array:
        return constrain(hidden, self.execution.mesh, BATCH, "sequence", None)


def _stack(layer: "Layer", repeats: int) -> "Layer":
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.zeros((repeats, *x.shape), x.dtype), state))


class Layer(nnx.Module):
    """One decoder layer: attention, then the MLP (beside it experts, where the variant has them), then the per-layer input."""

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype) -> None:
        self.has_experts = variant.experts > 0
        norm = partial(RMSNorm, variant.hidden, variant, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(variant, number, dtype=dtype)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.mlp = MLP(variant.hidden, variant.ffn_of(number), dtype=dtype)
        if self.has_experts:
            self.router = Router(variant, dtype=dtype)
            self.experts = Experts(variant, dtype=dtype)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        if variant.per_layer_input:
            self.per_layer_input_gate = _linear(variant.hidden, variant.per_layer_input, dtype=dtype)
            self.per_layer_projection = _linear(variant.per_layer_input, variant.hidden, dtype=dtype)
            self.post_per_layer_input_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        hidden: jax.Array,
        *,
        engine: Engine,
        shared: KeyValue | None,
        per_layer_input: jax.Array | None,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, KeyValue]:
        """The next layer's input, (B, L, E), and the keys and values that were attended to."""
        attended, key_value = self.self_attn(self.input_layernorm(hidden), engine=engine, shared=shared)
        hidden = hidden + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.has_experts:
            fed = self.post_feedforward_layernorm_1(fed) + self._consult_experts(hidden, mesh)
        hidden = hidden + self.post_feedforward_layernorm(fed)
        if per_layer_input is not None:
            gated = _gelu(self.per_layer_input_gate(hidden)) * per_layer_input
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return hidden * self.layer_scalar[...], key_value

    def _consult_experts(self, hidden: jax.Array, mesh: Mesh | None) -> jax.Array:
        """The experts' part. The router sees the residual itself and norms it in its own way; only the experts see the layer's norm."""
        shares, chosen = self.router(hidden)
        answer = self.experts(self.pre_feedforward_layernorm_2(hidden), shares, chosen, mesh=mesh)
        return self.post_feedforward_layernorm_2(answer)


class Attention(nnx.Module):
    """Self-attention; local or global, with its own keys and values or with those of an earlier layer."""

    def __init__(self, variant: Variant, number: int, *, dtype: jnp.dtype) -> None:
        self.head_dim, self.eps = variant.head_dim_of(number), variant.rms_eps
        self.window = None if variant.is_global(number) else variant.sliding_window
        self.shares_kv, self.has_v = variant.shares_kv(number), variant.has_v(number)
        query_width, kv_width = variant.heads * self.head_dim, variant.kv_heads_of(number) * self.head_dim
        self.q_proj = _linear(variant.hidden, query_width, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, variant, dtype=dtype)
        if not self.shares_kv:
            self.k_proj = _linear(variant.hidden, kv_width, dtype=dtype)
            self.k_norm = RMSNorm(self.head_dim, variant, dtype=dtype)
        if self.has_v:
            self.v_proj = _linear(variant.hidden, kv_width, dtype=dtype)
        self.o_proj = _linear(query_width, variant.hidden, dtype=dtype)

    def __call__(self, x: jax.Array, *, engine: Engine, shared: KeyValue | None) -> tuple[jax.Array, KeyValue]:
        """The attended values, (B, L, E), and the keys and values, as the engine orders their axes."""
        query = engine.heads(_project(self.q_proj, x, "q"), self.head_dim, eps=self.eps, weight=self.q_norm.weight[...])
        key, value = self._keys_and_values(x, engine) if shared is None else shared
        return _project(self.o_proj, engine.attend(query, key, value), "o"), (key, value)

    def _keys_and_values(self, x: jax.Array, engine: Engine) -> KeyValue:
        """Where K = V, the value is K's projection, before K's norm and rotation."""
        key = _project(self.k_proj, x, "k")
        value = _project(self.v_proj, x, "v") if self.has_v else key
        heads = partial(engine.heads, head_dim=self.head_dim, eps=self.eps)
        return heads(key, weight=self.k_norm.weight[...]), heads(value, rotated=False)


class MLP(nnx.Module):
    """down(gelu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, ffn: int, *, dtype: jnp.dtype) -> None:
        self.gate_proj = _linear(hidden, ffn, dtype=dtype)
        self.up_proj = _linear(hidden, ffn, dtype=dtype)
        self.down_proj = _linear(ffn, hidden, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gated = _gelu(_project(self.gate_proj, x, "gate")) * _project(self.up_proj, x, "up")
        return _project(self.down_proj, gated, "down")


class Router(nnx.Module):
    """Which experts each token asks, and how much each one's answer counts."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype) -> None:
        self.eps, self.experts_per_token = variant.rms_eps, variant.experts_per_token
        self.proj = _linear(variant.hidden, variant.experts, dtype=dtype, preferred_element_type=jnp.float32)
        self.scale = nnx.Param(jnp.ones((variant.hidden,), dtype))
        self.per_expert_scale = nnx.Param(jnp.ones((variant.experts,), dtype))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Shares (fp32) and numbers of the chosen experts, (B, L, experts per token) each, of x (B, L, E).

        The shares of the chosen ones add up to 1 before each expert's own factor.
        """
        normed = rms_norm(x, self.eps) * self.scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        probabilities = jax.nn.softmax(self.proj(normed.astype(x.dtype)), axis=-1)
        top, chosen = jax.lax.top_k(probabilities, self.experts_per_token)
        shares = top / top.sum(axis=-1, keepdims=True)
        return shares * self.per_expert_scale[...].astype(jnp.float32)[chosen], chosen


class Experts(nnx.Module):
    """Many small MLPs as stacked matrices, (experts, in, out)."""

    def __init__(self, variant: Variant, *, dtype: jnp.dtype) -> None:
        experts, hidden, ffn = variant.experts, variant.hidden, variant.expert_ffn
        self.gate_up_proj = nnx.Param(jnp.zeros((experts, hidden, 2 * ffn), dtype))
        self.down_proj = nnx.Param(jnp.zeros((experts, ffn, hidden), dtype))

    def __call__(self, x: jax.Array, shares: jax.Array, chosen: jax.Array, *, mesh: Mesh | None) -> jax.Array:
        return ask_experts(x, self.gate_up_proj[...], self.down_proj[...], shares, chosen, mesh=mesh)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight, in fp32 inside."""

    def __init__(self, width: int, variant: Variant, *, dtype: jnp.dtype) -> None:
        self.eps = variant.rms_eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_norm(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _project(linear: nnx.Linear, x: jax.Array, name: str) -> jax.Array:
    """The projection in the input's dtype (fp32 adapters make that of a bf16 base fp32), under a name that remat may keep it by."""
    return apart(checkpoint_name(linear(apart(x)).astype(x.dtype), name))


def apart(x: jax.Array) -> jax.Array:
    """The array itself, which XLA must make before it goes on; its gradient, too.

    Otherwise elementwise work is fused into the matmuls on both sides and done again for every tile: on v5p, the MLP's matmuls took up
    to 52 ms instead of 22 for ten layers (benchmarks/tpu_compile.py).
    """
    return jax.lax.optimization_barrier(x)


def _linear(inputs: int, outputs: int, *, dtype: jnp.dtype, preferred_element_type: jax.typing.DTypeLike | None = None) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=dtype,
        param_dtype=dtype,
        preferred_element_type=preferred_element_type,
        kernel_init=nnx.initializers.zeros,
        rngs=nnx.Rngs(0),
    )


def _embedding(count: int, width: int, *, dtype: jnp.dtype) -> nnx.Embed:
    return nnx.Embed(count, width, dtype=dtype, param_dtype=dtype, embedding_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
