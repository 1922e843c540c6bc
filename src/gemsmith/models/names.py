"""Where each tensor of a checkpoint lives in the nnx model: HF's own names, but for the last word.

    model.language_model.layers.3.self_attn.q_proj.weight  <->  ("layers", 3, "self_attn", "q_proj", "kernel")

A matrix of a checkpoint is [out, in]; a kernel here is (in, out).
"""

from collections.abc import Sequence

from gemsmith.zoo.tensors import PREFIX, Tensor

Path = tuple[str | int, ...]

_EMBEDDINGS = ("embed", "per_layer_embed")
_LEAVES = ("kernel", "embedding")


def path_of(tensor: Tensor) -> Path:
    """The tensor's path in the nnx model."""
    words = tensor.name.removeprefix(PREFIX).split(".")
    if words[-1] == "weight" and len(tensor.shape) == 2:
        words[-1] = "embedding" if tensor.role in _EMBEDDINGS else "kernel"
    return tuple(int(word) if word.isdigit() else word for word in words)


def hf_name_of(path: Sequence[str | int]) -> str:
    """The checkpoint's name of the nnx parameter at that path: the inverse of `path_of`."""
    *words, leaf = map(str, path)
    return PREFIX + ".".join([*words, "weight" if leaf in _LEAVES else leaf])


def is_transposed(tensor: Tensor) -> bool:
    """Whether the model holds the tensor with its last two axes swapped, (in, out): all matrices but the embeddings."""
    return len(tensor.shape) >= 2 and tensor.role not in _EMBEDDINGS


def kernel_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape that the tensor has in the nnx model."""
    if not is_transposed(tensor):
        return tensor.shape
    return (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
