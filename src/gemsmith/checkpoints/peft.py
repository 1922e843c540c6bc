"""LoRA adapters in memory, and out of and into a PEFT folder: A (R, in), B (out, R), W + scale * B A."""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gemsmith import errors
from gemsmith.arch import Variant
from gemsmith.arch.tensors import PREFIX, Tensor, name_in_files
from gemsmith.checkpoints.peft_config import CONFIG, read_peft_config
from gemsmith.checkpoints.safetensors import FLOATS, TensorPlace, WrittenFile, check_digest, read_header, write_tensors
from gemsmith.errors import CheckpointError
from gemsmith.recipe.schema import lora_scale

WEIGHTS = "adapter_model.safetensors"
# In the metadata of adapter_model.safetensors: the fingerprint of the base that was trained on, what that was quantized
# to, and the modules v_proj that no model has, with K's matrices again for vLLM.
_BASE_KEY, _QUANTIZED_KEY, _COPIES_KEY = "gemsmith_base", "gemsmith_base_in", "gemsmith_v_of_k"
# What the text-only class calls model.<this> and the multimodal one model.language_model.<this>.
_IN_TEXT_MODEL = ("model.layers.", "model.per_layer_model_projection")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraPair:
    """One module's adapter in float32: `a` (R, in) and `b` (out, R)."""

    a: np.ndarray
    b: np.ndarray

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.a).all() and np.isfinite(self.b).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """HF module (`model.language_model.layers.0.self_attn.q_proj`) -> its matrices; one rank, alpha and scale for all.

    One that was read from a PEFT folder reads a module's matrices when they are asked for, and keeps none.
    """

    modules: Mapping[str, LoraPair]
    rank: int
    alpha: float
    rslora: bool = False
    base_sha256: str | None = None  # fingerprint of the base that was trained on, where that is known
    quantized: str | None = None  # what the base was quantized to while it was trained on, where that is known

    @property
    def scale(self) -> float:
        return lora_scale(rank=self.rank, alpha=self.alpha, rslora=self.rslora)

    @property
    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of each module's A and B, without reading them."""
        if isinstance(self.modules, _Pairs):
            return self.modules.shapes
        return {name: (pair.a.shape, pair.b.shape) for name, pair in self.modules.items()}

    @property
    def float32_bytes(self) -> int:
        return sum(4 * math.prod(shape) for both in self.shapes.values() for shape in both)


def check_fit(adapter: Adapter, targets: Iterable[Tensor], *, source: str) -> None:
    """Raises CheckpointError unless the adapter has exactly the targets' modules, in their shapes."""
    expected = {target.module: target.shape for target in targets}
    missing, extra = sorted(expected.keys() - adapter.modules.keys()), sorted(adapter.modules.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"adapter {source}: its modules are not those of model and lora.targets: "
            + some_of_each({"missing": missing, "not asked for": extra})
        )
    for name, (a, b) in adapter.shapes.items():
        out, inner = expected[name]
        if a != (adapter.rank, inner) or b != (out, adapter.rank):
            given = f"{name} has A {list(a)} and B {list(b)}"
            needed = f"the weight {[out, inner]} need {[adapter.rank, inner]} and {[out, adapter.rank]}"
            raise CheckpointError(f"adapter {source}: {given}; rank {adapter.rank} and {needed}")


def check_finite(adapter: Adapter, *, source: str, otherwise: str) -> None:
    """Raises CheckpointError, with what to do `otherwise`, where an adapter would break the model."""
    broken = [name for name, pair in adapter.modules.items() if not pair.finite]
    refuse_broken(broken, source=source, otherwise=otherwise)


def refuse_broken(modules: Sequence[str], *, source: str, otherwise: str) -> None:
    if modules:
        raise CheckpointError(
            f"adapter {source}: NaN or infinity in {len(modules)} modules ({some(modules)}); {otherwise}"
        )


def read_peft_adapter(folder: Path) -> Adapter:
    """The plain LoRA adapter in a PEFT folder; modules of a text-only class get the multimodal class's names.

    Where modules have ranks or alphas of their own, matrices are padded with zeros to the largest rank, and B is scaled
    so that one alpha holds for all. Raises CheckpointError where a file is missing, damaged or lies elsewhere, or the
    adapter is not plain LoRA.
    """
    config = read_peft_config(folder)
    for name in (CONFIG, WEIGHTS):
        refuse_outside(folder / name, folder)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        remedy = "save it with PEFT as safetensors"
        raise CheckpointError(f"adapter {folder}: holds adapter_model.bin, a pickle, which is not read here; {remedy}")
    places, metadata = read_header(folder / WEIGHTS)
    copies = metadata.get(_COPIES_KEY, "").split()
    sides = {module: found for module, found in _sides(places, folder).items() if module not in copies}
    wrong = [module for module, (name, (a, b)) in sides.items() if {a.shape[0], b.shape[1]} != {config.rank_of(name)}]
    if wrong:
        original, (a, b) = sides[wrong[0]]
        why = f"the tensors of {some(wrong)} do not have it (A {list(a.shape)}, B {list(b.shape)})"
        raise CheckpointError(f"adapter {folder}: {CONFIG} says r = {config.rank_of(original)}, {why}")
    check_digest(places, metadata, f"adapter {folder}: {WEIGHTS}")
    ranks = {config.rank_of(original) for original, _ in sides.values()}
    scales = {config.scale_of(original) for original, _ in sides.values()}
    known: dict[str, Any] = {"base_sha256": metadata.get(_BASE_KEY), "quantized": metadata.get(_QUANTIZED_KEY)}
    if len(ranks | {config.rank}) == 1 and len(scales | {config.scale}) == 1:
        return Adapter(modules=_Pairs(sides, {}), rank=config.rank, alpha=config.alpha, rslora=config.rslora, **known)
    rank, scale = max(ranks), config.scale if config.scale in scales or not scales else max(scales)
    factors = {module: (rank, config.scale_of(original) / scale) for module, (original, _) in sides.items()}
    return Adapter(modules=_Pairs(sides, factors), rank=rank, alpha=scale * rank, **known)


def write_peft_adapter(
    adapter: Adapter,
    folder: Path,
    base_name: str,
    *,
    dropout: float = 0.0,
    v_of_k: Mapping[str, str] = MappingProxyType({}),
    class_names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, WrittenFile]:
    """Writes adapter_config.json and adapter_model.safetensors for PEFT and vLLM; their sizes and checksums by name.

    The names fit Gemma4ForConditionalGeneration and its unified twin, target_modules also a text-only
    Gemma4ForCausalLM, whose modules lack `language_model`. `class_names`: see arch.class_names.

    Where V is K's projection, vLLM 0.32 computes V from a copy of K's weight, which it gives no adapter unless the file
    has one for v_proj. `v_of_k` names those: v_proj -> k_proj. PEFT, whose model has no such module, omits them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies = {v: k for v, k in v_of_k.items() if k in adapter.modules}
    sources = {name: name for name in adapter.modules} | copies
    in_class = {class_names.get(name, name): source for name, source in sources.items()}
    shapes, entries = adapter.shapes, {}
    for name, source in in_class.items():
        for side, shape in zip("AB", shapes[source], strict=True):
            entries[f"base_model.model.{name}.lora_{side}.weight"] = shape

    # A and B of a module follow each other, and are read once.
    pair_of = functools.lru_cache(maxsize=1)(adapter.modules.__getitem__)

    def tensor(key: str) -> np.ndarray:
        name, _, rest = key.removeprefix("base_model.model.").rpartition(".lora_")
        pair = pair_of(in_class[name])
        return pair.a if rest.startswith("A") else pair.b

    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name, "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "lora_dropout": dropout, "target_modules": target_pattern(in_class), "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "modules_to_save": None, "use_dora": False,
        "use_rslora": adapter.rslora, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    text = (json.dumps(config, indent=2) + "\n").encode()
    (folder / CONFIG).write_bytes(text)
    known = {_COPIES_KEY: " ".join(copies), _BASE_KEY: adapter.base_sha256, _QUANTIZED_KEY: adapter.quantized}
    metadata = {"format": "pt"} | {key: value for key, value in known.items() if value}
    weights = write_tensors(folder / WEIGHTS, entries, tensor, metadata)
    return {CONFIG: WrittenFile(bytes=len(text), sha256=hashlib.sha256(text).hexdigest()), WEIGHTS: weights}


def shared_projections(variant: Variant) -> dict[str, str]:
    """v_proj -> k_proj of the layers where V is K's projection, by full names; no weight has the former's name."""
    layers = [layer for layer in range(variant.layers) if not variant.has_v(layer) and not variant.shares_kv(layer)]
    return {f"{PREFIX}layers.{layer}.self_attn.v_proj": f"{PREFIX}layers.{layer}.self_attn.k_proj" for layer in layers}


def target_pattern(modules: Iterable[str]) -> str:
    r"""PEFT's target_modules: a regular expression for these modules alone, with or without `language_model`.

    >>> print(target_pattern([f"model.language_model.layers.{n}.mlp.up_proj" for n in (0, 1)]))
    model\.(?:language_model\.)?layers\.(?:(?:0|1)\.mlp\.up_proj)
    """
    either = r"model\.(?:language_model\.)?"
    layers: dict[str, list[str]] = {}
    others = []
    for module in modules:
        match = re.fullmatch(rf"{re.escape(PREFIX)}layers\.(\d+)\.(.+)", module)
        if match:
            layers.setdefault(match[2], []).append(match[1])
        elif module.startswith(PREFIX):
            others.append(either + re.escape(module.removeprefix(PREFIX)))
        else:
            others.append(re.escape(module))
    kinds = [f"(?:{'|'.join(numbers)})\\.{re.escape(name)}" for name, numbers in layers.items()]
    pattern = rf"{either}layers\.(?:{'|'.join(kinds)})"
    return "|".join([*([pattern] if kinds else []), *others])


def some(names: Sequence[str], *, most: int = 8) -> str:
    """The first names, without what they share.

    >>> some(["model.language_model.layers.0.mlp.up_proj", "model.vision_tower"], most=1)
    'layers.0.mlp.up_proj and 1 more'
    """
    return errors.some([name.removeprefix(PREFIX) for name in names], most)


def some_of_each(modules: Mapping[str, Sequence[str]]) -> str:
    """What is wrong -> the modules it is wrong with, in words.

    >>> some_of_each({"missing": ["a", "b"], "not asked for": []})
    '2 missing (a, b)'
    """
    return "; ".join(f"{len(names)} {wrong} ({some(names)})" for wrong, names in modules.items() if names)


def refuse_outside(file: Path, folder: Path) -> None:
    """Raises CheckpointError where a file is a symbolic link out of its folder, other than to the hub cache's blobs."""
    target, home = file.resolve(), folder.resolve()
    blobs = next((parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"), home)
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise CheckpointError(f"{file}: is a symbolic link out of its folder, to {target}; put the file itself there")


def _full_name(module: str) -> str:
    return PREFIX + module.removeprefix("model.") if module.startswith(_IN_TEXT_MODEL) else name_in_files(module)


class _Pairs(Mapping[str, LoraPair]):
    """Module -> its name in the file and the places of A and B; each pair is read when it is asked for.

    `factors`: module -> the rank to pad to, and what to multiply B by.
    """

    def __init__(self, sides: "_Sides", factors: Mapping[str, tuple[int, float]]) -> None:
        self._sides, self._factors = sides, factors

    def __getitem__(self, module: str) -> LoraPair:
        a, b = (place.copy().astype(np.float32, copy=False) for place in self._sides[module][1])
        if module in self._factors:
            rank, factor = self._factors[module]
            missing = rank - len(a)
            a, b = np.pad(a, ((0, missing), (0, 0))), np.pad(b * np.float32(factor), ((0, 0), (0, missing)))
        return LoraPair(a=a, b=b)

    @property
    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        found = {}
        for module, (_, (a, b)) in self._sides.items():
            rank = self._factors[module][0] if module in self._factors else a.shape[0]
            found[module] = (rank, a.shape[1]), (b.shape[0], rank)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._sides)

    def __len__(self) -> int:
        return len(self._sides)


_Sides = Mapping[str, tuple[str, tuple[TensorPlace, TensorPlace]]]


def _sides(places: Mapping[str, TensorPlace], folder: Path) -> _Sides:
    """Module, with its multimodal name -> its name in the file, and where A and B lie."""
    found: dict[str, dict[str, TensorPlace]] = {}
    for key, place in places.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key)
        if not match or len(place.shape) != 2 or place.dtype not in FLOATS:
            given = f"{key} ({place.dtype} {list(place.shape)})"
            allowed = f"base_model.model.<module>.lora_A.weight and lora_B.weight in {', '.join(FLOATS)}"
            raise CheckpointError(f"adapter {folder}: holds {given}; allowed: matrices {allowed}")
        found.setdefault(match[1], {})[match[2]] = place
    if not found:
        raise CheckpointError(f"adapter {folder}: {WEIGHTS} holds no matrices; export it again where it was trained")
    if halves := [_full_name(module) for module, sides in found.items() if len(sides) != 2]:
        raise CheckpointError(f"adapter {folder}: has only one of lora_A and lora_B for {some(halves)}")

    def in_order(module: str) -> list[tuple[int, str]]:  # layer 2 before layer 10
        return [(int(word), "") if word.isdecimal() else (-1, word) for word in module.split(".")]

    sides: dict[str, tuple[str, tuple[TensorPlace, TensorPlace]]] = {}
    for name in sorted(found, key=in_order):
        side = name, (found[name]["A"], found[name]["B"])
        if (other := sides.setdefault(module := _full_name(name), side)) is not side:
            twice = f"has matrices for {module} by two names, {other[0]} and {name}"
            raise CheckpointError(f"adapter {folder}: {twice}; keep one")
    return sides
