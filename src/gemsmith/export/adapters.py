"""LoRA adapters: out of a run's Orbax checkpoint, and out of and into a PEFT folder.

training: kernel_lora_a (layers, in, R), kernel_lora_b (layers, R, out)   PEFT and here: A (R, in), B (out, R), W + alpha/rank * B A
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.errors import CheckpointError, RunError
from gemsmith.resolve import recipe_variant
from gemsmith.run import Run
from gemsmith.zoo import Tensor, Variant, lora_targets
from gemsmith.zoo.tensors import PREFIX

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_TEXT_ONLY_PREFIX = "model."
_LISTED = 8
# What PEFT can also do, and the value that means it does not: an adapter that uses it is not W + alpha/rank * B A.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """One module's adapter in float32: `a` (R, in) and `b` (out, R)."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """HF module (`model.language_model.layers.0.self_attn.q_proj`) -> its matrices; one rank and alpha for all."""

    modules: Mapping[str, LowRank]
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def find_step(run: Run, step: int | None = None) -> int:
    """The saved step asked for, or the last complete one. Raises RunError with the steps that are there."""
    steps = complete_steps(run.checkpoints)
    if not steps:
        raise RunError(f"{run.checkpoints}: holds no complete checkpoint; run first: gemsmith train {run.path}")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise RunError(f"export.step: {step} was given, {run.checkpoints} holds {there}; allowed: one of those, or null for the last")
    return steps[-1] if step is None else step


def complete_steps(checkpoints: Path) -> list[int]:
    """The steps that were saved in full, in order.

    Orbax writes the time of the commit into the step's metadata last, and on a local disk renames the folder after that.
    """
    if not checkpoints.is_dir():
        return []
    return sorted(int(folder.name) for folder in checkpoints.iterdir() if folder.name.isdecimal() and _is_complete(folder))


def read_run_adapter(run: Run, step: int | None = None) -> Adapter:
    """The adapter of a run's saved step (default: the last complete one), float32, read without a model.

    Raises RunError or CheckpointError where the step is not there, modules are missing or too many, shapes contradict the recipe, a value
    is not finite, or a module's B is all zero.
    """
    step = find_step(run, step)
    folder = run.checkpoints / str(step)
    sides: dict[str, dict[str, np.ndarray]] = {}
    variant = recipe_variant(run.recipe)
    for path, stack in _restore_lora(folder / "model_params"):
        modules, side = _modules_of(path, variant)
        if len(stack) != len(modules):
            raise CheckpointError(f"{folder}: {'.'.join(path)} holds {len(stack)} layers, {variant.name} has {len(modules)} there")
        for module, value in zip(modules, stack, strict=True):
            sides.setdefault(module, {})[side] = value
    if halves := [module for module, found in sides.items() if len(found) != 2]:
        raise CheckpointError(f"{folder}: has only one of A and B for {_some(halves)}; export another step")
    pairs = {name: LowRank(a=_contiguous(found["a"].T), b=_contiguous(found["b"].T)) for name, found in sides.items()}
    lora = run.recipe.lora
    adapter = Adapter(modules=pairs, rank=lora.rank, alpha=lora.alpha)
    check_adapter(adapter, lora_targets(variant, lora.targets), source=str(folder))
    return adapter


def check_adapter(adapter: Adapter, targets: Iterable[Tensor], *, source: str) -> None:
    """Raises CheckpointError unless the adapter has exactly the targets' modules, in their shapes, finite and not zero."""
    expected = {target.module: target.shape for target in targets}
    missing, extra = sorted(expected.keys() - adapter.modules.keys()), sorted(adapter.modules.keys() - expected.keys())
    if missing or extra:
        parts = [f"{len(names)} {word} ({_some(names)})" for word, names in (("missing", missing), ("not asked for", extra)) if names]
        raise CheckpointError(f"adapter {source}: its modules are not those of model and lora.targets: {'; '.join(parts)}")
    for name, pair in adapter.modules.items():
        out, inner = expected[name]
        if pair.a.shape != (adapter.rank, inner) or pair.b.shape != (out, adapter.rank):
            raise CheckpointError(
                f"adapter {source}: {name} has A {list(pair.a.shape)} and B {list(pair.b.shape)}; rank {adapter.rank} and the weight "
                f"{[out, inner]} need {[adapter.rank, inner]} and {[out, adapter.rank]}"
            )
    check_values(adapter, source=source)


def check_values(adapter: Adapter, *, source: str) -> None:
    """Raises CheckpointError where an adapter would break the model (not finite) or do nothing (all of B is zero)."""
    broken = [name for name, pair in adapter.modules.items() if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all())]
    if broken:
        raise CheckpointError(f"adapter {source}: NaN or infinity in {len(broken)} modules ({_some(broken)}); export an earlier step")
    if idle := [name for name, pair in adapter.modules.items() if not (pair.b.any() and pair.a.any())]:
        raise CheckpointError(
            f"adapter {source}: is all zero in {len(idle)} of {len(adapter.modules)} modules ({_some(idle)}), so it would change nothing "
            "there; train for more steps"
        )


def read_peft_adapter(folder: Path) -> Adapter:
    """The plain LoRA adapter in a PEFT folder, of the multimodal class or the text-only one; modules get the multimodal names.

    Raises CheckpointError where a file is missing or damaged, or the adapter is not plain LoRA with one rank.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    config = _read_config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {folder}: {WEIGHTS} cannot be read ({error})") from None
    sides: dict[str, dict[str, np.ndarray]] = {}
    for key, value in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key)
        if not match:
            raise CheckpointError(f"adapter {folder}: holds {key}; allowed: base_model.model.<module>.lora_A.weight and lora_B.weight")
        sides.setdefault(_full_name(match[1]), {})[match[2].lower()] = np.ascontiguousarray(value, dtype=np.float32)
    if halves := [module for module, found in sides.items() if len(found) != 2]:
        raise CheckpointError(f"adapter {folder}: has only one of lora_A and lora_B for {_some(halves)}")
    rank = config["r"]
    if wrong := [name for name, found in sides.items() if found["a"].shape[0] != rank or found["b"].shape[-1] != rank]:
        raise CheckpointError(f"adapter {folder}: {CONFIG} says r = {rank}, the tensors of {_some(wrong)} do not have it")
    return Adapter(modules={name: LowRank(**found) for name, found in sides.items()}, rank=rank, alpha=float(config["lora_alpha"]))


def write_peft_adapter(adapter: Adapter, folder: Path, base_name: str, *, dropout: float = 0.0, prefix: str = PREFIX) -> None:
    """Writes adapter_config.json and adapter_model.safetensors for PEFT and vLLM.

    The default names fit Gemma4ForConditionalGeneration and its unified twin; `prefix="model."` those of a text-only Gemma4ForCausalLM,
    whose modules lack `language_model`. target_modules fits both, and no tower: PEFT cannot wrap the towers' clipped linears.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": target_pattern(adapter.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, np.ndarray] = {}
    for name, pair in adapter.modules.items():
        stem = _PEFT_PREFIX + prefix + name.removeprefix(PREFIX)
        tensors |= {f"{stem}.lora_A.weight": pair.a, f"{stem}.lora_B.weight": pair.b}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def target_pattern(modules: Iterable[str]) -> str:
    r"""The regular expression for PEFT's target_modules that matches these modules, with and without `language_model`, and no other.

    >>> print(target_pattern([f"model.language_model.layers.{n}.mlp.up_proj" for n in (0, 1)]))
    model\.(?:language_model\.)?layers\.(?:(?:0|1)\.mlp\.up_proj)
    """
    layers: dict[str, list[str]] = {}
    for module in modules:
        number, _, name = module.removeprefix(f"{PREFIX}layers.").partition(".")
        layers.setdefault(name, []).append(number)
    kinds = [f"(?:{'|'.join(numbers)})\\.{re.escape(name)}" for name, numbers in layers.items()]
    return rf"model\.(?:language_model\.)?layers\.(?:{'|'.join(kinds)})"


def delta_norm(pair: LowRank, scale: float) -> float:
    """Frobenius norm of scale * B A without making it: ||BA||² = sum((BᵀB) * (AAᵀ))."""
    a, b = pair.a.astype(np.float64), pair.b.astype(np.float64)
    return abs(scale) * math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))


def _is_complete(folder: Path) -> bool:
    try:
        metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(metadata.get("commit_timestamp_nsecs")) and (folder / "model_params" / "_METADATA").is_file()


def _restore_lora(folder: Path) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Every LoRA matrix of an Orbax tree, by its path, as float32 numpy.

    As numpy, because arrays of jax would be put where the checkpoint's sharding says, on chips that may not be here.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    # The handler, not its Checkpointer: that one looks for a step's metadata in an item's folder, and warns that there is none.
    handler, path = ocp.PyTreeCheckpointHandler(), epath.Path(folder.absolute())
    try:
        as_numpy = _map_leaves(handler.metadata(path).tree, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        restored = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({str(error).splitlines()[0]}); export another step") from None
    for keys, value in _leaves(restored):
        if any("lora_" in key for key in keys):
            yield keys, np.asarray(value, dtype=np.float32)


def _map_leaves(tree: Any, function: Any) -> Any:
    return {key: _map_leaves(value, function) for key, value in tree.items()} if isinstance(tree, Mapping) else function(tree)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


def _modules_of(path: Sequence[str], variant: Variant) -> tuple[list[str], str]:
    """HF modules, one for each layer of the stack, and side of a LoRA leaf: the path in the 31B

    layers.3.mlp.up_proj.kernel_lora_b  ->  model.language_model.layers.3.mlp.up_proj, ….9.mlp.up_proj, … and "b"
    """
    match = re.fullmatch(r"(?:.+\.)?layers\.(\d+)\.(.+)\.kernel_lora_([ab])(?:\.value)?", ".".join(path))
    if not match or int(match[1]) >= len(variant.stacks):
        raise CheckpointError(
            f"checkpoint leaf {'.'.join(path)}: is not layers.<N>.<module>.kernel_lora_a or _b of {variant.name}; was Gemsmith the trainer?"
        )
    return [f"{PREFIX}layers.{layer}.{match[2]}" for layer in variant.stacks[int(match[1])]], match[3]


def _full_name(module: str) -> str:
    if module.startswith(PREFIX):
        return module
    return PREFIX + module.removeprefix(_TEXT_ONLY_PREFIX) if module.startswith(f"{_TEXT_ONLY_PREFIX}layers.") else module


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"adapter {folder}: has no {CONFIG}; give a folder that PEFT or Gemsmith wrote") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: must be a LoRA adapter's (peft_type LORA)")
    for key, plain in _PLAIN.items():
        if key in config and config[key] not in plain:
            raise CheckpointError(f"{file}: has {key} = {json.dumps(config[key])}; only plain LoRA can be merged ({key} = {plain[0]!r})")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointError(f"{file}: has r = {rank!r} and lora_alpha = {alpha!r}; both must be numbers above 0")
    return config


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.float32)


def _some(names: Sequence[str]) -> str:
    """The first names, without what they share.

    >>> _some(["model.language_model.layers.0.mlp.up_proj"])
    'layers.0.mlp.up_proj'
    """
    short = [name.removeprefix(PREFIX) for name in names[:_LISTED]]
    return ", ".join(short) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
