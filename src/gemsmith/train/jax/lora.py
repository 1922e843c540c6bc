"""LoRA adapters on a Gemma 4 model: where Qwix puts them, what they start from, and a count that is checked.

Each adapted projection with a kernel W of shape (in, out) gets A (in, R) and B (R, out): x -> x W + scale * dropout(x)
A B. A starts uniform in ±1/sqrt(in), which is PEFT's start, B at 0. Both are float32 whatever the base is.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gemsmith.arch import Tensor, Variant, VisionTower, lora_targets
from gemsmith.checkpoints.peft import Adapter, LoraPair
from gemsmith.models import Gemma4, by_path
from gemsmith.models.attention import DenseAttention
from gemsmith.models.layers import Layer
from gemsmith.models.quantization import Quantized, dequantize_state
from gemsmith.models.sharding import WEIGHTS, axis_size
from gemsmith.models.vision import FeatureProjector, TowerLayer, plane_rope
from gemsmith.recipe.schema import Lora
from gemsmith.train.inputs import first_pair
from gemsmith.train.jax.upstream import LoraProviderWithDropout

Probe = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]  # arguments with which a module can be traced
First = Callable[[Tensor], LoraPair]
ModulePath = tuple[Any, ...]
Targets = dict[ModulePath, list[Tensor]]

# Qwix's names, and ours of checkpoint.adapter.
_SIDES = {"kernel_lora_a": "a", "kernel_lora_b": "b"}


def add_adapters(model: Gemma4, variant: Variant, lora: Lora, *, seed: int, start: Adapter | None = None) -> Gemma4:
    """A model that shares the given one's weights and has an adapter on every target; the given one stays as it is.

    The adapters have the values of `start`, else those that gemsmith.train.inputs draws from the seed.

    Qwix adapts one layer of each stack, in a trace; what it adds is then made for all layers of the stack.
    A model of ShapeDtypeStructs gives one of ShapeDtypeStructs, sharded like their kernels.
    """
    targets = targets_of(variant, lora)
    adapted = nnx.merge(*nnx.split(model))

    def adapt(module: Any, stem: ModulePath, probe: Probe) -> Any:
        inside = {path[len(stem) :]: found for path, found in targets.items() if path[: len(stem)] == stem}
        if not inside:
            return module
        modules = sorted({"/".join(map(str, path)) for path in inside})
        where, alpha = "|".join(map(re.escape, modules)), lora.scale * lora.rank  # Qwix divides its alpha by the rank
        rule = qwix.LoraRule(module_path=where, rank=lora.rank, alpha=alpha, dropout=lora.dropout)
        provider = LoraProviderWithDropout([rule], fuses=model.execution.optimizations.fuses_lora)
        first = partial(first_pair, rank=lora.rank, seed=seed, adapter=start)
        return _adapt(module, inside, provider, first, probe, stacked="layers" in stem)

    for number, layer in enumerate(adapted.layers):
        adapted.layers[number] = adapt(layer, ("layers", number), partial(_probe_layer, variant))
    if isinstance(variant.vision, VisionTower) and hasattr(adapted, "vision_tower"):
        encoder, probe = adapted.vision_tower.encoder, partial(_probe_tower_layer, variant.vision)
        encoder.layers = adapt(encoder.layers, ("vision_tower", "encoder", "layers"), probe)
        probe = partial(_probe_projector, variant.vision)
        adapted.embed_vision = adapt(adapted.embed_vision, ("embed_vision",), probe)
    # Injection that finds nothing adds nothing and says nothing.
    paths = (path for path, _ in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)))
    found = {path[:-1] for path in paths if path[-1] in _SIDES}
    assert found == set(targets), (
        f"adapters: {len(found)} modules have one, {len(targets)} should; {sorted(map(str, found ^ set(targets)))[:3]}"
    )
    return adapted


def targets_of(variant: Variant, lora: Lora) -> Targets:
    """The model's modules that get an adapter, each with its checkpoint's tensor for every layer of the stack."""
    return {path[:-1]: found for path, found in by_path(variant, lora_targets(variant, lora.targets)).items()}


def _adapt(
    module: Any, targets: Targets, provider: LoraProviderWithDropout, first: First, probe: Probe, *, stacked: bool
) -> Any:
    graph, weights = nnx.split(module)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[stacked:], leaf.dtype), weights)
    adapted_def, shapes = _trace_injection(graph, one, provider, probe)
    base, found = dict(nnx.to_flat_state(weights)), dict(nnx.to_flat_state(shapes))
    others = found.keys() - base.keys() - {(*module, name) for module in targets for name in _SIDES}
    assert not others, f"Qwix added {sorted(map(str, others))[0]}, which is no adapter of a target"
    state = [(path, base[path]) for path in found if path in base]
    for path, tensors in targets.items():
        sides = {side: found[(*path, name)] for name, side in _SIDES.items() if (*path, name) in found}
        assert all(isinstance(leaf, nnx.LoRAParam) for leaf in sides.values()), f"{path}: its adapter is no LoRAParam"
        started = _started(tensors, sides, base[(*path, "kernel")].get_value(), first, stacked=stacked)
        state += [((*path, name), nnx.LoRAParam(started[side])) for name, side in _SIDES.items() if side in started]
    return nnx.merge(adapted_def, nnx.from_flat_state(state))


def _started(
    tensors: list[Tensor], sides: dict[str, Any], kernel: Any, first: First, *, stacked: bool
) -> dict[str, Any]:
    """A (layers, in, R) and B (layers, R, out) of a stack as training begins; shapes alone where the kernel is one.

    Of a module that is no stack they have no axis of layers.
    """
    kernel = kernel.qvalue if isinstance(kernel, Quantized) else kernel
    abstract = isinstance(kernel, jax.ShapeDtypeStruct)
    started: dict[str, Any] = {}
    pairs = [] if abstract else [first(tensor) for tensor in tensors]
    for side, leaf in sides.items():
        layers = (len(tensors),) if stacked else ()
        shape = (*layers, *leaf.get_value().shape)  # (layers, in, R) or (layers, R, out)
        sharding = _sharding(kernel, shape, is_a=side == "a")
        if abstract:
            started[side] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        else:
            values = np.stack([getattr(pair, side).T for pair in pairs])
            values = values if stacked else values[0]
            assert values.shape == shape, f"{values.shape} for {shape}"
            started[side] = jax.make_array_from_callback(shape, sharding, values.__getitem__)
    return started


def _trace_injection(graphdef: Any, one: Any, provider: LoraProviderWithDropout, probe: Probe) -> tuple[Any, Any]:
    """One adapted module's graph and the shapes of its state, by a trace: a real pass would cost time.

    `one`: the shapes of its state as it is.
    """
    found = []

    def inject(weights: Any) -> Any:
        module = nnx.merge(graphdef, dequantize_state(weights))
        inputs, options = probe(module)
        module = qwix.apply_lora_to_model(module, provider, *inputs, **options, rngs=nnx.Rngs(0))
        for _, part in nnx.iter_modules(module):  # dropout here has keys of its own
            if hasattr(part, "qwix_rngs"):
                part.qwix_rngs = None
        adapted_def, state = nnx.split(module)
        found.append(adapted_def)
        return state

    shapes = jax.eval_shape(inject, one)
    return found[-1], shapes


def _probe_layer(variant: Variant, layer: Layer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype, head_dim = layer.layer_scalar[...].dtype, layer.self_attn.head_dim
    some, heads = jnp.ones((1, 8), jnp.int32), jnp.ones((1, 8, 1, head_dim), dtype)
    angles = (jnp.ones((1, 8, head_dim // 2)),) * 2
    options = {
        "engine": DenseAttention(angles=angles, positions=some, segments=some, window=None),
        "shared": (heads, heads) if layer.self_attn.shares_kv else None,
        "per_layer_input": jnp.ones((1, 8, variant.per_layer_input), dtype) if variant.per_layer_input else None,
    }
    return (jnp.ones((1, 8, variant.embed_dim), dtype),), options


def _probe_tower_layer(tower: VisionTower, layer: TowerLayer) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = jnp.ones((1, 8, tower.embed_dim), layer.input_layernorm.weight[...].dtype)
    angles = plane_rope(jnp.ones((1, 8, 2), jnp.int32), tower)
    return (hidden,), {"angles": angles, "real": jnp.ones((1, 8), bool), "block": 8}


def _probe_projector(tower: VisionTower, projector: FeatureProjector) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (jnp.ones((1, 8, tower.embed_dim), projector.embedding_projection.kernel[...].dtype),), {}


def _sharding(kernel: Any, shape: tuple[int, ...], *, is_a: bool) -> Any:
    """The sharding of A or B, of a kernel that is sharded.

    Along the axis shared with its kernel as that, and over the devices that the kernel's other axis is split by.
    """
    sharding = kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    rows, columns = spec[-2:]
    shared, width = (rows, shape[-2]) if is_a else (columns, shape[-1])
    if shared in ("tp", None):
        wider = ("tp", *WEIGHTS) if shared == "tp" or axis_size(sharding.mesh, "tp") == 1 else WEIGHTS
        shared = wider if width % axis_size(sharding.mesh, wider) == 0 else shared
    layers = [None] * (len(shape) - 2)
    return sharding.update(spec=PartitionSpec(*layers, shared, None) if is_a else PartitionSpec(*layers, None, shared))
