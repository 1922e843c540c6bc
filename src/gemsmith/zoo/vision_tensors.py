"""Every tensor that a Gemma 4 turns images into soft tokens with: its name in the checkpoint, shape and role."""

from gemsmith.zoo.tensors import Tensor
from gemsmith.zoo.variant import Variant
from gemsmith.zoo.vision import PatchProjection, VisionTower

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
    `vision_std` what standardises.
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
    linears = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (heads, width),
        "self_attn.v_proj": (heads, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (tower.ffn, width),
        "mlp.up_proj": (tower.ffn, width),
        "mlp.down_proj": (width, tower.ffn),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "pre_feedforward_layernorm": width,
        "post_feedforward_layernorm": width,
        "self_attn.q_norm": tower.head_dim,
        "self_attn.k_norm": tower.head_dim,
    }
    rows: list[tuple[str, tuple[int, ...], str]] = [(f"{name}.weight", (size,), "norm") for name, size in norms.items()]
    for name, shape in linears.items():
        rows.append((f"{name}.linear.weight", shape, "vision"))
        rows += [(f"{name}.{bound}", (), "vision_bound") for bound in CLIP_BOUNDS if tower.clips]
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
