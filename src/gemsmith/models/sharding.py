"""Where each tensor of a checkpoint is in the nnx model, and how it lies on a mesh of devices.

Paths are HF's names, but for the last word and the layer's number. Layers that repeat are held as one stack, along a
first axis: in the 31B, layers 3, 9, 15, … are `layers.3`. The layers of a vision tower are one stack, without a number.

    model.language_model.layers.15.self_attn.q_proj.weight  <->  ("layers", 3, "self_attn", "q_proj", "kernel")[2]
    model.vision_tower.encoder.layers.7.mlp.up_proj.linear.weight
        <->  ("vision_tower", "encoder", "layers", "mlp", "up_proj", "linear", "kernel")[7]

A matrix of a checkpoint is [out, in]; a kernel here is (in, out). The mesh has the axes replica, fsdp, sequence and tp:

    rows of a batch      over replica and fsdp
    positions of a row   over sequence
    weights              E over fsdp and sequence together; heads, hidden units and the vocabulary over tp;
                         experts over all three
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gemsmith.arch import LORA_KINDS, Tensor, Variant, text_tensors, vision_tensors
from gemsmith.arch.tensors import PREFIX

Path = tuple[str | int, ...]

TRAINED = nnx.LoRAParam
"""The variables that Tunix trains and saves where a model has any of this type: adapters, or the weights themselves."""
_EMBEDDINGS = ("embed", "per_layer_embed")


def path_of(variant: Variant, tensor: Tensor) -> Path:
    """The tensor's path in the nnx model; those of the layers of one stack have the same."""
    words: list[str | int] = list(tensor.name.removeprefix(PREFIX).removeprefix("model.").split("."))
    if words[-1] == "weight" and len(tensor.shape) == 2:
        words[-1] = "embedding" if tensor.role in _EMBEDDINGS else "kernel"
    if is_visual(words):
        words = [word for word in words if word != str(tensor.layer)]
    elif tensor.layer is not None:
        words[1] = next(number for number, layers in enumerate(variant.stacks) if tensor.layer in layers)
    return tuple(words)


def by_path(variant: Variant, tensors: Iterable[Tensor] | None = None) -> dict[Any, list[Tensor]]:
    """The tensors, by default all, at each path of the model: one, or those of a stack's layers in order."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in (*text_tensors(variant), *vision_tensors(variant)) if tensors is None else tensors:
        found.setdefault(path_of(variant, tensor), []).append(tensor)
    return found


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


AXES = ("replica", "fsdp", "sequence", "tp")
BATCH = ("replica", "fsdp")
WEIGHTS = ("fsdp", "sequence")

Axes = str | tuple[str, ...] | None


def axis_size(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Over how many devices the axes split an array; an axis that the mesh lacks does not."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def platform_of(mesh: Mesh | None) -> str:
    """What the mesh's devices are, such as "tpu", also where they are absent; without a mesh, what JAX runs on."""
    return jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)


def partition(variant: Variant, tensor: Tensor, *, mesh: Mesh) -> PartitionSpec:
    """How the mesh splits a tensor as the model holds it, matrices as (in, out), without the axis of the stack.

    An axis that does not divide its dimension leaves it whole: K and V, where tp does not divide the kv heads (each
    device then holds all of them), are the case in practice.
    """
    axes: tuple[Axes, ...] = _SPLITS.get(tensor.role, ())
    shape = kernel_shape(tensor)
    heads = {"q": variant.heads, "o": variant.heads}
    if tensor.layer is not None:
        heads |= dict.fromkeys(("k", "v"), variant.kv_heads_of(tensor.layer))

    def divides(axis: Axes, size: int) -> bool:
        count = heads.get(tensor.role, size) if axis == "tp" else size
        return count % axis_size(mesh, axis) == 0

    return PartitionSpec(*(axis if divides(axis, size) else None for axis, size in zip(axes, shape, strict=False)))


def constrain(x: jax.Array, mesh: Mesh | None, *axes: Axes) -> jax.Array:
    """The array, laid out so inside a compiled function; without a mesh, as it is."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


LayerSpecs = dict[tuple[Any, ...], tuple[PartitionSpec, PartitionSpec | None]]
"""Of each of a layer's matrices, how it lies while it is used, and, but of adapters, how it lies before."""


def gathered(state: nnx.State, specs: LayerSpecs, mesh: Mesh | None) -> nnx.State:
    """A layer's arrays, whole over fsdp and sequence; else XLA may move activations, which are larger.

    The gradients of trained ones lie as these did before: whole, those of all layers would fill every device.
    """
    if mesh is None:
        return state

    def lay_out(part: jax.Array, spec: PartitionSpec) -> jax.Array:
        return constrain(part, mesh, *fitting(spec, part.shape, mesh))

    def lay_out_to_train(part: jax.Array, used: PartitionSpec, before: PartitionSpec) -> jax.Array:
        move = jax.custom_vjp(partial(lay_out, spec=used))
        move.defvjp(lambda part: (lay_out(part, used), None), lambda _, gradient: (lay_out(gradient, before),))
        return move(part)

    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        used, before = specs.get(path, (None, None))
        if used is None:
            leaves.append((path, leaf))
        elif before is not None and isinstance(leaf, TRAINED):
            leaves.append((path, leaf.replace(lay_out_to_train(leaf.get_value(), used, before))))
        else:
            leaves.append((path, leaf.replace(jax.tree.map(partial(lay_out, spec=used), leaf.get_value()))))
    return nnx.from_flat_state(leaves)


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec without the axes that do not divide the shape, as blocks of a quantized matrix may be too few."""
    axes = zip((*spec, *[None] * (len(shape) - len(spec))), shape, strict=True)
    return PartitionSpec(*(axis if size % axis_size(mesh, axis) == 0 else None for axis, size in axes))


def gathered_specs(variant: Variant, layer: int, *, mesh: Mesh) -> LayerSpecs:
    """How a layer's matrices and their adapters lie on the mesh while they are used: split over tp alone."""
    specs: LayerSpecs = {}
    for tensor in text_tensors(variant):
        if tensor.layer != layer or len(tensor.shape) < 2:
            continue
        path = path_of(variant, tensor)[2:]
        axes = partition(variant, tensor, mesh=mesh)
        spec = PartitionSpec(*("tp" if axis and "tp" in axis else None for axis in axes))
        specs[path] = spec, axes
        if tensor.role in LORA_KINDS:
            specs[(*path[:-1], "kernel_lora_a")] = PartitionSpec(spec[0], None), None  # (in, R)
            specs[(*path[:-1], "kernel_lora_b")] = PartitionSpec(None, spec[1]), None  # (R, out)
    return specs


_IN, _OUT = (WEIGHTS, "tp"), ("tp", WEIGHTS)
_SPLITS: dict[str, tuple[Axes, ...]] = {
    "embed": _OUT,
    "per_layer_embed": _OUT,
    "per_layer_projection": (WEIGHTS, None),
    "per_layer_gate": (WEIGHTS, None),
    "per_layer_out": (None, WEIGHTS),
    **dict.fromkeys(("q", "k", "v", "gate", "up"), _IN),
    **dict.fromkeys(("o", "down"), _OUT),
    "router": (WEIGHTS, None),
    # Not over tp: the tower's work is split by images.
    **dict.fromkeys(("vision", "vision_patch"), (WEIGHTS, None)),
    # By expert: so gathered, they lie as the grouped matmul reads them.
    **dict.fromkeys(("expert_gate_up", "expert_down"), (("tp", *WEIGHTS), None, None)),
}
