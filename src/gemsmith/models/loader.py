"""A checkpoint's weights into the model, one tensor at a time, each straight to the devices that hold it."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gemsmith.arch import Tensor, Variant, trained_tensors
from gemsmith.arch.lora_targets import is_quantized
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.errors import CheckpointError
from gemsmith.models.gemma4 import Execution, Gemma4
from gemsmith.models.quantization import Kind, Quantized, quantize
from gemsmith.models.sharding import TRAINED, axis_size, by_path, fitting, is_transposed, kernel_shape, partition


def abstract_model(
    variant: Variant,
    *,
    dtype: jax.typing.DTypeLike,
    quantized: Kind | None = None,
    execution: Execution | None = None,
    vision: bool = False,
    trains: bool = False,
) -> Gemma4:
    """The model with ShapeDtypeStructs for weights, laid out on the mesh; `vision`: with what embeds images.

    `trains`: the weights of trained_tensors are float32 and TRAINED, whatever dtype they are computed with.
    """
    execution = execution or Execution()
    graph, state = nnx.split(nnx.eval_shape(lambda: Gemma4(variant, dtype=dtype, execution=execution, vision=vision)))
    tensors = by_path(variant)
    trained = {tensor.name for tensor in trained_tensors(variant)} if trains else ()
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
        shape, tensor = leaf.get_value(), tensors[path][0]
        if quantized and is_quantized(tensor):
            shape = jax.eval_shape(partial(quantize, kind=quantized), shape)
        if is_trained := tensor.name in trained:
            shape = jax.ShapeDtypeStruct(shape.shape, jnp.float32)
        laid_out = jax.tree.map(partial(_laid_out, variant, tensor, execution.mesh), shape)
        leaves.append((path, TRAINED(laid_out) if is_trained else leaf.replace(laid_out)))
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def load_model(checkpoint: Checkpoint, model: Gemma4) -> Gemma4:
    """The model of abstract_model with the checkpoint's weights, on a device or the execution's mesh.

    The mesh's axes must be Auto, as those of `jax.sharding.Mesh` are (`jax.make_mesh` makes Explicit ones). The host
    holds one tensor at a time: each is mapped from its file, and each device's part copied, turned and cast; and
    quantized on the device, one by one. Raises CheckpointError for a tensor that is missing.
    """
    graph, state = nnx.split(model)
    tensors = by_path(checkpoint.variant)
    leaves = nnx.to_flat_state(state)
    filled = [(path, leaf.replace(_read(checkpoint, tensors[path], leaf.get_value()))) for path, leaf in leaves]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _laid_out(variant: Variant, tensor: Tensor, mesh: Mesh | None, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The array's shape with its place; it is the tensor, its quantized values or its scales, or a stack of those."""
    if mesh is None:
        return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=SingleDeviceSharding(jax.devices()[0]))
    spec = partition(variant, tensor, mesh=mesh)
    spec = _storable(spec if tensor.layer is None else PartitionSpec(None, *spec), part.shape, mesh)
    return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=NamedSharding(mesh, spec))


def _storable(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec; where scales are too few for the devices of an axis, one that splits outputs over those, too."""
    fitted = fitting(spec, shape, mesh)
    left_out = [axis for axis, kept in zip(spec, fitted, strict=False) if axis and not kept]
    axes: list[str] = []
    for entry in (fitted[-1], *left_out) if left_out else ():
        axes += (entry,) if isinstance(entry, str) else entry or ()
    splits = axes and shape[-1] % axis_size(mesh, tuple(axes)) == 0
    return PartitionSpec(*fitted[:-1], tuple(axes)) if splits else fitted


def _read(checkpoint: Checkpoint, tensors: list[Tensor], like: Any) -> Any:
    """What the model holds in the place of these tensors: the one, or all of them along a first axis."""
    if tensors[0].layer is None:
        return _place(checkpoint, tensors[0], like.dtype, like.sharding)
    assert like.shape == (len(tensors), *kernel_shape(tensors[0])), tensors[0].name
    whole = jax.tree.map(lambda part: part.sharding, like)

    def of_one(lies: Sharding) -> Sharding:
        return lies.update(spec=PartitionSpec(*lies.spec[1:])) if isinstance(lies, NamedSharding) else lies

    one: Any = jax.tree.map(of_one, whole)
    as_read, encode = one, None
    if isinstance(like, Quantized):
        as_read, encode = one.qvalue, _quantizer(like.kind, one)
    stack = _zeros(like, whole)()
    for number, tensor in enumerate(tensors):
        weight = _place(checkpoint, tensor, like.dtype, as_read)  # (in, out), or (E,) of a norm
        stack = _fill(stack, encode(weight) if encode else weight, number)  # (layers, in, out)
    return stack


@cache
def _zeros(like: Any, shardings: Any) -> Callable[[], Any]:
    return jax.jit(lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), like), out_shardings=shardings)


@cache
def _quantizer(kind: Kind, shardings: Quantized) -> Callable[[jax.Array], Quantized]:
    return jax.jit(partial(quantize, kind=kind), out_shardings=shardings)


@partial(jax.jit, donate_argnums=0)
def _fill(stack: Any, layer: Any, number: int) -> Any:
    return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, number, 0), stack, layer)


def _place(checkpoint: Checkpoint, tensor: Tensor, dtype: Any, sharding: Sharding) -> jax.Array:
    """The weight on its devices. Each part is copied from the file, so that the array outlives it."""
    weight = checkpoint.read(tensor.name)
    if weight.shape != tensor.shape:
        needs = f"{checkpoint.variant.name} needs {list(tensor.shape)}"
        raise CheckpointError(f"checkpoint {checkpoint.folder}: {tensor.name} is {list(weight.shape)}, {needs}")
    view = np.swapaxes(weight, -1, -2) if is_transposed(tensor) else weight  # (in, out) of [out, in]
    return jax.make_array_from_callback(view.shape, sharding, lambda at: np.array(view[at], dtype=dtype, order="C"))
