"""LoRA adapters on a Gemma 4 model: where Qwix puts them, what they start from, and a count that is checked.

Each adapted projection with a kernel W of shape (in, out) gets A (in, R) and B (R, out): x -> x W + scale * dropout(x)
A B. A starts uniform in ±1/sqrt(in), which is PEFT's start, B at 0. Both are float32 whatever the base is.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gemsmith.checkpoint.adapter import Adapter, LowRank
from gemsmith.models import Gemma4, path_of
from gemsmith.models.attention import DenseAttention
from gemsmith.models.layer import Layer
from gemsmith.models.quantised import Quantised, dequantise_state
from gemsmith.models.sharding import WEIGHTS, axis_size
from gemsmith.recipe import Lora
from gemsmith.train.adapter_init import first_pair
from gemsmith.train.tunix.upstream import SwitchableLora, forget_rngs
from gemsmith.zoo import Tensor, Variant, lora_targets

ModulePath = tuple[Any, ...]
Targets = dict[ModulePath, list[Tensor]]

# Qwix's names, and ours of checkpoint.adapter.
_SIDES = {"kernel_lora_a": "a", "kernel_lora_b": "b"}


def add_adapters(model: Gemma4, variant: Variant, lora: Lora, *, seed: int, start: Adapter | None = None) -> Gemma4:
    """A model that shares the given one's weights and has an adapter on every target; the given one stays as it is.

    The adapters have the values of `start`, else those that gemsmith.train.adapter_init draws from the seed.

    Qwix adapts one layer of each stack, in a trace; what it adds is then made for all layers of the stack.
    A model of ShapeDtypeStructs gives one of ShapeDtypeStructs, sharded like their kernels.
    """
    targets = targets_of(variant, lora)
    adapted = nnx.merge(*nnx.split(model))
    for number, layer in enumerate(adapted.layers):
        inside = {path[2:]: tensors for path, tensors in targets.items() if path[1] == number}
        if inside:
            provider = SwitchableLora([_rule(inside, lora)], fuses=model.execution.levers.fuses_lora)
            first = partial(first_pair, rank=lora.rank, seed=seed, adapter=start)
            adapted.layers[number] = _adapt(layer, variant, inside, provider, first)
    _check_targets(adapted, targets)
    return adapted


def targets_of(variant: Variant, lora: Lora) -> Targets:
    """The model's modules that get an adapter, each with its checkpoint's tensor for every layer of the stack."""
    targets: Targets = {}
    for tensor in lora_targets(variant, lora.targets):
        targets.setdefault(path_of(variant, tensor)[:-1], []).append(tensor)
    return targets


def count_adapted(model: Gemma4, variant: Variant) -> dict[str, int]:
    """How many modules of each kind have an adapter, such as {"q": 60, "k": 60, "v": 50}."""
    kinds: Counter[str] = Counter()
    paths = set(adapted_paths(model))
    for target in lora_targets(variant):
        kinds[target.role] += path_of(variant, target)[:-1] in paths
    return {kind: count for kind, count in kinds.items() if count}


def adapted_paths(model: Gemma4) -> list[ModulePath]:
    """Paths of the modules that have an adapter, in the model's order."""
    return [path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)) if path[-1] == "kernel_lora_a"]


def _adapt(
    layer: Layer,
    variant: Variant,
    targets: Targets,
    provider: SwitchableLora,
    first: Callable[[Tensor], LowRank],
) -> Layer:
    graph, weights = nnx.split(layer)
    adapted_def, shapes = _trace_injection(graph, weights, variant, provider)
    base, found = dict(nnx.to_flat_state(weights)), dict(nnx.to_flat_state(shapes))
    others = found.keys() - base.keys() - {(*module, name) for module in targets for name in _SIDES}
    assert not others, f"Qwix added {sorted(map(str, others))[0]}, which is no adapter of a target"
    state = [(path, base[path]) for path in found if path in base]
    for module, tensors in targets.items():
        sides = {side: found[(*module, name)] for name, side in _SIDES.items() if (*module, name) in found}
        assert all(isinstance(leaf, nnx.LoRAParam) for leaf in sides.values()), (
            f"{module}: Qwix's adapter has another type"
        )
        started = _started(tensors, sides, base[(*module, "kernel")].get_value(), first)
        state += [((*module, name), nnx.LoRAParam(started[side])) for name, side in _SIDES.items() if side in started]
    return nnx.merge(adapted_def, nnx.from_flat_state(state))


def _started(
    tensors: list[Tensor], sides: dict[str, Any], kernel: Any, first: Callable[[Tensor], LowRank]
) -> dict[str, Any]:
    """A (layers, in, R) and B (layers, R, out) of a stack as training begins; shapes alone where the kernel is one."""
    kernel = kernel.qvalue if isinstance(kernel, Quantised) else kernel
    abstract = isinstance(kernel, jax.ShapeDtypeStruct)
    started: dict[str, Any] = {}
    pairs = [] if abstract else [first(tensor) for tensor in tensors]
    for side, leaf in sides.items():
        shape = (len(tensors), *leaf.get_value().shape)  # (layers, in, R) or (layers, R, out)
        sharding = _sharding(kernel, shape, is_a=side == "a")
        if abstract:
            started[side] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        else:
            started[side] = _laid_out(np.stack([getattr(pair, side).T for pair in pairs]), shape, sharding)
    return started


def _rule(targets: Iterable[ModulePath], lora: Lora) -> Any:
    modules = sorted({"/".join(map(str, path)) for path in targets})
    pattern = "|".join(map(re.escape, modules))
    # Qwix divides its alpha by the rank.
    return qwix.LoraRule(module_path=pattern, rank=lora.rank, alpha=lora.scale * lora.rank, dropout=lora.dropout)


def _trace_injection(graphdef: Any, stack: Any, variant: Variant, provider: SwitchableLora) -> tuple[Any, Any]:
    """One adapted layer's graph and the shapes of its state, by a trace: a real pass would cost time."""
    found = []

    def inject(weights: Any) -> Any:
        layer = nnx.merge(graphdef, dequantise_state(weights))
        dtype = layer.layer_scalar[...].dtype
        head_dim = layer.self_attn.head_dim
        some, heads = jnp.ones((1, 8), jnp.int32), jnp.ones((1, 8, 1, head_dim), dtype)
        angles = (jnp.ones((1, 8, head_dim // 2)), jnp.ones((1, 8, head_dim // 2)))
        inputs = {
            "engine": DenseAttention(angles=angles, positions=some, segments=some, window=None),
            "shared": (heads, heads) if layer.self_attn.shares_kv else None,
            "per_layer_input": jnp.ones((1, 8, variant.per_layer_input), dtype) if variant.per_layer_input else None,
        }
        hidden = jnp.ones((1, 8, variant.embed_dim), dtype)
        layer = qwix.apply_lora_to_model(layer, provider, hidden, **inputs, rngs=nnx.Rngs(0))
        forget_rngs(layer)
        adapted_def, state = nnx.split(layer)
        found.append(adapted_def)
        return state

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    shapes = jax.eval_shape(inject, one)
    return found[-1], shapes


def _laid_out(value: np.ndarray, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    assert value.shape == shape, f"{value.shape} for {shape}"
    return jax.make_array_from_callback(shape, sharding, lambda index: value[index])


def _sharding(kernel: Any, shape: tuple[int, ...], *, is_a: bool) -> Any:
    """The sharding of A or B, of a kernel that is sharded.

    Along the axis that it shares with its kernel, as that, and over the devices that the kernel's other axis is split
    by.
    """
    sharding = kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    _, rows, columns, *_ = (*sharding.spec, None, None, None)
    shared, width = (rows, shape[1]) if is_a else (columns, shape[2])
    if shared in ("tp", None):
        wider = ("tp", *WEIGHTS) if shared == "tp" or axis_size(sharding.mesh, "tp") == 1 else WEIGHTS
        shared = wider if width % axis_size(sharding.mesh, wider) == 0 else shared
    return sharding.update(spec=PartitionSpec(None, shared, None) if is_a else PartitionSpec(None, None, shared))


def _check_targets(model: Gemma4, targets: Targets) -> None:
    """Injection that finds nothing adds nothing and says nothing, so the result is compared with the zoo."""
    found = set(adapted_paths(model))
    assert found == set(targets), (
        f"adapters: {len(found)} modules have one, {len(targets)} should; {sorted(map(str, found ^ set(targets)))[:3]}"
    )
