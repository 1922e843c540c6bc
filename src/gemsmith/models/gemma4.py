"""Gemma 4, every variant, once, with HF's names: the text model, and what it embeds images with.

Axes: B batch, L length, H heads, K kv heads, D head dim, E model, F hidden, V vocabulary, P per-layer input, X experts,
A experts of a token. Matmuls run in the model's dtype; norms, RoPE, softmax and logits in fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from gemsmith.arch import ScanBlocks, Variant, VisionTower
from gemsmith.models.attention import DenseAttention, inverse_frequencies, rope
from gemsmith.models.layers import AttentionEngine, KeyValue, Layer, RMSNorm, linear, stacked
from gemsmith.models.quantization import dequantize_state, holds_quantized
from gemsmith.models.sharding import AXES, BATCH, TRAINED, axis_size, constrain, gathered, gathered_specs, platform_of
from gemsmith.models.splash import SplashAttention, make_kernel
from gemsmith.models.vision import FeatureProjector, Images, PatchProjector, SoftTokens, Tower, blocks_of
from gemsmith.recipe.backends import TUNED, Optimizations, Remat, chains_layers


def rematerialized(
    function: Callable[..., Any],
    remat: Remat,
    *,
    offload: tuple[str, ...] = (),
    dequantizes: bool = False,
    in_turn: bool = False,
) -> Callable[..., Any]:
    """The function of a layer, or of a block of them, whose backward pass recomputes what `remat` does not save.

    "none" saves all, "layer" only the function's inputs; names save the results that `checkpoint_name` gave them, and
    the inputs. Results named in `offload` wait in the host's memory. A function that `dequantizes` weights never saves
    those. `in_turn`: nothing is recomputed before its gradient is there; else XLA may hold several functions' at once.
    """
    if remat == "none" and not dequantizes:
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
    """Whether a result may be saved: not that of a custom_vjp without a gradient, which dequantizes frozen weights."""
    return str(primitive) != "custom_vjp_call"


KeyValues = dict[bool, KeyValue]
"""By kind of layer: those of the latest global (True) and the latest sliding (False) layer."""
Engines = dict[bool, AttentionEngine]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the forward pass runs; what it computes does not depend on it.

    `attention`: "dense" anywhere, or the "splash" kernel on TPU ("splash-interpret": that one on CPU, for tests).
    """

    attention: str = "dense"
    optimizations: Optimizations = TUNED
    remat: Remat = "none"
    offload: tuple[str, ...] = ()
    mesh: Mesh | None = None


class Gemma4(nnx.Module):
    """Logits from tokens, positions and segments, each (B, L): segment 0 is padding, documents' positions begin at 0.

    Layers that repeat are one entry of `layers`, whose arrays have a first axis of that many repeats
    (`Variant.stacks`); the forward pass scans over the blocks of layers that repeat (`Variant.scan_blocks`). Weights
    are zero until they are loaded. With `vision` it can embed images, too.
    """

    def __init__(self, variant: Variant, *, dtype: jax.typing.DTypeLike, execution: Execution, vision: bool) -> None:
        dtype = jnp.dtype(dtype)
        self.variant, self.dtype, self.execution = variant, dtype, execution
        self.embed_tokens = _embedding(variant.vocabulary, variant.embed_dim, dtype=dtype)  # (V, E)
        if variant.per_layer_input:
            width = variant.layers * variant.per_layer_input
            self.embed_tokens_per_layer = _embedding(variant.vocabulary, width, dtype=dtype)  # (V, layers·P)
            self.per_layer_model_projection = linear(variant.embed_dim, width, dtype=dtype)  # (E, layers·P)
            self.per_layer_projection_norm = RMSNorm(variant.per_layer_input, eps=variant.rms_eps, dtype=dtype)
        make = partial(Layer, variant, dtype=dtype, isolates_matmuls=self.execution.optimizations.isolates_matmuls)
        self.layers = nnx.List([stacked(make(layers[0]), len(layers)) for layers in variant.stacks])
        self.norm = RMSNorm(variant.embed_dim, eps=variant.rms_eps, dtype=dtype)
        if vision:
            assert variant.vision is not None, f"{variant.name} has no vision"
            if isinstance(variant.vision, VisionTower):
                self.vision_tower = Tower(variant.vision, dtype=dtype)
            else:
                self.vision_embedder = PatchProjector(variant.vision, dtype=dtype)
            self.embed_vision = FeatureProjector(variant.vision, variant.embed_dim, dtype=dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, images: SoftTokens | None = None
    ) -> jax.Array:
        """The logits, (B, L, V) in fp32."""
        return self.logits(self.hidden(tokens, positions, segments, images))

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, images: SoftTokens | None = None
    ) -> jax.Array:
        """The last layer's output after the final norm, (B, L, E): what the logits are made from."""
        hidden, token_ids = self._embed(tokens, images)  # (B, L, E), (B, L)
        per_layer = self._per_layer_inputs(token_ids, hidden)  # (layers, B, L, P) or None
        engines = self._engines(positions, segments, images)
        shared: KeyValues | None = None
        first_stack = 0
        for blocks in self.variant.scan_blocks:
            layers = self.layers[first_stack : first_stack + blocks.period]
            scan = _LayerScan(self, blocks, layers, engines, shared)
            hidden, shared = scan.run(hidden, None if per_layer is None else per_layer[blocks.layers])  # (B, L, E)
            first_stack += blocks.period
        return self.norm(hidden)  # (B, L, E)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits, softcap · tanh(hidden · embeddingᵀ / softcap), (B, L, V) in fp32."""
        matrix = self.embed_tokens.embedding[...].astype(self.dtype)  # (V, E)
        logits = jnp.einsum("ble,ve->blv", hidden, matrix, preferred_element_type=jnp.float32)  # (B, L, V)
        softcap = self.variant.softcap
        return softcap * jnp.tanh(logits / softcap) if softcap else logits

    def embed_images(self, images: Images, *, length: int) -> SoftTokens:
        """The images' soft tokens; images are split over all devices if their number allows it, else by their rows."""
        rows, each, patches, values = images.patches.shape
        mesh, count = self.execution.mesh, rows * each
        axes = AXES if mesh is not None and count % axis_size(mesh, AXES) == 0 else BATCH
        flat = constrain(images.patches.reshape(count, patches, values), mesh, axes)  # (B·N, P, C)
        positions = constrain(images.positions.reshape(count, patches, 2), mesh, axes)
        if isinstance(self.variant.vision, VisionTower):
            features = self.vision_tower(flat, positions, mesh=mesh)  # (B·N, P / 9, W)
        else:
            features = self.vision_embedder(flat, positions)  # (B·N, P, W)
        embeddings = self.embed_vision(features).reshape(rows, -1, self.variant.embed_dim)  # (B, N·S, E)
        return SoftTokens(
            embeddings=constrain(embeddings, mesh, BATCH),
            places=images.places.reshape(rows, -1),
            blocks=blocks_of(images.places, length),
            longest=images.places.shape[-1],
        )

    def _embed(self, tokens: jax.Array, images: SoftTokens | None) -> tuple[jax.Array, jax.Array]:
        """Each token's embedding, (B, L, E), and the id of its per-layer input, (B, L), which is 0 at images."""
        token_ids = tokens
        if images is not None:
            rows = jnp.arange(tokens.shape[0])[:, None]  # (B, 1), beside places (B, M)
            token_ids = tokens.at[rows, images.places].set(0, mode="drop")  # (B, L)
        # The factor is rounded to the model's dtype, as in training: in bf16, sqrt(5376) is 73.5.
        embedded = self._rows(self.embed_tokens, token_ids) * jnp.asarray(self.variant.embed_dim**0.5, self.dtype)
        if images is not None:
            embedded = embedded.at[rows, images.places].set(images.embeddings.astype(self.dtype), mode="drop")
        return self.split_rows(embedded), token_ids  # (B, L, E), (B, L)

    def _rows(self, table: nnx.Embed, token_ids: jax.Array) -> jax.Array:
        """The tokens' rows of the table, (B, L, …); of one in float32, which is trained, their gradients add up so."""
        rows = jnp.take(table.embedding[...], token_ids, axis=0).astype(self.dtype)
        if isinstance(table.embedding, TRAINED):  # as in transformers, padding's is not trained
            rows = jnp.where(token_ids[..., None] == 0, jax.lax.stop_gradient(rows), rows)
        return rows

    def _per_layer_inputs(self, token_ids: jax.Array, embedded: jax.Array) -> jax.Array | None:
        """What each layer gets beside the residual, (layers, B, L, P): half by the token's id, half its embedding."""
        width = self.variant.per_layer_input
        if not width:
            return None
        shape = (*token_ids.shape, self.variant.layers, width)  # (B, L, layers, P)
        identity = self._rows(self.embed_tokens_per_layer, token_ids).reshape(shape)
        identity *= jnp.asarray(width**0.5, self.dtype)
        context = self.per_layer_model_projection(embedded).reshape(shape)
        context *= jnp.asarray(self.variant.embed_dim**-0.5, self.dtype)
        both = (self.per_layer_projection_norm(context) + identity) * jnp.asarray(2**-0.5, self.dtype)
        return jnp.moveaxis(both, 2, 0)  # (layers, B, L, P)

    def _engines(self, positions: jax.Array, segments: jax.Array, images: SoftTokens | None) -> Engines:
        """How global (True) and sliding (False) layers attend to these tokens."""
        variant, how = self.variant, self.execution.attention

        def engine(*, is_global: bool) -> AttentionEngine:
            rotation = (variant.head_dim, variant.rope_theta_local, 1.0)
            if is_global:
                rotation = (variant.global_head_dim, variant.rope_theta_global, variant.rotary_fraction_global)
            window = None if is_global else variant.sliding_window
            angles = rope(positions, inverse_frequencies(*rotation))  # 2 x (B, L, D/2)
            tokens: dict[str, Any] = {"angles": angles, "positions": positions, "segments": segments}
            dense = partial(DenseAttention, **tokens, window=window, platform=platform_of(self.execution.mesh))
            if images is not None and variant.bidirectional_images and not is_global:
                # The kernel's mask cannot depend on the rows.
                return dense(image_blocks=images.blocks, max_image_tokens=images.longest)
            if how == "dense":
                return dense()
            options: dict[str, Any] = {"mesh": self.execution.mesh, "interpret": how == "splash-interpret"}
            kernel = make_kernel(positions.shape[1], heads=variant.heads, window=window, **options)
            options["heads_kernel"] = self.execution.optimizations.heads_kernel
            return SplashAttention(angles=angles, segments=segments, kernel=kernel, **options)

        return {is_global: engine(is_global=is_global) for is_global in (True, False)}

    def split_rows(self, hidden: jax.Array) -> jax.Array:
        """The hidden states (B, L, E), split over the mesh by rows and positions."""
        return constrain(hidden, self.execution.mesh, BATCH, "sequence", None)


class _LayerScan:
    """A scan over one run of `Variant.scan_blocks`: one block of layers, again and again, with each repeat's weights.

    The arrays of `layers`, those of the block, have a first axis of repeats; `shared` are the keys and values, by kind
    of layer, that earlier layers left for these, or that these leave for later ones.
    """

    def __init__(
        self, model: Gemma4, blocks: ScanBlocks, layers: Sequence[Layer], engines: Engines, shared: KeyValues | None
    ) -> None:
        self._model, self._blocks, self._engines, self._shared = model, blocks, engines, shared
        self._graphs, self._states = zip(*(nnx.split(layer) for layer in layers), strict=True)
        variant, how, dequantizes = model.variant, model.execution, holds_quantized(self._states)
        self._takes_key_values = variant.shares_kv(blocks.first)
        self._leaves_key_values = variant.kv_shared_layers > 0 and not self._takes_key_values
        # Whether a block is recomputed as one, from its first layer's input.
        self._chains = chains_layers(how.optimizations, variant, how.remat, dequantizes=dequantizes)
        self._rerun = partial(rematerialized, remat=how.remat, offload=how.offload, dequantizes=dequantizes)

    def run(self, hidden: jax.Array, per_layer: jax.Array | None) -> tuple[jax.Array, KeyValues | None]:
        """The output of the last layer, (B, L, E), and the keys and values that later layers share.

        `per_layer` (layers, B, L, P): what each of the layers gets beside the residual.
        """
        if per_layer is not None:
            per_layer = per_layer.reshape(self._blocks.repeats, self._blocks.period, *per_layer.shape[1:])
        left = (self._shared or self._no_key_values(hidden)) if self._leaves_key_values else None
        run_block = self._rerun(self._run_block) if self._chains else self._run_block
        (hidden, left), _ = jax.lax.scan(run_block, (hidden, left), (self._states, per_layer))  # (B, L, E)
        return hidden, left if self._leaves_key_values else self._shared

    def _run_block(
        self, carry: tuple[jax.Array, KeyValues | None], of_repeat: tuple[Any, Any]
    ) -> tuple[tuple[jax.Array, KeyValues | None], None]:
        """One block. `of_repeat`: its layers' weights, and what they get beside the residual, (period, B, L, P)."""
        (hidden, left), (states, per_layer) = carry, of_repeat
        for place in range(self._blocks.period):
            run: Callable[..., Any] = partial(self._run_layer, place)
            run = run if self._chains else self._rerun(run, in_turn=self._model.execution.optimizations.in_turn)
            is_global = self._model.variant.is_global(self._blocks.first + place)
            taken = self._shared[is_global] if self._takes_key_values and self._shared else None
            hidden, key_value = run(states[place], hidden, taken, None if per_layer is None else per_layer[place])
            left = {**left, is_global: key_value} if left is not None else None
        return (hidden, left), None

    def _run_layer(
        self, place: int, state: Any, hidden: jax.Array, taken: KeyValue | None, per_layer_input: jax.Array | None
    ) -> tuple[jax.Array, KeyValue]:
        """One layer, with its weights gathered over the devices and dequantized."""
        mesh, variant, number = self._model.execution.mesh, self._model.variant, self._blocks.first + place
        specs = gathered_specs(variant, number, mesh=mesh) if mesh else {}
        layer = nnx.merge(self._graphs[place], dequantize_state(gathered(state, specs, mesh)))
        engine = self._engines[variant.is_global(number)]
        hidden, key_value = layer(hidden, engine=engine, shared=taken, per_layer_input=per_layer_input, mesh=mesh)
        return self._model.split_rows(hidden), key_value

    def _no_key_values(self, hidden: jax.Array) -> KeyValues:
        """Zeros of the shapes that the layers' keys and values have: what the scan begins with."""
        variant = self._model.variant

        def zeros(engine: AttentionEngine, kv_heads: int, head_dim: int) -> KeyValue:
            projected = jax.ShapeDtypeStruct((*hidden.shape[:2], kv_heads * head_dim), hidden.dtype)  # (B, L, K·D)
            heads = jax.eval_shape(lambda x: engine.heads(x, head_dim, eps=variant.rms_eps), projected)
            zero = jnp.zeros(heads.shape, heads.dtype)  # (B, L, K, D), or (B, K, L, D) for splash
            return zero, zero

        return {
            True: zeros(self._engines[True], variant.global_kv_heads, variant.global_head_dim),
            False: zeros(self._engines[False], variant.kv_heads, variant.head_dim),
        }


def _embedding(count: int, width: int, *, dtype: jnp.dtype) -> nnx.Embed:
    zeros = nnx.initializers.zeros
    return nnx.Embed(count, width, dtype=dtype, param_dtype=dtype, embedding_init=zeros, rngs=nnx.Rngs(0))
