"""LoRA adapters in memory, and out of and into a PEFT folder: A (R, in), B (out, R), W + scale * B A."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.errors import CheckpointError
from gemsmith.recipe import lora_scale
from gemsmith.zoo import Tensor
from gemsmith.zoo.tensors import PREFIX

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_TEXT_ONLY_PREFIX = "model."
_LISTED = 8
# What PEFT can also do, and the value that means it does not: an adapter that uses it is not W + scale * B A.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
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
    """HF module (`model.language_model.layers.0.self_attn.q_proj`) -> its matrices; one rank, alpha and scale for all."""

    modules: Mapping[str, LowRank]
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)


def check_fit(adapter: Adapter, targets: Iterable[Tensor], *, source: str) -> None:
    """Raises CheckpointError unless the adapter has exactly the targets' modules, in their shapes."""
    expected = {target.module: target.shape for target in targets}
    missing, extra = sorted(expected.keys() - adapter.modules.keys()), sorted(adapter.modules.keys() - expected.keys())
    if missing or extra:
        parts = [f"{len(names)} {word} ({some(names)})" for word, names in (("missing", missing), ("not asked for", extra)) if names]
        raise CheckpointError(f"adapter {source}: its modules are not those of model and lora.targets: {'; '.join(parts)}")
    for name, pair in adapter.modules.items():
        out, inner = expected[name]
        if pair.a.shape != (adapter.rank, inner) or pair.b.shape != (out, adapter.rank):
            raise CheckpointError(
                f"adapter {source}: {name} has A {list(pair.a.shape)} and B {list(pair.b.shape)}; rank {adapter.rank} and the weight "
                f"{[out, inner]} need {[adapter.rank, inner]} and {[out, adapter.rank]}"
            )


def check_finite(adapter: Adapter, *, source: str, otherwise: str) -> None:
    """Raises CheckpointError, with what to do `otherwise`, where an adapter would break the model."""
    broken = [name for name, pair in adapter.modules.items() if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all())]
    if broken:
        raise CheckpointError(f"adapter {source}: NaN or infinity in {len(broken)} modules ({some(broken)}); {otherwise}")


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
        raise CheckpointError(f"adapter {folder}: has only one of lora_A and lora_B for {some(halves)}")
    rank = config["r"]
    if wrong := [name for name, found in sides.items() if found["a"].shape[0] != rank or found["b"].shape[-1] != rank]:
        raise CheckpointError(f"adapter {folder}: {CONFIG} says r = {rank}, the tensors of {some(wrong)} do not have it")
    pairs = {name: LowRank(**found) for name, found in sides.items()}
    return Adapter(modules=pairs, rank=rank, alpha=float(config["lora_alpha"]), rslora=bool(config.get("use_rslora")))


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
        "use_rslora": adapter.rslora,
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


def some(names: Sequence[str]) -> str:
    """The first names, without what they share.

    >>> some(["model.language_model.layers.0.mlp.up_proj"])
    'layers.0.mlp.up_proj'
    """
    short = [name.removeprefix(PREFIX) for name in names[:_LISTED]]
    return ", ".join(short) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


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
            raise CheckpointError(f"{file}: has {key} = {json.dumps(config[key])}; only plain LoRA is known here ({key} = {plain[0]!r})")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointError(f"{file}: has r = {rank!r} and lora_alpha = {alpha!r}; both must be numbers above 0")
    return config
