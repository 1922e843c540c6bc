"""One optimizer step as a pure, compiled function, without callbacks: training runs it, and a plan compiles it for absent chips."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.models import Gemma4, token_nll
from gemsmith.models.sharding import BATCH
from gemsmith.recipe import Lora
from gemsmith.train.dropout import mask_keys
from gemsmith.train.lora import Targets, name_number, targets_of
from gemsmith.train.upstream import set_dropout


@dataclass(frozen=True, kw_only=True)
class Step:
    """`update(trained, moments, frozen, inputs) -> (trained, moments, metrics)`, and the state to begin with.

    `trained` and `moments` are donated. `inputs`: see input_shapes. `metrics`: `loss` and `grad_norm` (before clipping), float32 scalars.
    """

    update: Any
    trained: nnx.State
    moments: nnx.State
    frozen: nnx.State


def make_step(model: Gemma4, optimizer: nnx.Optimizer, *, lora: Lora, seed: int) -> Step:
    """The compiled step of an adapted model; both may be of ShapeDtypeStructs, and then it can only be lowered.

    loss = sum of nll over the step's supervised tokens / their count, so any split of the rows over devices means the same.
    """
    model_def, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)  # type: ignore[misc]
    optimizer_def, moments = nnx.split(optimizer)
    mesh, targets = model.execution.mesh, targets_of(model.variant, lora)
    assert mesh is not None, "the step runs on a mesh, be it of one device"

    def loss_of(trained: nnx.State, frozen: nnx.State, inputs: dict[str, jax.Array]) -> jax.Array:
        model = nnx.merge(model_def, _in_base_dtype(trained, frozen), frozen)
        if lora.dropout:
            set_dropout(model, _dropout_keys(targets, seed, inputs["step"]))
        hidden = model.hidden(inputs["tokens"], inputs["positions"], inputs["segments"])
        nll, count = token_nll(model, hidden, inputs["tokens"], inputs["loss_mask"])
        return nll / count

    def update(trained: nnx.State, moments: nnx.State, frozen: nnx.State, inputs: dict[str, jax.Array]) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(trained, frozen, inputs)
        model, optimizer = nnx.merge(model_def, trained, frozen), nnx.merge(optimizer_def, moments)
        optimizer.update(model, grads, learning_rate=inputs["learning_rate"])
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(nnx.as_pure(grads))}
        return nnx.state(model, nnx.LoRAParam), nnx.state(optimizer), metrics

    shardings = (_shardings(trained), _shardings(moments), NamedSharding(mesh, PartitionSpec()))
    return Step(update=jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings), trained=trained, moments=moments, frozen=frozen)


def place_moments(moments: nnx.State, model: Gemma4) -> nnx.State:
    """The optimizer's state, each moment sharded as its adapter matrix is, counters on every device."""
    shardings = {path: leaf.get_value().sharding for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    mesh = model.execution.mesh
    assert mesh is not None, "moments lie on the model's mesh"
    leaves = []
    for path, leaf in nnx.to_flat_state(moments):
        owner = next((path[start:] for start in range(len(path)) if path[start:] in shardings), None)
        sharding = shardings[owner] if owner else NamedSharding(mesh, PartitionSpec())
        leaves.append((path, leaf.replace(_put(leaf.get_value(), sharding))))
    return nnx.from_flat_state(leaves)


def input_shapes(mesh: Mesh, *, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a step takes: four arrays (rows, length), by rows over replica and fsdp and by positions over sequence; the learning rate;
    and the step's number, from 1.
    """
    by_rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(BATCH, "sequence"), PartitionSpec()))
    kinds = {"tokens": jnp.int32, "segments": jnp.int32, "positions": jnp.int32, "loss_mask": jnp.bool_}
    arrays = {name: jax.ShapeDtypeStruct((rows, length), kind, sharding=by_rows) for name, kind in kinds.items()}
    return arrays | {
        "learning_rate": jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
    }


def _in_base_dtype(trained: nnx.State, frozen: nnx.State) -> nnx.State:
    """Adapters as the forward pass uses them: in the base's dtype, as under torch's autocast; their gradients are float32."""
    kernels = dict(nnx.to_flat_state(frozen))
    leaves = []
    for path, leaf in nnx.to_flat_state(trained):
        dtype = kernels[(*path[:-1], "kernel")].get_value().dtype
        leaves.append((path, leaf.replace(leaf.get_value().astype(dtype))))
    return nnx.from_flat_state(leaves)


def _dropout_keys(targets: Targets, seed: int, step: jax.Array) -> dict[Any, jax.Array]:
    """A key for each adapted tensor, (layers,) for a stack: of the seed, the step and its name, so resuming needs no random state."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    numbers = jnp.array([name_number(tensor) for tensors in targets.values() for tensor in tensors], jnp.uint32)
    ends = np.cumsum([len(tensors) for tensors in targets.values()])
    keys = jax.lax.optimization_barrier(mask_keys(key, numbers))
    return dict(zip(targets, jnp.split(keys, ends[:-1]), strict=True))


def _shardings(state: nnx.State) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def _put(value: Any, sharding: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    return jax.device_put(value, sharding)
