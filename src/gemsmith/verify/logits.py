"""Logits of merged/ against base + adapter, both through transformers and PEFT on the CPU in float32."""

import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith.arch.tensors import name_in_files
from gemsmith.checkpoints.folder import Checkpoint, open_checkpoint, read_config
from gemsmith.checkpoints.peft import Adapter
from gemsmith.checkpoints.safetensors import numpy_dtype
from gemsmith.errors import CheckpointError, first_line
from gemsmith.runs.records import Check, Losses
from gemsmith.train.torch.upstream import quiet
from gemsmith.verify.offload import layerwise_offloaded_model, read_adapters, round_merged, window_bytes
from gemsmith.verify.prompts import Prompt

# Float32's noise through a whole model, for each unit of the largest logit; measured on the tiny variants: 1e-6.
TOLERANCE = 1e-4
# The adapter must move the logits by this many times what the two models differ by, or the comparison proves nothing.
SMALLEST_EFFECT = 10.0
# Beyond the float32 weights: activations, the tokenizer, torch itself.
_MEMORY_FACTOR = 1.15
_OVERHEAD_BYTES = 2**30

Logits = list[np.ndarray]  # of each prompt, (L, V)


def compare_logits(
    base: Checkpoint,
    adapter_folder: Path,
    merged_folder: Path,
    trained: Adapter | Mapping[str, np.ndarray],
    prompts: Sequence[Prompt],
    *,
    trained_on: Checkpoint | None = None,
) -> tuple[Check, dict[str, Any]]:
    """The check of base, base + adapter (or with the trained weights) and merged, and what the record says of it.

    Losses are those of `trained_on`, of that with the adapter, and of merged; it is `base` unless given.
    Merged weights carry one rounding to the base's dtype that base + adapter does not. Where the base is bfloat16 that
    alone moves logits by a few per cent, and in a mixture of experts it may turn a token to another expert, so no
    tolerance fits. The pass is decided without it: PEFT's own merge (or the trained weights), rounded as files of the
    base's dtype are, against merged, within TOLERANCE. The difference without that rounding is in the detail.
    """
    need_bytes, free_bytes = memory_needed_bytes(base), free_memory_bytes()
    streamed = isinstance(trained, Adapter) and free_bytes < need_bytes
    if isinstance(trained, Adapter) and streamed:
        need_bytes = streaming_needed_bytes(base, trained)
    if free_bytes < need_bytes:
        memory = f"needs {need_bytes / 1e9:.1f} GB of memory, {free_bytes / 1e9:.1f} GB are free"
        return Check(name="logits", passed=None, detail=f"not compared: {memory}; run verify on a larger machine"), {}

    def through(checkpoint: Checkpoint) -> tuple[Logits, Logits, Logits]:
        if isinstance(trained, Adapter):
            return _adapted_logits(checkpoint, adapter_folder, trained, prompts, streamed=streamed)
        return _trained_logits(checkpoint, trained, prompts)

    with quiet():
        try:
            plain, unmerged, rounded = through(base)
            gc.collect()
            exported = open_checkpoint(str(merged_folder))
            merged = _run(load_streamed(exported) if streamed else load_model(merged_folder), prompts)
            before, after = plain, unmerged
            if trained_on is not None and trained_on is not base:
                before, after, _ = through(trained_on)
        except CheckpointError as error:
            return Check(name="logits", passed=False, detail=str(error)), {}
    what = ("base + adapter", "the adapter") if isinstance(trained, Adapter) else ("the trained weights", "training")
    check, found = _judge(plain, unmerged, rounded, merged, what=what, how=" (layer by layer)" if streamed else "")
    return check, found | {"losses": _losses(prompts, before, after, merged)}


def memory_needed_bytes(base: Checkpoint) -> int:
    """Of the base in float32, and what comes with it; models are loaded one after the other."""
    values = sum(int(np.prod(place.shape)) for place in base.places.values())
    return int(4 * values * _MEMORY_FACTOR) + _OVERHEAD_BYTES


def streaming_needed_bytes(base: Checkpoint, adapter: Adapter) -> int:
    """Of one layer, what embeds images, and the adapter; the rest stays in files."""
    return int(window_bytes(base) * _MEMORY_FACTOR) + adapter.float32_bytes + _OVERHEAD_BYTES


def free_memory_bytes() -> int:
    """Memory that can be had without swapping, within the limit of the control group where there is one."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        told = Path("/proc/meminfo").read_text(encoding="ascii")
        if available := re.search(r"^MemAvailable:\s+(\d+) kB", told, re.MULTILINE):
            free_bytes = int(available[1]) * 1024
    with suppress(OSError, ValueError):  # where there is no limit it is `max`
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{each}").read_text()) for each in ("max", "current"))
        free_bytes = min(free_bytes, limit - used)
    return free_bytes


def load_model(folder: Path, dtype: str = "float32") -> Any:
    """The transformers model that the folder's config names, in evaluation; dtype `auto` is the folder's own.

    Raises CheckpointError where transformers does not know it, or misses a weight: it would fill that in at random.
    """
    with _load_errors(folder):
        kind, _ = _find_class(folder)
        model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info.get(problem, ()))):
            raise CheckpointError(
                f"{folder}: transformers reports {len(keys)} {problem.replace('_', ' ')}, such as {keys[0]}"
            )
    return model.eval()


def load_streamed(checkpoint: Checkpoint) -> Any:
    """The same model with a layer's weights in memory at a time. Raises CheckpointError as load_model does."""
    with _load_errors(checkpoint.folder):
        return layerwise_offloaded_model(checkpoint, *_find_class(checkpoint.folder))


def _find_class(folder: Path) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not name.startswith("Gemma4"):
        raise CheckpointError(
            f"{folder}: config.json names the architecture {name}; allowed: Gemma 4's of transformers"
        )
    return kind, config


@contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    import transformers

    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = f"transformers {transformers.__version__} cannot load it ({first_line(error)})"
        if (saved_by := read_config(folder).get("transformers_version")) not in (None, transformers.__version__):
            # An old one may be here: google-tunix asks for safetensors below what newer ones need.
            reason += f"; {saved_by} saved it: pip install --no-deps --upgrade transformers tokenizers safetensors"
        raise CheckpointError(f"{folder}: {reason}") from None


def load_peft(model: Any, folder: Path, adapter: Adapter) -> Any:
    """The model with the PEFT folder's adapter. Raises CheckpointError unless PEFT put every matrix on, and no more."""
    from peft import PeftModel

    tuned = _put_on(adapter, folder, lambda: PeftModel.from_pretrained(model, folder, torch_device="cpu"))
    matrices = _peft_matrices(tuned)
    for module, pair in adapter.modules.items():
        for side, value in (("A", pair.a), ("B", pair.b)):
            if not np.array_equal(matrices[module, side].detach().numpy(), value):
                raise CheckpointError(f"{folder}: PEFT's {module}.lora_{side} is not the file's")
    return tuned


def _put_on(adapter: Adapter, folder: Path, load: Callable[[], Any]) -> Any:
    try:
        tuned = load().eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder}: PEFT cannot load it ({first_line(error)})") from None
    found = _peft_matrices(tuned).keys()
    expected = {(module, side) for module in adapter.modules for side in "AB"}
    if odd := sorted(found ^ expected):
        counts = f"PEFT has {len(found)} adapter matrices on the model, {len(expected)} are in it"
        raise CheckpointError(f"{folder}: {counts}; such as {odd[0][0]}")
    return tuned


def _peft_matrices(tuned: Any) -> dict[tuple[str, str], Any]:
    """What PEFT put on the model, by the module's name in a checkpoint's files, and A or B."""
    matrices = {}
    for name, parameter in tuned.named_parameters():
        if match := re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.default\.weight", name):
            matrices[name_in_files(match[1]), match[2]] = parameter
    return matrices


def _trained_logits(
    base: Checkpoint, weights: Mapping[str, np.ndarray], prompts: Sequence[Prompt]
) -> tuple[Logits, Logits, Logits]:
    """Logits of the base, of the base with trained weights, and of that with the base's rounding."""
    import torch

    model = load_model(base.folder)
    plain, found = _run(model, prompts), []
    for rounds in (False, True):
        for name, value in weights.items():
            weight = torch.from_numpy(value)
            model.get_parameter(name).data = _rounded(weight, base.places[name].dtype) if rounds else weight
        found.append(_run(model, prompts))
    return plain, found[0], found[1]


def _adapted_logits(
    base: Checkpoint, folder: Path, adapter: Adapter, prompts: Sequence[Prompt], *, streamed: bool
) -> tuple[Logits, Logits, Logits]:
    """Logits of the base, of base + adapter, and of PEFT's merge with the base's rounding."""
    if streamed:
        from peft import LoraConfig, PeftModel

        model = load_streamed(base)
        plain = _run(model, prompts)
        tuned = _put_on(adapter, folder, lambda: PeftModel(model, LoraConfig.from_pretrained(str(folder))))
        read_adapters(tuned, adapter)
        unmerged = _run(tuned, prompts)
        round_merged(tuned, lambda module, weight: _rounded(weight, base.places[f"{module}.weight"].dtype))
        return plain, unmerged, _run(tuned, prompts)
    import torch

    model = load_model(base.folder)
    for name, place in base.places.items():
        if place.held:
            model.get_parameter(name).data = torch.from_numpy(place.read().astype(np.float32))
    plain = _run(model, prompts)
    tuned = load_peft(model, folder, adapter)
    unmerged = _run(tuned, prompts)
    merged = tuned.merge_and_unload()
    for name, module in merged.named_modules():
        if (in_files := name_in_files(name)) in adapter.modules:
            module.weight.data = _rounded(module.weight.data, base.places[f"{in_files}.weight"].dtype)
    return plain, unmerged, _run(merged, prompts)


def _rounded(weight: Any, dtype: str) -> Any:
    """The weight with the one rounding that files of that dtype carry."""
    import torch

    return weight.to(getattr(torch, numpy_dtype(dtype).name)).float()


def _run(model: Any, prompts: Sequence[Prompt]) -> Logits:
    import torch

    logits = []
    for prompt in prompts:
        inputs = {"input_ids": prompt.tokens}
        if prompt.image is not None:
            inputs["mm_token_type_ids"] = (prompt.tokens == prompt.image_token).astype(np.int64)
            inputs["pixel_values"] = prompt.image.values
            inputs["image_position_ids"] = prompt.image.positions.astype(np.int64)
        with torch.inference_mode():
            found = model(**{name: torch.from_numpy(value)[None] for name, value in inputs.items()})
            logits.append(found.logits[0].float().numpy())
    return logits


def _judge(
    plain: Logits, unmerged: Logits, rounded: Logits, merged: Logits, *, what: tuple[str, str], how: str
) -> tuple[Check, dict[str, Any]]:
    largest = max(float(np.abs(logits).max()) for logits in merged)
    allowed = TOLERANCE * max(1.0, largest)
    difference, rounding = _distance(merged, rounded), _distance(merged, unmerged)
    effect, kept = _distance(unmerged, plain), _distance(rounded, plain)
    detail = (
        f"merged differs from {what[0]} by {difference:.2g} with the same rounding of weights (allowed "
        f"{allowed:.2g}) and by {rounding:.2g} without; {what[1]} moves logits by {effect:.2g}, with that rounding "
        f"by {kept:.2g}{how}"
    )
    passed = difference <= allowed and kept >= SMALLEST_EFFECT * difference and kept > 0
    found = {"logits_max_abs_difference": difference, "logits_effect": effect, "logits_rounding": rounding}
    return Check(name="logits", passed=passed, detail=detail), found


def _losses(prompts: Sequence[Prompt], *models: Logits) -> Losses | None:
    """Of base, trained and exported; None where no prompt has targets."""
    places = [np.flatnonzero([] if prompt.targets is None else prompt.targets[1:]) for prompt in prompts]
    if not (targets := sum(map(len, places))):
        return None

    def nll(prompt: Prompt, logits: np.ndarray, before: np.ndarray) -> float:
        found = logits[before].astype(np.float64)
        of_targets = found[np.arange(len(before)), prompt.tokens[before + 1]]
        return float((np.logaddexp.reduce(found, axis=1) - of_targets).sum())

    base, trained, exported = (sum(map(nll, prompts, logits, places)) / targets for logits in models)
    return Losses(base=base, trained=trained, exported=exported, targets=targets)


def _distance(one: Logits, other: Logits) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
