"""LoRA adapters on a Gemma 4 model: where Qwix puts them, what they start from, and a count that is checked.

Each adapted projection with a kernel W of shape (in, out) gets A (in, R) and B (R, out): x -> x W + scale * dropout(x)
A B. A starts uniform in ±1/sqrt(in), which is PEFT's start, B at 0. Both are float32 whatever the base is.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gemsmith.models import Gemma4, path_of
from gemsmith.models.attention import DenseAttention
from gemsmith.models.layer import Layer
from gemsmith.models.quantised import Quantised, dequantise_state
from gemsmith.models.sharding import WEIGHTS, axis_size
from gemsmith.recipe import Lora
from gemsmith.train.first_adapter import start_of_a
from gemsmith.train.tunix.upstream import SwitchableLora, forget_rngs
from gemsmith.zoo import Tensor, Variant, lora_targets

ModulePath = tuple[Any, ...]
Targets = dict[ModulePath, list[Tensor]]


def add_adapters(model: Gemma4, variant: Variant, lora: Lora, *, seed: int) -> Gemma4:
    """A model that shares the given one's weights and has an adapter on every target; the given one stays as it is.

    Qwix adapts one layer of each stack, in a trace; what it adds is then made for all layers of the stack.
    A model of ShapeDtypeStructs gives one of ShapeDtypeStructs, sharded like their kernels.
    """
    targets = targets_of(variant, lora)
    adapted = nnx.merge(*nnx.split(model))
    for number, layer in enumerate(adapted.layers):
        inside = {path[2:]: tensors for path, tensors in targets.items() if path[1] == number}
        if inside:
            provider = SwitchableLora([_rule(inside, lora)], fuses=model.execution.levers.fuses_lora)
            adapted.layers[number] = _adapt(layer, variant, inside, provider, seed)
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


def _adapt(layer: Layer, variant: Variant, targets: Targets, provider: SwitchableLora, seed: int) -> Layer:
    graph, weights = nnx.split(layer)
    adapted_def, shapes = _trace_injection(graph, weights, variant, provider)
    base = dict(nnx.to_flat_state(weights))
    state = []
    for path, leaf in nnx.to_flat_state(shapes):
        if path in base:
            state.append((path, base[path]))
            continue
        module, is_a = path[:-1], path[-1] == "kernel_lora_a"
        assert isinstance(leaf, nnx.LoRAParam) and module in targets, (
            f"Qwix added {path}, which is no adapter of a target"
        )
        kernel = base[(*module, "kernel")].get_value()
        kernel = kernel.qvalue if isinstance(kernel, Quantised) else kernel
        state.append((path, nnx.LoRAParam(_start(targets[module], leaf.get_value().shape, kernel, seed, is_a=is_a))))
    return nnx.merge(adapted_def, nnx.from_flat_state(state))


def _rule(targets: Iterable[ModulePath], lora: Lora) -> Any:
    modules = sorted({"/".join(map(str, path)) for path in targets})
    pattern = "|".join(map(re.escape, modules))
    # Qwix divides its alpha by the rank.
    return qwix.LoraRule(module_path=pattern, rank=lora.rank, alpha=lora.scale * lora.rank, dropout=lora.dropout)


def _trace_injection(graphdef: Any, stack: Any, variant: Variant, provider: SwitchableLora) -> tuple[Any, Any]:
    """One adapted layer's graph and the shapes of its state. Run for real it would cost a forward pass, operation by
    operation.
    """
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


def _start(tensors: list[Tensor], layer_shape: tuple[int, int], kernel: Any, seed: int, *, is_a: bool) -> Any:
    """The start of A (layers, in, R) or B (layers, R, out) of a stack."""
    shape = (len(tensors), *layer_shape)
    sharding = _sharding(kernel, shape, is_a=is_a)
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    if not is_a:
        return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=sharding)()
    value = np.stack([start_of_a(tensor, shape[2], seed) for tensor in tensors])
    return jax.make_array_from_callback(shape, sharding, lambda index: value[index])


def _sharding(kernel: Any, shape: tuple[int, ...], *, is_a: bool) -> Any:
    """Along the axis that it shares with its kernel, as that, and over the devices that the kernel's other axis is
    split by.
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
