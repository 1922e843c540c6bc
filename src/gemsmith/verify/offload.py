"""transformers' model with one layer's weights in memory at a time.

A 31B in float32 needs 123 GB, a window of one layer 2 GB. The forward pass is transformers' own. The model is made
without weights; each layer's are read when it is reached and dropped after it, the embedding matrix stays in the file,
and logits are computed in blocks of the vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from gemsmith.arch.tensors import PREFIX, name_in_files
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.peft import Adapter
from gemsmith.checkpoints.safetensors import TensorPlace, numpy_dtype
from gemsmith.errors import CheckpointError

_LAYERS = f"{PREFIX}layers."
_VISION = ("model.vision_tower.", "model.vision_embedder.", "model.embed_vision.")
_TABLES = ("embed_tokens", "embed_tokens_per_layer")
# Words whose logits are computed at once.
_WORDS = 8192


def layerwise_offloaded_model(checkpoint: Checkpoint, kind: Any, config: Any) -> Any:
    """The float32 model, which reads each layer as it is reached. Raises CheckpointError where it lacks a weight."""
    import torch
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):  # rotary frequencies and the like are in no checkpoint
        model = kind(config).eval().requires_grad_(False)
    places = checkpoint.places
    tables = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in _TABLES}
    for name, module in tables.items():
        place = places[f"{name}.weight"]
        # Copy on write, since torch warns of memory that it may not write to; nobody writes.
        raw = np.memmap(place.file, np.uint8, mode="c", offset=place.begin, shape=(place.end - place.begin,))
        dtype = getattr(torch, numpy_dtype(place.dtype).name)
        weight = torch.from_numpy(np.asarray(raw)).view(dtype).view(place.shape)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        # The rows that are looked up are read from the file, each time.
        module.forward = partial(lambda table, ids: table.weight[ids].float() * table.scalar_embed_scale, module)
    for name, _ in list(model.named_parameters()):
        if name.startswith(PREFIX) and not name.startswith(_LAYERS) and name.rpartition(".")[0] not in tables:
            _load(model, name, places, name)
    # What embeds images, whole: at most 0.6 B parameters.
    for name in [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name.startswith(_VISION)]:
        if (in_file := _name_in_file(name, places)) in places:
            _load(model, name, places, in_file)
    head = tables[f"{PREFIX}embed_tokens"].weight
    model.lm_head.forward = lambda x: torch.cat([x @ words.float().T for words in head.split(_WORDS)], dim=-1)
    for number, layer in enumerate(model.get_submodule(_LAYERS.removesuffix(".")).children()):
        layer.register_forward_pre_hook(partial(_read, f"{_LAYERS}{number}.", places))
        layer.register_forward_hook(_drop)
    return model


def window_bytes(checkpoint: Checkpoint) -> float:
    """Of what is in memory: the largest layer in float32 with room for its merge, and all that embeds images."""
    layers, vision = Counter[str](), 0
    for name, place in checkpoint.places.items():
        if name.startswith(_LAYERS):
            layers[name.removeprefix(_LAYERS).partition(".")[0]] += 4 * math.prod(place.shape)
        elif name.startswith(_VISION):
            vision += 4 * math.prod(place.shape)
    return 1.5 * max(layers.values(), default=0) + vision


def read_adapters(model: Any, adapter: Adapter) -> None:
    """From now on each layer's adapter matrices, which PEFT has put on without values, are read with its weights."""
    import torch

    def put(name: str, module: Any) -> None:
        if name in adapter.modules:
            pair = adapter.modules[name]
            for matrices, value in ((module.lora_A, pair.a), (module.lora_B, pair.b)):
                matrices["default"].weight = torch.nn.Parameter(torch.from_numpy(value), requires_grad=False)

    _at_each_read(model, put)


def round_merged(model: Any, round_weight: Callable[[str, Any], Any]) -> None:
    """From now on PEFT merges each layer's adapters when its weights are read; `round_weight` rounds the sum."""

    def merge(name: str, module: Any) -> None:
        if hasattr(module, "merged_adapters"):
            module.merge()
            weight = module.get_base_layer().weight
            weight.data = round_weight(name, weight.data)

    _at_each_read(model, merge)


def _at_each_read(model: Any, act: Callable[[str, Any], None]) -> None:
    """Calls `act` with name in the files and module: of a layer's when it is read; now of others with an adapter."""

    def act_within(prefix: str, layer: Any, _: Any) -> None:
        for name, module in layer.named_modules():
            act(prefix + name, module)

    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last.isdecimal() and parent.endswith(_LAYERS.removesuffix(".")):
            module.register_forward_pre_hook(partial(act_within, f"{_LAYERS}{last}."))
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "merged_adapters") and not name.startswith(_LAYERS):
            act(name_in_files(name), module)


def _read(prefix: str, places: Mapping[str, TensorPlace], layer: Any, _: Any) -> None:
    for name, _parameter in list(layer.named_parameters()):
        if "lora_" not in name:
            _load(layer, name, places, prefix + name.replace(".base_layer", ""))
    for name in [name for name, _buffer in layer.named_buffers() if prefix + name in places]:
        _load(layer, name, places, prefix + name)


def _drop(layer: Any, _inputs: Any, _outputs: Any) -> None:
    from accelerate.utils import set_module_tensor_to_device

    for module in layer.modules():
        if getattr(module, "merged_adapters", None):
            module.merged_adapters.clear()
    for name, _parameter in list(layer.named_parameters()):
        set_module_tensor_to_device(layer, name, "meta")


def _name_in_file(name: str, places: Mapping[str, TensorPlace]) -> str:
    """The 12B's files name what embeds patches otherwise than its class does."""
    if name in places:
        return name
    module, _, last = name.rpartition(".")
    if (inside := name_in_files(module)) != module:
        return f"{inside}.{last}"
    return f"model.vision_embedder.{name.removeprefix('model.embed_vision.')}"


def _load(module: Any, name: str, places: Mapping[str, TensorPlace], in_file: str) -> None:
    """Gives the parameter or buffer of that name its value, in float32."""
    import torch
    from accelerate.utils import set_module_tensor_to_device

    if in_file not in places:
        raise CheckpointError(
            f"transformers has {in_file}, which the checkpoint lacks; are its config.json and weights of one model?"
        )
    value = torch.from_numpy(places[in_file].read().astype(np.float32))
    set_module_tensor_to_device(module, name, "cpu", value, dtype=value.dtype)
