"""Every weight of a Gemma 4, of text and of images: its name in the checkpoint, shape and role.

Parameter counts, memory, LoRA targets, loading, export and verification all derive from these lists.
"""

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cache

from gemsmith.arch.config import PatchProjection, Variant, VisionTower

PREFIX = "model.language_model."
LORA_KINDS = ("q", "k", "v", "o", "gate", "up", "down")
EXPERTS = ("expert_gate_up", "expert_down")
"""Roles of the experts' matrices, each of which holds those of all experts of a layer."""
_MODULES = {kind: f"{'self_attn' if kind in 'qkvo' else 'mlp'}.{kind}_proj" for kind in LORA_KINDS}
_NORMS = tuple(f"{place}_layernorm" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"))
_Row = tuple[str, tuple[int, ...], str]  # a tensor's name behind a stem, its shape and role


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


@cache
def text_tensors(variant: Variant, *, optional: bool = False) -> tuple[Tensor, ...]:
    """Every tensor of the text model, in the checkpoint's order.

    `optional`: also those that some files carry and no model uses: k, v and k_norm of layers that share another's.
    """
    hidden, width = variant.embed_dim, variant.layers * variant.per_layer_input
    rows: list[_Row] = [("embed_tokens.weight", (variant.vocabulary, hidden), "embed")]
    if variant.per_layer_input:
        rows += [
            ("embed_tokens_per_layer.weight", (variant.vocabulary, width), "per_layer_embed"),
            ("per_layer_model_projection.weight", (width, hidden), "per_layer_projection"),
            ("per_layer_projection_norm.weight", (variant.per_layer_input,), "norm"),
        ]
    tensors = _tensors(PREFIX, rows)
    for layer in range(variant.layers):
        tensors += _layer_tensors(variant, layer)
    tensors += _tensors(PREFIX, [("norm.weight", (hidden,), "norm")])
    return tuple(tensor for tensor in tensors if optional or not tensor.optional)


def trained_tensors(variant: Variant) -> list[Tensor]:
    """What full fine-tuning trains: the text model, but for the layers' scalars, which are buffers in transformers."""
    return [tensor for tensor in text_tensors(variant) if tensor.role != "scalar"]


def _tensors(stem: str, rows: Iterable[_Row], layer: int | None = None, *, unused: Container[str] = ()) -> list[Tensor]:
    return [
        Tensor(name=stem + name, shape=shape, role=role, layer=layer, optional=name in unused)
        for name, shape, role in rows
    ]


def parameter_count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _layer_tensors(variant: Variant, layer: int) -> list[Tensor]:
    hidden, head_dim, ffn = variant.embed_dim, variant.head_dim_of(layer), variant.ffn_of(layer)
    query, keys, shares = variant.heads * head_dim, variant.kv_heads_of(layer) * head_dim, variant.shares_kv(layer)
    norms = dict.fromkeys(_NORMS, hidden) | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), head_dim)
    shapes = {"q": (query, hidden), "k": (keys, hidden), "o": (hidden, query)}
    shapes |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    if variant.has_v(layer) or (shares and not (variant.attention_k_eq_v and variant.is_global(layer))):
        shapes["v"] = (keys, hidden)
    rows: list[_Row] = [(f"{name}.weight", (size,), "norm") for name, size in norms.items()]
    rows += [(f"{_MODULES[kind]}.weight", shape, kind) for kind, shape in shapes.items()]
    if variant.per_layer_input:
        rows += [
            ("per_layer_input_gate.weight", (variant.per_layer_input, hidden), "per_layer_gate"),
            ("per_layer_projection.weight", (hidden, variant.per_layer_input), "per_layer_out"),
            ("post_per_layer_input_norm.weight", (hidden,), "norm"),
        ]
    rows.append(("layer_scalar", (1,), "scalar"))
    if experts := variant.experts:
        rows += [
            ("router.proj.weight", (experts, hidden), "router"),
            ("router.scale", (hidden,), "norm"),
            ("router.per_expert_scale", (experts,), "norm"),
            ("experts.gate_up_proj", (experts, 2 * variant.expert_ffn, hidden), "expert_gate_up"),
            ("experts.down_proj", (experts, hidden, variant.expert_ffn), "expert_down"),
            ("post_feedforward_layernorm_1.weight", (hidden,), "norm"),
            ("post_feedforward_layernorm_2.weight", (hidden,), "norm"),
            ("pre_feedforward_layernorm_2.weight", (hidden,), "norm"),
        ]
    unused = [f"self_attn.{name}.weight" for name in ("k_norm", "k_proj", "v_proj") if shares]
    return _tensors(f"{PREFIX}layers.{layer}.", rows, layer, unused=unused)


TOWER_LAYERS = "model.vision_tower.encoder.layers."
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_UNIFIED_CLASS_NAMES = {
    "model.vision_embedder.patch_dense": "model.embed_vision.patch_dense",
    "model.embed_vision.embedding_projection": "model.embed_vision.multimodal_embedder.embedding_projection",
}
_NAMES_IN_FILES = {ours: theirs for theirs, ours in _UNIFIED_CLASS_NAMES.items()}


def class_names(variant: Variant) -> dict[str, str]:
    """Linear layers by their name in a checkpoint's files -> their name in transformers' class, where it is another.

    Those of the 12B, whose class Gemma4UnifiedForConditionalGeneration renames what embeds patches as it loads.
    """
    return _UNIFIED_CLASS_NAMES if isinstance(variant.vision, PatchProjection) else {}


def name_in_files(module: str) -> str:
    """The name in a checkpoint's files of a module of transformers' class."""
    return _NAMES_IN_FILES.get(module, module)


def vision_tensors(variant: Variant) -> list[Tensor]:
    """Every tensor of the tower, or of the 12B's embedding of patches, and of the projector; none without vision.

    Roles: `vision` are matrices of the tower's layers and of the projector, `vision_patch` the first projection of
    patches, `vision_position` embeddings of columns and rows, `vision_bound` what linear layers are clipped to,
    `vision_std` what standardizes.
    """
    vision = variant.vision
    if vision is None:
        return []
    tensors = _tower_tensors(vision) if isinstance(vision, VisionTower) else _projection_tensors(vision)
    projector = ("embedding_projection.weight", (variant.embed_dim, vision.embed_dim), "vision")
    return [*tensors, *_tensors("model.embed_vision.", [projector])]


def _tower_tensors(tower: VisionTower) -> list[Tensor]:
    stem, width, heads = "model.vision_tower.", tower.embed_dim, tower.heads * tower.head_dim
    outside: list[_Row] = [
        ("patch_embedder.input_proj.weight", (width, tower.patch_dim), "vision_patch"),
        ("patch_embedder.position_embedding_table", (2, tower.positions, width), "vision_position"),
    ]
    shapes = dict.fromkeys("qkv", (heads, width)) | {"o": (width, heads)}
    shapes |= {"gate": (tower.ffn, width), "up": (tower.ffn, width), "down": (width, tower.ffn)}
    norms = dict.fromkeys(_NORMS, width) | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), tower.head_dim)
    inside: list[_Row] = [(f"{name}.weight", (size,), "norm") for name, size in norms.items()]
    for kind, shape in shapes.items():
        inside.append((f"{_MODULES[kind]}.linear.weight", shape, "vision"))
        inside += [(f"{_MODULES[kind]}.{bound}", (), "vision_bound") for bound in CLIP_BOUNDS if tower.clips]
    tensors = _tensors(stem, outside)
    for layer in range(tower.layers):
        tensors += _tensors(f"{TOWER_LAYERS}{layer}.", inside, layer)
    return tensors + _tensors(
        stem, [(name, (width,), "vision_std") for name in ("std_bias", "std_scale") if tower.standardizes]
    )


def _projection_tensors(vision: PatchProjection) -> list[Tensor]:
    width = vision.embed_dim
    rows: list[_Row] = [
        ("patch_ln1.weight", (vision.patch_dim,), "norm"),
        ("patch_ln1.bias", (vision.patch_dim,), "norm"),
        ("patch_dense.weight", (width, vision.patch_dim), "vision_patch"),
        ("patch_dense.bias", (width,), "norm"),
        ("patch_ln2.weight", (width,), "norm"),
        ("patch_ln2.bias", (width,), "norm"),
        ("pos_embedding", (vision.positions, 2, width), "vision_position"),
        ("pos_norm.weight", (width,), "norm"),
        ("pos_norm.bias", (width,), "norm"),
    ]
    return _tensors("model.vision_embedder.", rows)
