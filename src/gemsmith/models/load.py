"""A checkpoint's weights into the model, one tensor at a time, each straight to the devices that hold it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gemsmith.checkpoint import Checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.models.gemma4 import Gemma4
from gemsmith.models.names import hf_name_of, is_transposed, kernel_shape, path_of
from gemsmith.zoo import Tensor, Variant, text_tensors


def load_model(checkpoint: Checkpoint, *, dtype: str, remat: str = "none", mesh: Mesh | None = None) -> Gemma4:
    """The model with the checkpoint's weights in `dtype`, on one device or on a mesh with axes `fsdp` and `tp`.

    The mesh's axes must be Auto, as those of `jax.sharding.Mesh` are (`jax.make_mesh` makes Explicit ones). The host holds one tensor
    at a time: each is mapped from its file, and each device's part copied, turned and cast.
    Raises CheckpointError where a tensor is missing, or the model has no place for it.
    """
    variant = checkpoint.variant
    abstract = nnx.eval_shape(lambda: Gemma4(variant, dtype=jnp.dtype(dtype), remat=remat, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    empty: dict[Any, Any] = dict(iter(nnx.to_flat_state(state)))
    filled: dict[Any, Any] = {}
    for tensor in text_tensors(variant):
        path = path_of(tensor)
        if path not in empty:
            raise CheckpointError(f"checkpoint {checkpoint.folder}: the model of {variant.name} has no place for {tensor.name}")
        variable, weight = empty.pop(path), checkpoint.read(tensor.name)
        if weight.shape != tensor.shape:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder}: {tensor.name} is {list(weight.shape)}, {variant.name} needs {list(tensor.shape)}"
            )
        assert variable.shape == kernel_shape(tensor), tensor.name
        filled[path] = variable.replace(_place(weight, tensor, variant, dtype=jnp.dtype(dtype), mesh=mesh))
    if empty:
        raise CheckpointError(f"checkpoint {checkpoint.folder}: lacks {hf_name_of(next(iter(empty)))}, which {variant.name} needs")
    return nnx.merge(graph, nnx.from_flat_state(filled))


def partition(variant: Variant, tensor: Tensor, *, mesh: Mesh) -> PartitionSpec:
    """How the mesh's axes `fsdp` and `tp` split a tensor as the model holds it, matrices as (in, out).

    tp splits heads, hidden units, experts or words: what goes into q, k, v, gate and up stays whole, as does what comes out of o and down.
    fsdp splits the model's width E. An axis that does not divide its dimension leaves it whole: K and V, where tp does not divide
    the kv heads (each device then holds all of them), are the case in practice.
    """
    axes: tuple[str | None, ...] = _AXES.get(tensor.role, ())
    shape = kernel_shape(tensor)
    heads = {"q": variant.heads, "o": variant.heads}
    if tensor.layer is not None:
        heads |= dict.fromkeys(("k", "v"), variant.kv_heads_of(tensor.layer))

    def divides(axis: str | None, size: int) -> bool:
        count = heads.get(tensor.role, size) if axis == "tp" else size
        return axis in mesh.shape and count % mesh.shape[axis] == 0

    return PartitionSpec(*(axis if divides(axis, size) else None for axis, size in zip(axes, shape, strict=False)))


_IN, _OUT = ("fsdp", "tp"), ("tp", "fsdp")
_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": _OUT,
    "per_layer_embed": _OUT,
    "per_layer_projection": ("fsdp", None),
    "per_layer_gate": ("fsdp", None),
    "per_layer_out": (None, "fsdp"),
    **dict.fromkeys(("q", "k", "v", "gate", "up"), _IN),
    **dict.fromkeys(("o", "down"), _OUT),
    "router": ("fsdp", None),
    "expert_gate_up": ("tp", "fsdp", None),
    "expert_down": ("tp", None, "fsdp"),
}


def _place(weight: np.ndarray, tensor: Tensor, variant: Variant, *, dtype: jnp.dtype, mesh: Mesh | None) -> jax.Array:
    """The weight on its devices. Each part is copied from the file, so that the array outlives it."""
    view = np.swapaxes(weight, -1, -2) if is_transposed(tensor) else weight
    sharding = SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, partition(variant, tensor, mesh=mesh))
    return jax.make_array_from_callback(view.shape, sharding, lambda index: np.array(view[index], dtype=dtype, order="C"))
