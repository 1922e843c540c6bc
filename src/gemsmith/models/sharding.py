"""How arrays lie on a mesh of devices: axes replica, fsdp, sequence and tp.

rows of a batch      over replica and fsdp
positions of a row   over sequence
weights              E over fsdp and sequence together; heads, hidden units and the vocabulary over tp;
                     experts over all three
"""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gemsmith.models.names import kernel_shape, path_of
from gemsmith.zoo import LORA_KINDS, Tensor, Variant, text_tensors

AXES = ("replica", "fsdp", "sequence", "tp")
BATCH = ("replica", "fsdp")
WEIGHTS = ("fsdp", "sequence")
EVERY = (*BATCH, "sequence", "tp")

Axes = str | tuple[str, ...] | None


def axis_size(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Over how many devices the axes split an array; an axis that the mesh lacks does not."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    size = 1
    for name in names:
        size *= mesh.shape.get(name, 1)
    return size


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


def gathered(state: nnx.State, specs: dict[tuple[Any, ...], PartitionSpec], mesh: Mesh | None) -> nnx.State:
    """A layer's arrays, whole over fsdp and sequence; else XLA may move activations, which are larger."""
    if mesh is None:
        return state
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        if path not in specs:
            leaves.append((path, leaf))
            continue
        lay_out = partial(_constrain_part, mesh=mesh, spec=specs[path])
        leaves.append((path, leaf.replace(jax.tree.map(lay_out, leaf.get_value()))))
    return nnx.from_flat_state(leaves)


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec without the axes that do not divide the shape, as blocks of a quantised matrix may be too few."""
    axes = (*spec, *[None] * (len(shape) - len(spec)))
    return PartitionSpec(
        *(axis if size % axis_size(mesh, axis) == 0 else None for axis, size in zip(axes, shape, strict=True))
    )


def _constrain_part(part: jax.Array, *, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return constrain(part, mesh, *fitting(spec, part.shape, mesh))


def gathered_specs(variant: Variant, layer: int, *, mesh: Mesh) -> dict[tuple[Any, ...], PartitionSpec]:
    """How a layer's matrices and their adapters lie on the mesh while they are used: split over tp alone."""
    specs: dict[tuple[Any, ...], PartitionSpec] = {}
    for tensor in text_tensors(variant):
        if tensor.layer != layer or len(tensor.shape) < 2:
            continue
        path = path_of(variant, tensor)[2:]
        spec = PartitionSpec(
            *("tp" if axis and "tp" in axis else None for axis in partition(variant, tensor, mesh=mesh))
        )
        specs[path] = spec
        if tensor.role in LORA_KINDS:
            specs[(*path[:-1], "kernel_lora_a")] = PartitionSpec(spec[0], None)  # (in, R)
            specs[(*path[:-1], "kernel_lora_b")] = PartitionSpec(None, spec[1])  # (R, out)
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
