"""Every weight of a Gemma 4 text model: its name in the checkpoint, shape and role.

Parameter counts, memory, LoRA targets (targets.py), loading, export and verification all derive from this one list.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gemsmith.zoo.variant import Variant

PREFIX = "model.language_model."
LORA_KINDS = ("q", "k", "v", "o", "gate", "up", "down")
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint. Matrices are in HF's [out, in]."""

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None = None
    optional: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The HF module that holds the weight: the name without `.weight`."""
        return self.name.removesuffix(".weight")


def text_tensors(variant: Variant, *, optional: bool = False) -> list[Tensor]:
    """Every tensor of the text model, in the checkpoint's order.

    With `optional`, also those that some published files carry and no model uses: k, v and k_norm of layers that share
    another's.
    """
    tensors = [Tensor(name=f"{PREFIX}embed_tokens.weight", shape=(variant.vocabulary, variant.embed_dim), role="embed")]
    tensors += _per_layer_input_tensors(variant)
    for layer in range(variant.layers):
        tensors += _layer_tensors(variant, layer)
    tensors.append(Tensor(name=f"{PREFIX}norm.weight", shape=(variant.embed_dim,), role="norm"))
    return [tensor for tensor in tensors if optional or not tensor.optional]


def parameter_count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _per_layer_input_tensors(variant: Variant) -> list[Tensor]:
    if not variant.per_layer_input:
        return []
    width = variant.layers * variant.per_layer_input
    return [
        Tensor(
            name=f"{PREFIX}embed_tokens_per_layer.weight", shape=(variant.vocabulary, width), role="per_layer_embed"
        ),
        Tensor(
            name=f"{PREFIX}per_layer_model_projection.weight",
            shape=(width, variant.embed_dim),
            role="per_layer_projection",
        ),
        Tensor(name=f"{PREFIX}per_layer_projection_norm.weight", shape=(variant.per_layer_input,), role="norm"),
    ]


def _layer_tensors(variant: Variant, layer: int) -> list[Tensor]:
    hidden, head_dim, ffn = variant.embed_dim, variant.head_dim_of(layer), variant.ffn_of(layer)
    query, shares = variant.heads * head_dim, variant.shares_kv(layer)
    rows = [
        ("input_layernorm", (hidden,), "norm", False),
        ("post_attention_layernorm", (hidden,), "norm", False),
        ("pre_feedforward_layernorm", (hidden,), "norm", False),
        ("post_feedforward_layernorm", (hidden,), "norm", False),
        ("self_attn.q_norm", (head_dim,), "norm", False),
        ("self_attn.k_norm", (head_dim,), "norm", shares),
        (_MODULES["q"], (query, hidden), "q", False),
        (_MODULES["k"], (variant.kv_heads_of(layer) * head_dim, hidden), "k", shares),
        (_MODULES["o"], (hidden, query), "o", False),
        (_MODULES["gate"], (ffn, hidden), "gate", False),
        (_MODULES["up"], (ffn, hidden), "up", False),
        (_MODULES["down"], (hidden, ffn), "down", False),
    ]
    if variant.has_v(layer) or (shares and not (variant.k_is_v and variant.is_global(layer))):
        rows.append((_MODULES["v"], (variant.kv_heads_of(layer) * head_dim, hidden), "v", shares))
    if variant.per_layer_input:
        rows += [
            ("per_layer_input_gate", (variant.per_layer_input, hidden), "per_layer_gate", False),
            ("per_layer_projection", (hidden, variant.per_layer_input), "per_layer_out", False),
            ("post_per_layer_input_norm", (hidden,), "norm", False),
        ]
    stem = f"{PREFIX}layers.{layer}."
    tensors = [
        Tensor(name=f"{stem}{name}.weight", shape=shape, role=role, layer=layer, optional=unused)
        for name, shape, role, unused in rows
    ]
    tensors.append(Tensor(name=f"{stem}layer_scalar", shape=(1,), role="scalar", layer=layer))
    return tensors + _expert_tensors(variant, layer, stem)


def _expert_tensors(variant: Variant, layer: int, stem: str) -> list[Tensor]:
    if not variant.experts:
        return []
    hidden, experts, ffn = variant.embed_dim, variant.experts, variant.expert_ffn
    rows: list[tuple[str, tuple[int, ...], str]] = [
        ("router.proj.weight", (experts, hidden), "router"),
        ("router.scale", (hidden,), "norm"),
        ("router.per_expert_scale", (experts,), "norm"),
        ("experts.gate_up_proj", (experts, 2 * ffn, hidden), "expert_gate_up"),
        ("experts.down_proj", (experts, hidden, ffn), "expert_down"),
        ("post_feedforward_layernorm_1.weight", (hidden,), "norm"),
        ("post_feedforward_layernorm_2.weight", (hidden,), "norm"),
        ("pre_feedforward_layernorm_2.weight", (hidden,), "norm"),
    ]
    return [Tensor(name=stem + name, shape=shape, role=role, layer=layer) for name, shape, role in rows]
