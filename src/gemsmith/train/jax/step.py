"""One optimizer step as a pure, compiled function: training runs it, a plan compiles it for absent chips.

Random bits for dropout masks are a hash of a key and each element's place. JAX's default, threefry, costs about fifty
integer operations an element, and a mask is drawn for the input of every adapted projection, again in the backward
pass. This hash is a dozen, needs no communication, and gives the same mask on any mesh. CPU-seconds of a step of
tiny-31b, 8 rows of 512: 2.24 without dropout, 2.30 with the hash, 2.58 with threefry (2 cores).

AdamW is as torch and Hugging Face's Trainer run it. The learning rate is an argument of each update, so that it is
computed once, in Python's floats, and recorded as it was used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gemsmith.models import Gemma4, Images, SoftTokens, token_nll
from gemsmith.models.sharding import BATCH, axis_size, constrain, is_visual
from gemsmith.recipe.schema import Lora, Optimizer
from gemsmith.train.inputs import name_number
from gemsmith.train.jax.images import ImageShape
from gemsmith.train.jax.lora import Targets, targets_of
from gemsmith.train.jax.upstream import set_dropout


def mask_keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """One key of the hash for each number, (N,), derived from a key of JAX's own: (N,) typed keys."""
    data = jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(key, number)))(numbers)
    return jax.random.wrap_key_data(data, impl=_HASH)


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    assert bit_width == 32, "masks are drawn from 32 bits an element"
    place = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    bits = place * jnp.uint32(0x9E3779B9) + key[0]
    # Every bit is spread over the word, in two rounds: https://github.com/skeeto/hash-prospector.
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xD35A2D97)
    return bits ^ (bits >> 15) ^ key[1]


def _never(*_: Any) -> Any:
    raise NotImplementedError("keys of the hash come from mask_keys, one for each module and step")


_HASH = jax.extend.random.define_prng_impl(
    key_shape=(2,), seed=_never, split=_never, random_bits=_random_bits, fold_in=_never, name="gemsmith_hash", tag="gh"
)

_VECTORS = ("weight", "scale", "per_expert_scale")
"""Leaves that are no matrices, beside their stack's axis: those of norms and routers."""
_Arrays = dict[str, jax.Array]
_Shapes = dict[str, jax.ShapeDtypeStruct]
_ROW_ARRAYS = {"tokens": jnp.int32, "segments": jnp.int32, "positions": jnp.int32, "loss_mask": jnp.bool_}
_IMAGE_ARRAYS = {"patches": jnp.float32, "patch_positions": jnp.int32, "places": jnp.int32}


@dataclass(frozen=True, kw_only=True)
class Step:
    """`update(trained, moments, frozen, inputs) -> (trained, moments, metrics)`, and the state to begin with.

    `trained` and `moments` are donated. `inputs`: see input_shapes. `metrics`, scalars: `loss` and `grad_norm` (before
    clipping), float32; `targets`, those of them that are `correct`, and `real_tokens`, the step's over all hosts;
    `stop`, whether any host was told to; and `skipped`: a step whose loss or gradient is NaN or infinite, or one of
    both above its `skip_above`, leaves the state as it was. With images also `images` and `soft_tokens` of all hosts.

    `evaluate(trained, frozen, rows) -> sums` has no dropout and no update: `nll`, and `correct` and `targets` as above.
    `rows`: see row_shapes. `next_tokens(trained, frozen, rows) -> ids` (B,): see next_tokens.
    """

    update: Any
    evaluate: Any
    next_tokens: Any
    trained: nnx.State
    moments: nnx.State
    frozen: nnx.State


def make_step(model: Gemma4, optimizer: nnx.Optimizer, *, lora: Lora | None, seed: int, micro_batches: int = 1) -> Step:
    """The compiled step of an adapted model, or without `lora` of one whose weights are trained.

    Of ShapeDtypeStructs it can only be lowered. loss = sum of nll over the step's supervised tokens / their count: any
    split of its rows over devices and micro-batches means the same, and the same dropout masks, by a row's place in it.
    """
    model_def, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)  # type: ignore[misc]
    optimizer_def, moments = nnx.split(optimizer)
    mesh, dtype, targets = model.execution.mesh, model.dtype, targets_of(model.variant, lora) if lora else {}
    assert mesh is not None, "the step runs on a mesh, be it of one device"

    def loss_of(trained: nnx.State, frozen: nnx.State, rows: _Arrays, count: jax.Array, keys: jax.Array) -> Any:
        model = nnx.merge(model_def, _in_dtype(trained, dtype), frozen)
        if lora and lora.dropout:
            set_dropout(model, _dropout_keys(targets, keys, images=rows["places"].shape[1] if "places" in rows else 0))
        nll, correct = _sum_nll(model, rows)
        return nll / count, correct

    def update(trained: nnx.State, moments: nnx.State, frozen: nnx.State, inputs: _Arrays) -> tuple[Any, Any, Any]:
        rows = {name: inputs[name] for name in (*_ROW_ARRAYS, *_IMAGE_ARRAYS) if name in inputs}
        count = jnp.sum(rows["loss_mask"][:, 1:], dtype=jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), inputs["step"])
        places = np.arange(len(rows["tokens"]))  # (B,)
        if micro_batches == 1:
            keys = _row_keys(key, places)
            sums, grads = jax.value_and_grad(loss_of, has_aux=True)(trained, frozen, rows, count, keys)
        else:
            split = {name: _in_micro_batches(x, mesh, micro_batches) for name, x in rows.items()}  # (count, B/count, L)
            keys = _row_keys(key, _places_in_micro_batches(places, mesh, micro_batches))  # (count, B/count)
            sums, grads = _accumulate(loss_of, trained, frozen, split, count, keys, shardings[0])
        (loss, correct), grad_norm = sums, optax.tree.norm(nnx.as_pure(grads))
        both = jnp.stack([loss, grad_norm])
        keep = jnp.all(jnp.isfinite(both) & (both <= inputs["skip_above"]))
        # Copied first: merging shares the variables, and the update writes into them.
        before = jax.tree.map(lambda leaf: leaf, (trained, moments))
        model, optimizer = nnx.merge(model_def, trained, frozen), nnx.merge(optimizer_def, moments)
        optimizer.update(model, grads, learning_rate=inputs["learning_rate"])
        after = (nnx.state(model, nnx.LoRAParam), nnx.state(optimizer))
        trained, moments = jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, before)
        metrics = {"loss": loss, "grad_norm": grad_norm, "skipped": ~keep, "stop": jnp.max(inputs["stop"])}
        return trained, moments, metrics | {"correct": correct.astype(jnp.int32)} | _count_tokens(rows, count)

    shardings = (*jax.tree.map(lambda leaf: leaf.sharding, (trained, moments)), NamedSharding(mesh, PartitionSpec()))
    step = _jit(update, dtype, donate_argnums=(0, 1), out_shardings=shardings)
    whole = partial(_jit, dtype=dtype, out_shardings=shardings[2])
    evaluate = whole(partial(_evaluate, model_def=model_def, dtype=dtype, mesh=mesh, micro_batches=micro_batches))
    predict = whole(partial(next_tokens, model_def=model_def, dtype=dtype))
    programs = {"update": step, "evaluate": evaluate, "next_tokens": predict}
    return Step(**programs, trained=trained, moments=moments, frozen=frozen)


def _jit(program: Callable[..., Any], dtype: Any, **options: Any) -> Any:
    """The program, compiled; of a float32 model its products are float32 on every chip.

    JAX else rounds what goes into them, to bfloat16 on TPUs and to TF32 on GPUs: on an H200 the logits of a tiny model
    were 0.027 off, and are within 1e-4 so.
    """

    def exact(*inputs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return program(*inputs)

    return jax.jit(exact if dtype == jnp.float32 else program, **options)


def _evaluate(
    trained: nnx.State, frozen: nnx.State, rows: _Arrays, *, model_def: Any, dtype: Any, mesh: Mesh, micro_batches: int
) -> _Arrays:
    """Sums of the loss and of correct tokens over the rows, and how many tokens these are of; no dropout."""

    def add(total: Any, some: _Arrays) -> tuple[Any, None]:
        sums = _sum_nll(nnx.merge(model_def, _in_dtype(trained, dtype), frozen), some)
        return jax.tree.map(jnp.add, total, sums), None

    split = {name: _in_micro_batches(x, mesh, micro_batches) for name, x in rows.items()}
    nll, correct = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), split)[0]
    return {"nll": nll, "correct": correct, "targets": jnp.sum(rows["loss_mask"][:, 1:], dtype=jnp.int32)}


def next_tokens(trained: nnx.State, frozen: nnx.State, rows: _Arrays, *, model_def: Any, dtype: Any) -> jax.Array:
    """Of each row the most likely token after the one that its loss mask marks, (B,)."""
    model = nnx.merge(model_def, _in_dtype(trained, dtype), frozen)
    marked = jnp.where(rows["loss_mask"][..., None], _hidden(model, rows), 0)  # (B, L, E)
    return jnp.argmax(model.logits(marked.sum(axis=1, keepdims=True))[:, 0], axis=-1)


def _places_in_micro_batches(places: np.ndarray, mesh: Mesh, count: int) -> np.ndarray:
    """(B,) -> (count, B / count): each micro-batch has its share of every device's rows."""
    return np.swapaxes(places.reshape(axis_size(mesh, BATCH), count, -1), 0, 1).reshape(count, -1)


def shard_opt_state(moments: nnx.State, model: Gemma4) -> nnx.State:
    """The optimizer's state, each moment sharded as its adapter matrix is, counters on every device."""
    shardings = {path: leaf.get_value().sharding for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    mesh = model.execution.mesh
    assert mesh is not None, "moments lie on the model's mesh"
    leaves = []
    for path, leaf in nnx.to_flat_state(moments):
        owner = next((path[start:] for start in range(len(path)) if path[start:] in shardings), None)
        sharding, value = shardings[owner] if owner else NamedSharding(mesh, PartitionSpec()), leaf.get_value()
        is_abstract = isinstance(value, jax.ShapeDtypeStruct)
        value = value.update(sharding=sharding) if is_abstract else jax.device_put(value, sharding)
        leaves.append((path, leaf.replace(value)))
    return nnx.from_flat_state(leaves)


def row_shapes(mesh: Mesh, *, rows: int, length: int, images: ImageShape | None = None) -> _Shapes:
    """The shapes and places of rows: four arrays (rows, length), by rows over replica and fsdp and by positions over
    sequence. With `images`, also the three arrays of models.Images, by rows.
    """
    by_rows = NamedSharding(mesh, PartitionSpec(BATCH, "sequence"))
    arrays = {name: jax.ShapeDtypeStruct((rows, length), kind, sharding=by_rows) for name, kind in _ROW_ARRAYS.items()}
    if images:
        slots, by_image = (rows, images.images), NamedSharding(mesh, PartitionSpec(BATCH))
        sizes = ((images.patches, images.patch_dim), (images.patches, 2), (images.soft_tokens,))
        for (name, kind), size in zip(_IMAGE_ARRAYS.items(), sizes, strict=True):
            arrays[name] = jax.ShapeDtypeStruct((*slots, *size), kind, sharding=by_image)
    return arrays


def input_shapes(mesh: Mesh, *, rows: int, length: int, images: ImageShape | None = None) -> _Shapes:
    """The shapes and places of what a step takes.

    Its rows; the learning rate; the step's number, from 1; the loss and the gradient norm above which it is skipped;
    and for each device, 1 where its process was told to stop.
    """
    everywhere, one_each = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return row_shapes(mesh, rows=rows, length=length, images=images) | {
        "learning_rate": jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        "skip_above": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=everywhere),
        "stop": jax.ShapeDtypeStruct((mesh.size,), jnp.int32, sharding=one_each),
    }


def _sum_nll(model: Gemma4, rows: _Arrays) -> tuple[jax.Array, jax.Array]:
    """The sum of the targets' nll, and how many of them have the highest logit."""
    nll, _, correct = token_nll(model, _hidden(model, rows), rows["tokens"], rows["loss_mask"])
    return nll, correct


def _hidden(model: Gemma4, rows: _Arrays) -> jax.Array:
    """What the rows' logits are made from, (B, L, E)."""
    soft_tokens: SoftTokens | None = None
    if "patches" in rows:
        images = Images(patches=rows["patches"], positions=rows["patch_positions"], places=rows["places"])
        soft_tokens = model.embed_images(images, length=rows["tokens"].shape[1])
    return model.hidden(rows["tokens"], rows["positions"], rows["segments"], soft_tokens)


def _count_tokens(rows: _Arrays, targets: jax.Array) -> _Arrays:
    real_tokens = jnp.sum(rows["segments"] > 0, dtype=jnp.int32)
    counts = {"real_tokens": real_tokens, "targets": targets.astype(jnp.int32)}
    if "places" in rows:
        used = rows["places"] < rows["tokens"].shape[1]  # (B, N, S)
        counts["images"] = jnp.sum(jnp.any(used, axis=-1), dtype=jnp.int32)
        counts["soft_tokens"] = jnp.sum(used, dtype=jnp.int32)
    return counts


def _in_dtype(trained: nnx.State, dtype: Any) -> nnx.State:
    """What is multiplied with in the model's dtype, as under torch's autocast; its gradients are float32.

    Norms compute in float32, and rows of an embedding are taken first.
    """
    leaves = []
    for path, leaf in nnx.to_flat_state(trained):
        stays = path[-1] == "embedding" or path[-1] in _VECTORS
        leaves.append((path, leaf if stays else leaf.replace(leaf.get_value().astype(dtype))))
    return nnx.from_flat_state(leaves)


def _accumulate(
    loss_of: Callable[..., tuple[jax.Array, jax.Array]],
    trained: nnx.State,
    frozen: nnx.State,
    split: _Arrays,
    count: jax.Array,
    keys: jax.Array,
    shardings: nnx.State,
) -> tuple[tuple[jax.Array, jax.Array], nnx.State]:
    """Loss, correct tokens and gradient summed over micro-batches, float32 and sharded as the adapters are."""

    def add(total: Any, piece: Any) -> tuple[Any, None]:
        rows, keys = piece
        one = jax.value_and_grad(loss_of, has_aux=True)(trained, frozen, rows, count, keys)
        return jax.tree.map(jnp.add, total, one), None

    # zeros_like alone would leave it to XLA how the sums lie, and they lie so for the whole loop.
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, trained), shardings)
    return jax.lax.scan(add, ((jnp.zeros(()), jnp.zeros(())), zeros), (split, keys))[0]


def _in_micro_batches(x: jax.Array, mesh: Mesh, count: int) -> jax.Array:
    """Rows (B, …) as (count, B / count, …): each device gives every micro-batch rows that it holds; none move.

    Those of two axes (B, L) have their positions split over sequence.
    """
    devices, inner = axis_size(mesh, BATCH), ("sequence",) if x.ndim == 2 else ()
    by_device = x.reshape(devices, count, x.shape[0] // (devices * count), *x.shape[1:])  # (devices, count, …)
    by_device = constrain(by_device, mesh, BATCH, None, None, *inner)
    return constrain(jnp.swapaxes(by_device, 0, 1).reshape(count, -1, *x.shape[1:]), mesh, None, BATCH, *inner)


def _row_keys(key: jax.Array, places: np.ndarray) -> jax.Array:
    """A key for each row by its place in the step, of a key of seed and step: resuming needs no random state."""
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(places.reshape(-1)).reshape(places.shape)


def _dropout_keys(targets: Targets, keys: jax.Array, *, images: int) -> dict[Any, jax.Array]:
    """Keys for each adapted tensor, by its name; with a first axis of layers for a stack.

    Those of the text model are the rows', (B,); those of what embeds images are theirs, (B * N,) of N a row.
    """
    visual = {path: tensors for path, tensors in targets.items() if is_visual(path)}
    of_text = _tensor_keys({path: tensors for path, tensors in targets.items() if path not in visual}, keys)
    if not visual:
        return of_text
    numbers = jnp.arange(images, dtype=jnp.uint32)
    of_images = jax.vmap(lambda key: jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers))(keys)
    found = _tensor_keys(visual, of_images.reshape(-1))
    return of_text | {path: of_stack if "layers" in path else of_stack[0] for path, of_stack in found.items()}


def _tensor_keys(targets: Targets, keys: jax.Array) -> dict[Any, jax.Array]:
    """Of each module, (layers, B) keys of the rows, or images."""
    if not targets:
        return {}
    numbers = jnp.array([name_number(tensor) for tensors in targets.values() for tensor in tensors], jnp.uint32)
    ends = np.cumsum([len(tensors) for tensors in targets.values()])  # (modules,)
    of_tensors = jax.lax.optimization_barrier(jax.vmap(mask_keys, in_axes=(0, None), out_axes=1)(keys, numbers))
    return dict(zip(targets, jnp.split(of_tensors, ends[:-1]), strict=True))


def make_optimizer(optimizer: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Clip by the global norm, Adam, decoupled decay of every matrix, times -learning_rate."""

    def is_matrix(path: Any, _: Any) -> bool:
        return all(getattr(key, "key", None) not in _VECTORS for key in path)

    clip = optax.identity() if optimizer.max_grad_norm is None else clip_as_torch(optimizer.max_grad_norm)
    return optax.chain(
        clip,
        adam_as_torch(optimizer.beta1, optimizer.beta2, optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay, mask=partial(jax.tree_util.tree_map_with_path, is_matrix)),
        scale_by_given_rate(),
    )


def clip_as_torch(max_norm: float) -> optax.GradientTransformation:
    """Gradients times min(1, max_norm / (norm + 1e-6)), which is torch's clip_grad_norm_; Optax's own has no 1e-6."""

    def clip(grads: Any, _: Any) -> Any:
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(grads) + 1e-6))
        return jax.tree.map(lambda grad: grad * scale, grads)

    return optax.stateless(clip)


def adam_as_torch(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam's direction, with bias corrections as exact as torch's.

    Optax's own takes 1 - beta2^count in float32, which at the first step is 1.3e-5 off, an update 6.5e-6.
    """

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:  # noqa: ARG001
        count = state.count + 1
        mu = optax.tree.update_moment(grads, state.mu, beta1, 1)
        nu = optax.tree.update_moment(grads, state.nu, beta2, 2)
        correction1, correction2 = (-jnp.expm1(count * math.log(beta)) if beta else 1.0 for beta in (beta1, beta2))
        directions = jax.tree.map(lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + epsilon), mu, nu)
        return directions, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
    """Updates times minus the `learning_rate` that is given with them."""

    def update(updates: Any, state: Any, params: Any = None, *, learning_rate: Any, **_: Any) -> tuple[Any, Any]:  # noqa: ARG001
        return jax.tree.map(lambda value: -learning_rate * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)  # noqa: ARG005
