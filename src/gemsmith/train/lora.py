"""LoRA adapters on a Gemma 4 model: where Qwix puts them, what they start from, and a count that is checked.

Each adapted projection with a kernel W of shape (in, out) gets A (in, R) and B (R, out): x -> x W + alpha/R * dropout(x) A B.
A starts uniform in ±1/sqrt(in), which is PEFT's start, B at 0. Both are float32 whatever the base is.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gemsmith.models import Gemma4, hf_name_of, path_of
from gemsmith.recipe import Lora
from gemsmith.train.upstream import SwitchableLora
from gemsmith.zoo import Tensor, Variant, lora_targets

ModulePath = tuple[Any, ...]


def add_adapters(model: Gemma4, variant: Variant, lora: Lora, *, seed: int) -> Gemma4:
    """A model that shares the given one's weights and has an adapter on every target; the given one stays as it is.

    The injection is traced, not run. A model of ShapeDtypeStructs gives one of ShapeDtypeStructs, sharded like their kernels.
    """
    targets = {path_of(target)[:-1]: target for target in lora_targets(variant, lora.targets)}
    graphdef, weights = nnx.split(model)
    adapted_def, shapes = _trace_injection(graphdef, weights, _rule(targets, lora))
    base = dict(nnx.to_flat_state(weights))
    state = [(path, base[path] if path in base else _start(path, leaf, base, targets, seed)) for path, leaf in nnx.to_flat_state(shapes)]
    adapted = nnx.merge(adapted_def, nnx.from_flat_state(state))
    _check_targets(adapted, targets)
    return adapted


def count_adapted(model: Gemma4, variant: Variant) -> dict[str, int]:
    """How many modules of each kind have an adapter, such as {"q": 60, "k": 60, "v": 50}."""
    kinds = {path_of(target)[:-1]: target.role for target in lora_targets(variant)}
    return dict(Counter(kinds[path] for path in adapted_paths(model)))


def adapted_paths(model: Gemma4) -> list[ModulePath]:
    """Paths of the modules that have an adapter, in the model's order."""
    return [path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)) if path[-1] == "kernel_lora_a"]


def name_number(path: ModulePath) -> int:
    """A number that stands for the module in random keys, the same in every process and whatever else is adapted."""
    return zlib.crc32(hf_name_of((*path, "kernel")).encode())


def start_of_a(path: ModulePath, shape: tuple[int, int], seed: int) -> np.ndarray:
    """The start of A (in, R): uniform in ±1/sqrt(in), float32, a function of the seed and the module's name."""
    bound = 1.0 / np.sqrt(shape[0])
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, name_number(path)]))
    return ((random.random(shape, dtype=np.float32) * 2 - 1) * bound).astype(np.float32)


def _rule(targets: Iterable[ModulePath], lora: Lora) -> Any:
    modules = sorted({"/".join(map(str, path[2:])) for path in targets})
    pattern = rf"layers/\d+/({'|'.join(map(re.escape, modules))})"
    return qwix.LoraRule(module_path=pattern, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout)


def _trace_injection(graphdef: Any, weights: Any, rule: Any) -> tuple[Any, Any]:
    """The adapted model's graph and the shapes of its state. Run for real it would cost a forward pass, operation by operation."""
    found = []

    def inject(weights: Any) -> Any:
        tokens = jnp.zeros((1, 8), jnp.int32)
        inputs = (tokens, jnp.arange(8, dtype=jnp.int32)[None], tokens + 1)
        model = nnx.merge(graphdef, weights)
        model = qwix.apply_lora_to_model(model, SwitchableLora([rule]), *inputs, methods=("hidden",), rngs=nnx.Rngs(0))
        adapted_def, state = nnx.split(model)
        found.append(adapted_def)
        return state

    shapes = jax.eval_shape(inject, weights)
    return found[-1], shapes


def _start(path: ModulePath, leaf: Any, base: dict[ModulePath, Any], targets: dict[ModulePath, Tensor], seed: int) -> nnx.LoRAParam:
    """The start of one adapter matrix, sharded as its kernel is along the axis that they share."""
    module, is_a = path[:-1], path[-1] == "kernel_lora_a"
    assert isinstance(leaf, nnx.LoRAParam) and module in targets, f"Qwix added {path}, which is no adapter of a target"
    shape, kernel = leaf.get_value().shape, base[(*module, "kernel")].get_value()
    sharding = _sharding_of(kernel, is_a=is_a)
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return nnx.LoRAParam(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    value = start_of_a(module, shape, seed) if is_a else np.zeros(shape, np.float32)
    return nnx.LoRAParam(jax.device_put(value, sharding))


def _sharding_of(kernel: Any, *, is_a: bool) -> Any:
    sharding = kernel.sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    rows, columns = (*sharding.spec, None, None)[:2]
    return sharding.update(spec=PartitionSpec(rows, None) if is_a else PartitionSpec(None, columns))


def _check_targets(model: Gemma4, targets: dict[ModulePath, Tensor]) -> None:
    """Injection that meets a rematerialised layer adds nothing and says nothing, so the result is compared with the zoo."""
    found = set(adapted_paths(model))
    assert found == set(targets), (
        f"adapters: {len(found)} modules have one, {len(targets)} should; {sorted(map(str, found ^ set(targets)))[:3]}"
    )
