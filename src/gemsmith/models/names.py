"""Where each tensor of a checkpoint is in the nnx model: HF's names, but for the last word and the layer's number.

Layers that repeat are held as one stack, along a first axis: in the 31B, layers 3, 9, 15, … are `layers.3`.

    model.language_model.layers.15.self_attn.q_proj.weight  <->  ("layers", 3, "self_attn", "q_proj", "kernel")[2]

The layers of a vision tower are one stack, without a number.

    model.vision_tower.encoder.layers.7.mlp.up_proj.linear.weight
        <->  ("vision_tower", "encoder", "layers", "mlp", "up_proj", "linear", "kernel")[7]

A matrix of a checkpoint is [out, in]; a kernel here is (in, out).
"""

from collections.abc import Sequence

from gemsmith.zoo import Tensor, Variant, VisionTower
from gemsmith.zoo.tensors import PREFIX
from gemsmith.zoo.vision_tensors import TOWER_LAYERS

Path = tuple[str | int, ...]

_EMBEDDINGS = ("embed", "per_layer_embed")
_LEAVES = ("kernel", "embedding")
_ROOT = "model."
_TOWER_LAYERS = tuple(TOWER_LAYERS.removeprefix(_ROOT).strip(".").split("."))


def path_of(variant: Variant, tensor: Tensor) -> Path:
    """The tensor's path in the nnx model; those of the layers of one stack have the same."""
    words: list[str | int] = list(tensor.name.removeprefix(PREFIX).removeprefix(_ROOT).split("."))
    if words[-1] == "weight" and len(tensor.shape) == 2:
        words[-1] = "embedding" if tensor.role in _EMBEDDINGS else "kernel"
    if is_visual(words):
        words = [word for word in words if word != str(tensor.layer)]
    elif tensor.layer is not None:
        words[1] = next(number for number, layers in enumerate(variant.stacks) if tensor.layer in layers)
    return tuple(words)


def hf_names_of(variant: Variant, path: Sequence[str | int]) -> list[str]:
    """The checkpoint's names of what is at that path, one for each layer of a stack: the inverse of `path_of`."""
    *words, leaf = path
    stem = ".".join(map(str, [*words, "weight" if leaf in _LEAVES else leaf]))
    if is_visual(path):
        if tuple(path[: len(_TOWER_LAYERS)]) != _TOWER_LAYERS:
            return [_ROOT + stem]
        assert isinstance(variant.vision, VisionTower), f"{variant.name} has no tower"
        rest = (_ROOT + stem).removeprefix(TOWER_LAYERS)
        return [f"{TOWER_LAYERS}{layer}.{rest}" for layer in range(variant.vision.layers)]
    if words[:1] != ["layers"]:
        return [PREFIX + stem]
    _, _, rest = stem.split(".", 2)
    return [f"{PREFIX}layers.{layer}.{rest}" for layer in variant.stacks[int(words[1])]]


def is_visual(path: Sequence[str | int]) -> bool:
    """Whether what is at that path belongs to the tower, to the 12B's embedding of patches, or to the projector."""
    return path[0] in ("vision_tower", "vision_embedder", "embed_vision")


def is_transposed(tensor: Tensor) -> bool:
    """Whether the model holds the tensor with its last two axes swapped, (in, out): all matrices but the embeddings."""
    return len(tensor.shape) >= 2 and tensor.role not in (*_EMBEDDINGS, "vision_position")


def kernel_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that the tensor has in the nnx model, or that its part of a stack has."""
    if not is_transposed(tensor):
        return tensor.shape
    return (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])  # (…, in, out)
