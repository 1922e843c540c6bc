"""Every weight of a Gemma 4, of text and of images: its name in the checkpoint, shape and role.

Parameter counts, memory, LoRA targets, loading, export and verification all derive from these lists.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gemsmith.arch.config import Variant
from gemsmith.arch.vision_config import PatchProjection, VisionTower

PREFIX = "model.language_model."
LORA_KINDS = ("q", "k", "v", "o", "gate", "up", "down")
_MODULES = {kind: f"{'self_attn' if kind in 'qkvo' else 'mlp'}.{kind}_proj" for kind in LORA_KINDS}
_NORMS = tuple(f"{place}_layernorm" for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"))


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
    if variant.per_layer_input:
        width = variant.layers * variant.per_layer_input
        rows = [
            ("embed_tokens_per_layer", (variant.vocabulary, width), "per_layer_embed"),
            ("per_layer_model_projection", (width, variant.embed_dim), "per_layer_projection"),
            ("per_layer_projection_norm", (variant.per_layer_input,), "norm"),
        ]
        tensors += [Tensor(name=f"{PREFIX}{name}.weight", shape=shape, role=role) for name, shape, role in rows]
    for layer in range(variant.layers):
        tensors += _layer_tensors(variant, layer)
    tensors.append(Tensor(name=f"{PREFIX}norm.weight", shape=(variant.embed_dim,), role="norm"))
    return [tensor for tensor in tensors if optional or not tensor.optional]


def parameter_count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _layer_tensors(variant: Variant, layer: int) -> list[Tensor]:
    hidden, head_dim, ffn = variant.embed_dim, variant.head_dim_of(layer), variant.ffn_of(layer)
    query, shares = variant.heads * head_dim, variant.shares_kv(layer)
    rows = [
        *((name, (hidden,), "norm", False) for name in _NORMS),
        ("self_attn.q_norm", (head_dim,), "norm", False),
        ("self_attn.k_norm", (head_dim,), "norm", shares),
        (_MODULES["q"], (query, hidden), "q", False),
        (_MODULES["k"], (variant.kv_heads_of(layer) * head_dim, hidden), "k", shares),
        (_MODULES["o"], (hidden, query), "o", False),
        (_MODULES["gate"], (ffn, hidden), "gate", False),
        (_MODULES["up"], (ffn, hidden), "up", False),
        (_MODULES["down"], (hidden, ffn), "down", False),
    ]
    if variant.has_v(layer) or (shares and not (variant.attention_k_eq_v and variant.is_global(layer))):
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
    projector = Tensor(
        name="model.embed_vision.embedding_projection.weight",
        shape=(variant.embed_dim, vision.embed_dim),
        role="vision",
    )
    return [*tensors, projector]


def _tower_tensors(tower: VisionTower) -> list[Tensor]:
    stem, width = "model.vision_tower.", tower.embed_dim
    tensors = [
        Tensor(name=f"{stem}patch_embedder.input_proj.weight", shape=(width, tower.patch_dim), role="vision_patch"),
        Tensor(
            name=f"{stem}patch_embedder.position_embedding_table",
            shape=(2, tower.positions, width),
            role="vision_position",
        ),
    ]
    for layer in range(tower.layers):
        tensors += _tower_layer_tensors(tower, layer)
    if tower.standardizes:
        tensors += [Tensor(name=stem + name, shape=(width,), role="vision_std") for name in ("std_bias", "std_scale")]
    return tensors


def _tower_layer_tensors(tower: VisionTower, layer: int) -> list[Tensor]:
    stem, width, heads = f"{TOWER_LAYERS}{layer}.", tower.embed_dim, tower.heads * tower.head_dim
    shapes = dict.fromkeys("qkv", (heads, width)) | {"o": (width, heads)}
    shapes |= {"gate": (tower.ffn, width), "up": (tower.ffn, width), "down": (width, tower.ffn)}
    norms = dict.fromkeys(_NORMS, width) | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), tower.head_dim)
    rows: list[tuple[str, tuple[int, ...], str]] = [(f"{name}.weight", (size,), "norm") for name, size in norms.items()]
    for kind, shape in shapes.items():
        rows.append((f"{_MODULES[kind]}.linear.weight", shape, "vision"))
        rows += [(f"{_MODULES[kind]}.{bound}", (), "vision_bound") for bound in CLIP_BOUNDS if tower.clips]
    return [Tensor(name=stem + name, shape=shape, role=role, layer=layer) for name, shape, role in rows]


def _projection_tensors(vision: PatchProjection) -> list[Tensor]:
    width = vision.embed_dim
    rows: list[tuple[str, tuple[int, ...], str]] = [
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
    return [Tensor(name=f"model.vision_embedder.{name}", shape=shape, role=role) for name, shape, role in rows]
