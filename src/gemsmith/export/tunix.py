"""The adapter of an ordinary Tunix run: Tunix's own Gemma 4, adapted by Qwix, saved by Tunix's CheckpointManager.

    layers.N.attn.q_einsum.w_lora_a (E, R)              w_lora_b (R, H, D)     ->  q_proj: A (R, E), B (H D, E)
    layers.N.attn.kv_einsum.w_lora_a (E, R)             w_lora_b (R, 2, K, D)  ->  k_proj and v_proj with the same A
    layers.N.attn.k_einsum                                                     ->  k_proj, where K = V
    layers.N.attn.attn_vec_einsum.w_lora_a (H, D, R)    w_lora_b (R, E)        ->  o_proj
    layers.N.mlp.up_proj.kernel_lora_a (E, R)           kernel_lora_b (R, F)   ->  up_proj

Qwix scales by alpha / rank, and no checkpoint says alpha unless the run put it into the checkpoint's custom metadata.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch import Variant
from gemsmith.arch.tensors import PREFIX
from gemsmith.checkpoints.peft import Adapter, LoraPair, some
from gemsmith.checkpoints.steps import ORBAX, checkpoint_steps, read_json
from gemsmith.errors import CheckpointError, CorruptCheckpointError
from gemsmith.export.adapters import MODEL, check_values, contiguous, restore_trained

# Tunix's name in a layer -> HF's modules.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "attn.q_einsum.w": ("self_attn.q_proj",),
    "attn.k_einsum.w": ("self_attn.k_proj",),
    "attn.kv_einsum.w": ("self_attn.k_proj", "self_attn.v_proj"),
    "attn.attn_vec_einsum.w": ("self_attn.o_proj",),
    "mlp.gate_proj.kernel": ("mlp.gate_proj",),
    "mlp.up_proj.kernel": ("mlp.up_proj",),
    "mlp.down_proj.kernel": ("mlp.down_proj",),
    "per_layer_input_gate.w": ("per_layer_input_gate",),
    "per_layer_projection.w": ("per_layer_projection",),
}
_KEY_AND_VALUE = ("attn.k_einsum.w", "attn.kv_einsum.w")


def read_tunix_adapter(
    folder: Path, variant: Variant, *, step: int | None = None, rank: int | None = None, alpha: float | None = None
) -> tuple[Adapter, int | None, list[str]]:
    """The adapter in a Tunix checkpoint, its step (None where the folder's name is none), and notes for the user.

    The folder is its root (then the last complete step, or `step`), a step's, or a model_params. Raises CheckpointError
    where nothing is there, leaves are not the variant's, layers lack what others have, the rank is not the one given,
    alpha is neither given nor in the checkpoint's metadata, or values are not finite or all zero.
    """
    place = _find_params(folder, step)
    sides: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    try:
        for path, value in restore_trained(place):
            layer, name, side = _parse(path, variant, place)
            sides.setdefault((layer, name), {})[side] = value
    except CorruptCheckpointError as error:
        raise CheckpointError(f"{place.parent}: {error}; export another step") from None
    if not sides:
        remedy = "was the run saved with its adapter, and Qwix's rule matched?"
        raise CheckpointError(f"{place}: holds no LoRA parameters; {remedy}")
    used = {key: found for key, found in sides.items() if not (key[1] in _KEY_AND_VALUE and variant.shares_kv(key[0]))}
    found_rank = _rank(sides, place, rank)
    alpha = alpha if alpha is not None else _read_alpha(place)
    if not 0 < alpha < float("inf"):
        raise CheckpointError(f"--alpha {alpha:g}: must be a number above 0")
    _check_layers(used, variant, place)
    modules = {}
    for (layer, name), found in sorted(used.items()):
        for module, pair in _pairs(name, found["a"], found["b"], place):
            modules[f"{PREFIX}layers.{layer}.{module}"] = pair
    adapter = Adapter(modules=modules, rank=found_rank, alpha=alpha)
    check_values(adapter, source=str(place))
    number = int(place.parent.name) if place.parent.name.isdecimal() else None
    notes = []
    without_v = [layer for layer in range(variant.layers) if not variant.shares_kv(layer) and not variant.has_v(layer)]
    names = {name for _, name in used}
    if "attn.kv_einsum.w" in names and "attn.k_einsum.w" not in names and without_v:
        notes.append(
            f"K of {len(without_v)} global layers was not adapted: Tunix calls it k_einsum there, which the run's rule "
            "did not match"
        )
    if idle := len(sides) - len(used):
        notes.append(f"{idle} adapters of layers that take K and V from another layer are left out: no model uses them")
    return adapter, number, notes


def _find_params(folder: Path, step: int | None) -> Path:
    if (folder / "_METADATA").is_file():
        return folder
    if (folder / MODEL / "_METADATA").is_file():
        if step is not None and folder.name != str(step):
            raise CheckpointError(f"--step {step}: {folder} is a step's folder itself; leave --step out")
        return folder / MODEL
    if not (steps := checkpoint_steps(folder)):
        remedy = "give the checkpoint root, <root>/<step>, or its model_params"
        raise CheckpointError(f"{folder}: holds no complete Tunix checkpoint; {remedy}")
    if step is not None and step not in steps:
        raise CheckpointError(
            f"--step {step}: {folder} holds the steps {', '.join(map(str, steps))}; allowed: one of those"
        )
    chosen = folder / str(steps[-1] if step is None else step)
    if not _step_metadata(chosen) or not (chosen / MODEL / "_METADATA").is_file():
        raise CheckpointError(
            f"{chosen}: is damaged (its {ORBAX} or {MODEL} cannot be read); name another step with --step"
        )
    return chosen / MODEL


def _step_metadata(folder: Path) -> dict[str, Any]:
    """What Orbax and the run say of a step; empty where that is missing or damaged."""
    try:
        metadata = read_json(folder / ORBAX)
    except CorruptCheckpointError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _parse(path: tuple[str, ...], variant: Variant, place: Path) -> tuple[int, str, str]:
    """Layer, Tunix's name of the weight, and side of a LoRA leaf."""
    text = ".".join(path).removesuffix(".value")
    match = re.fullmatch(r"(?:.+\.)?layers\.(\d+)\.(.+)_lora_([ab])", text)
    if not match or match[2] not in _MODULES:
        raise CheckpointError(
            f"{place}: {text} has no counterpart among the weights that an adapter can change here; allowed in a "
            f"layer: {', '.join(name.rpartition('.')[0] for name in _MODULES)}"
        )
    layer, name = int(match[1]), match[2]
    if layer >= variant.layers or not (variant.shares_kv(layer) or _is_in(layer, name, variant)):
        remedy = "is it another variant's checkpoint?"
        raise CheckpointError(f"{place}: {text} is no weight of {variant.name} ({variant.layers} layers); {remedy}")
    return layer, name, match[3]


def _rank(sides: Mapping[tuple[int, str], Mapping[str, np.ndarray]], place: Path, given: int | None) -> int:
    weights = {f"layers.{layer}.{name}": found for (layer, name), found in sides.items()}
    if halves := [name for name, found in weights.items() if len(found) != 2]:
        raise CheckpointError(f"{place}: has only one of lora_a and lora_b for {some(halves)}")
    if flat := [name for name, found in weights.items() if found["a"].ndim < 2 or found["b"].ndim < 2]:
        raise CheckpointError(f"{place}: lora_a or lora_b of {some(flat)} is no matrix; export another step")
    ranks = {rank for found in sides.values() for rank in (found["a"].shape[-1], found["b"].shape[0])}
    if len(ranks) > 1:
        raise CheckpointError(
            f"{place}: its matrices have ranks {', '.join(map(str, sorted(ranks)))}; one rank for all is expected"
        )
    if given not in (None, *ranks):
        remedy = "give that, or leave --rank out"
        raise CheckpointError(f"--rank {given}: the matrices in {place} have rank {ranks.pop()}; {remedy}")
    return int(ranks.pop())


def _read_alpha(place: Path) -> float:
    """Alpha of the metadata that the run gave to Tunix's CheckpointManager."""
    if isinstance(custom := _step_metadata(place.parent).get("custom_metadata"), dict):
        lora = custom.get("lora_config") or custom.get("lora")
        for holder in (custom, lora if isinstance(lora, dict) else {}):
            for alpha in (holder.get("alpha"), holder.get("lora_alpha")):
                if isinstance(alpha, int | float) and not isinstance(alpha, bool):
                    return float(alpha)
    raise CheckpointError(f"{place}: does not say alpha; give --alpha, as it was given to qwix.LoraProvider")


def _check_layers(used: Mapping[tuple[int, str], object], variant: Variant, place: Path) -> None:
    """A rule of Qwix's names weights, not layers: what one layer has, every layer has that can."""
    missing = [
        f"layers.{layer}.{name.rpartition('.')[0]}"
        for name in sorted({name for _, name in used})
        for layer in range(variant.layers)
        if _is_in(layer, name, variant) and (layer, name) not in used
    ]
    if missing:
        raise CheckpointError(
            f"{place}: {len(missing)} weights of {variant.name} have no adapter although other layers' have "
            f"({some(missing)}); is it another variant's checkpoint?"
        )


def _is_in(layer: int, name: str, variant: Variant) -> bool:
    """Whether the layer has that weight: K and V are two or one, and none where another layer's are taken."""
    if name not in _KEY_AND_VALUE:
        return True
    return not variant.shares_kv(layer) and (name == _KEY_AND_VALUE[1]) == variant.has_v(layer)


def _pairs(name: str, a: np.ndarray, b: np.ndarray, place: Path) -> list[tuple[str, LoraPair]]:
    rank, modules = a.shape[-1], _MODULES[name]
    if len(modules) > 1 and (b.ndim != 4 or b.shape[1] != len(modules)):
        raise CheckpointError(
            f"{place}: {name} has a lora_b of shape {list(b.shape)}; [rank, 2, kv heads, head dim] is expected"
        )
    shared = contiguous(a.reshape(-1, rank).T)
    of_modules = np.moveaxis(b, 1, 0) if len(modules) > 1 else [b]
    pairs = (LoraPair(a=shared, b=contiguous(one.reshape(rank, -1).T)) for one in of_modules)
    return list(zip(modules, pairs, strict=True))
