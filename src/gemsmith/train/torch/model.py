"""Gemma 4 in transformers with PEFT's adapters, for packed rows: loaded, checked, split by FSDP2; and its loss."""

import warnings
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import numpy as np
import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from gemsmith.arch import Variant, lora_targets, vision_targets
from gemsmith.arch.lora_targets import is_quantized
from gemsmith.arch.tensors import class_names, name_in_files, text_tensors, trained_tensors
from gemsmith.checkpoints.folder import Checkpoint
from gemsmith.checkpoints.peft import Adapter, target_pattern
from gemsmith.errors import CheckpointError, MachineError
from gemsmith.hardware.model.limits import check_trl_quantized
from gemsmith.recipe.backends import LOGIT_TOKENS
from gemsmith.recipe.schema import Recipe
from gemsmith.train.inputs import first_pair
from gemsmith.train.torch.attention import FULL, SLIDING, attend_documents
from gemsmith.train.torch.upstream import adapted, adapted_by_itself, check_readable, embedded, normed


def token_nll(
    hidden: torch.Tensor, embedding: torch.Tensor, tokens: torch.Tensor, loss_mask: torch.Tensor, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 sum of -log p(target | what is before it) of hidden (B, L, E), embedding (V, E); how many are right.

        tokens     2 105  7   9 106        hidden at 7 predicts 9, at 9 predicts 106
        loss_mask  0   0  0   1   1        2 targets

    Only what predicts a target meets the embedding matrix, also where it is trained: no row's logits are held whole.
    """
    embedding = embedding.to(hidden.dtype) if embedding.requires_grad else embedding
    places = loss_mask[:, 1:].flatten().nonzero()[:, 0]
    # Place k of the rows without their first column lies k // (L - 1) further in the rows with it.
    length = tokens.shape[1]
    predicting = places + places // (length - 1)
    return _Nll.apply(hidden.flatten(0, 1), embedding, predicting, tokens.flatten()[predicting + 1], softcap or 0.0)


class _Nll(torch.autograd.Function):
    """The sum of the nll, linear in what it is multiplied by: so its gradient is made from the logits at hand."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        embedding: torch.Tensor,
        predicting: torch.Tensor,
        targets: torch.Tensor,
        softcap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, correct = (torch.zeros((), dtype=torch.float32, device=hidden.device) for _ in range(2))
        gradient = torch.zeros_like(hidden)
        of_matrix = torch.zeros_like(embedding, dtype=torch.float32) if context.needs_input_grad[1] else None
        for places, some in zip(predicting.split(LOGIT_TOKENS), targets.split(LOGIT_TOKENS), strict=True):
            logits = _float32_product(hidden[places].to(embedding.dtype), embedding)
            slope = torch.tanh_(logits.div_(softcap)) if softcap else None
            if slope is not None:
                logits = slope * softcap
            chosen, highest = logits.gather(1, some[:, None]), logits.amax(dim=-1, keepdim=True)
            correct += (chosen >= highest).sum()
            surplus = logits.sub_(highest).exp_()  # a softmax whose maximum is at hand
            weight = surplus.sum(dim=-1, keepdim=True)
            total += (highest + weight.log() - chosen).sum()
            surplus.div_(weight)
            surplus[torch.arange(len(some), device=some.device), some] -= 1.0
            if slope is not None:
                surplus.mul_(slope.square_().neg_().add_(1.0))
            surplus = surplus.to(embedding.dtype)
            gradient.index_copy_(0, places, (surplus @ embedding).to(hidden.dtype))
            if of_matrix is not None:
                of_matrix += _float32_product(surplus.T, hidden[places].T)
        context.save_for_backward(gradient, of_matrix)
        context.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(context: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient, of_matrix = context.saved_tensors
        slope = above[0].to(gradient.dtype)
        if of_matrix is not None:
            of_matrix = (of_matrix * above[0]).to(gradient.dtype)
        return gradient * slope, of_matrix, None, None, None


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product left rightᵀ in float32, as in the JAX backend: bfloat16 logits of 20 are 0.125 apart.

    Only torch's CUDA kernels sum bfloat16 into float32.
    """
    if right.is_cuda and right.dtype != torch.float32:
        return torch.mm(left, right.T, out_dtype=torch.float32)
    with torch.autocast(right.device.type, enabled=False):
        return left.float() @ right.float().T


_DOCUMENTS = "gemsmith_documents"
_VISION = ("vision_tower", "embed_vision")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def adapted_model(
    recipe: Recipe, checkpoint: Checkpoint, attention: str, device: torch.device, *, vision: bool = False
) -> Any:
    """The checkpoint's model on the device, frozen, with a float32 adapter on every target, not yet at its start.

    Where train.method is full, it is transformers' own, and the weights of trained_tensors are trained. Its forward
    pass takes a step's rows, with `vision` also their images, and gives the sum of their targets' nll.
    """
    base = load_base(recipe, checkpoint, attention, device, vision=vision)
    if recipe.train.compile:
        for layer in base.model.language_model.layers:
            layer.compile(dynamic=False)
    if recipe.train.method == "full":
        names = {tensor.name for tensor in trained_tensors(checkpoint.variant)}
        assert names == set(dict(trained_weights(base))), "transformers trains other weights"
        return base
    targets = lora_targets(checkpoint.variant, recipe.lora.targets)
    renamed = class_names(checkpoint.variant)
    config = peft.LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,  # type: ignore[arg-type]  # PEFT only divides by it
        lora_dropout=recipe.lora.dropout,
        use_rslora=recipe.lora.rslora,
        target_modules=target_pattern(renamed.get(target.module, target.module) for target in targets),
        init_lora_weights=True,
    )
    model = peft.get_peft_model(base, config)
    found, wanted = set(adapters_of(model)), {target.module for target in targets}
    assert found == wanted, (
        f"adapters: {len(found)} modules have one, {len(wanted)} should; {sorted(found ^ wanted)[:3]}"
    )
    embedding = vision_targets(checkpoint.variant, recipe.lora.targets)
    for name, layer in adapters_of(model).items():
        layer.forward = MethodType(adapted_by_itself if name in embedding else adapted, layer)
    base.adapts_images = bool(embedding)
    return model


def load_base(recipe: Recipe, checkpoint: Checkpoint, attention: str, device: torch.device, *, vision: bool) -> Any:
    """The frozen base, with `vision` with what embeds images; for train.method full float32, its text model trained.

    Raises CheckpointError for a missing weight, MachineError where nf4 lacks a library.
    """
    check_readable(checkpoint)
    AttentionInterface.register(_DOCUMENTS, attend_documents)
    dtype, options, full = recipe.train.dtype, dict[str, Any](), recipe.train.method == "full"
    implementation: Any = _DOCUMENTS if attention == "documents" else attention
    if vision:
        implementation = {"text_config": implementation, "vision_config": "sdpa"}
    if dtype == "nf4":
        config = nf4_config(checkpoint.variant, double=recipe.train.double_quant)
        dtype, options = "bfloat16", {"quantization_config": config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=torch.float32 if full else getattr(torch, dtype),
            attn_implementation=implementation,
            # Read straight onto it: the 31B is 57 GiB, more than many machines have beside a GPU.
            device_map={"": device},
            output_loading_info=True,
            **options,
        )
    model, info = loaded
    if lacking := sorted(set(info["missing_keys"])):
        raise CheckpointError(
            f"checkpoint {checkpoint.folder}: transformers finds no {lacking[0]} in it ({len(lacking)} missing)"
        )
    for tower in ("audio_tower", "embed_audio", *(() if vision else _VISION)):
        if getattr(model.model, tower, None) is not None:
            setattr(model.model, tower, None)
    for norm in (module for module in model.modules() if type(module).__name__.endswith("RMSNorm")):
        norm.forward = MethodType(normed, norm)
    # It lies on its devices, split where there are several: accelerate need not move or wrap it.
    model._is_distributed_loading_by_transformers = True
    model.requires_grad_(False)
    if full:
        text: Any = model.model.language_model.requires_grad_(True)
        for table in (part for part in text.modules() if hasattr(part, "embed_scale")):
            table.forward = MethodType(embedded, table)
    model.config.use_cache = False
    model.adapts_images, model.takes_images = False, vision
    model.forward = MethodType(_sum_nll, model)
    if recipe.train.remat != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Splits every layer's parameters, and those outside layers, over the mesh's `fsdp` axis; `replica` copies them."""
    base: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    for layer in base.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def adapters_of(model: peft.PeftModel) -> dict[str, Any]:
    """Every adapted module by its name in the checkpoint."""
    base = model.get_base_model()
    return {name_in_files(name): module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def trained_weights(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """What is trained, by its name: of adapters a module's with `.a` (R, in) or `.b` (out, R), else the files'."""
    if not isinstance(model, peft.PeftModel):
        yield from ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
        return
    for name, layer in adapters_of(model).items():
        yield f"{name}.a", layer.lora_A["default"].weight
        yield f"{name}.b", layer.lora_B["default"].weight


def set_weights(model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Gives what is trained, which is float32, the values that are under its names."""
    for name, weight in trained_weights(model):
        assert weight.dtype == torch.float32, f"{name}: is {weight.dtype}"
        assign(weight, arrays[name])


def start_weights(recipe: Recipe, variant: Variant, adapter: Adapter | None) -> dict[str, np.ndarray]:
    """What adapters start from, by the names of trained_weights: the given adapter, or new ones."""
    found: dict[str, np.ndarray] = {}
    for tensor in lora_targets(variant, recipe.lora.targets):
        pair = first_pair(tensor, recipe.lora.rank, recipe.seed, adapter)
        found |= {f"{tensor.module}.a": pair.a, f"{tensor.module}.b": pair.b}
    return found


def assign(place: torch.Tensor, value: np.ndarray) -> None:
    """Copies the value into a tensor of the same shape, of which this process may hold a part."""
    whole = torch.from_numpy(np.array(value, dtype=np.float32))
    assert place.shape == whole.shape, f"{tuple(whole.shape)} for {tuple(place.shape)}"
    with torch.no_grad():
        if isinstance(place, DTensor):
            whole = distribute_tensor(whole.to(place.device), place.device_mesh, place.placements, src_data_rank=None)
        place.copy_(whole)


def whole_array(value: torch.Tensor) -> np.ndarray:
    """All of a tensor, of which this process may hold a part; then every process must ask."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu().numpy()


def set_moments(optimizer: torch.optim.Optimizer, model: Any, moments: Mapping[str, np.ndarray]) -> None:
    """Gives AdamW the state that whole_moments returned."""
    fused = optimizer.defaults["fused"]
    for of, weight in trained_weights(model):
        state = {name: torch.zeros_like(weight) for name in _MOMENTS}
        for name, place in state.items():
            assign(place, moments[f"{of}.{name}"])
        step = torch.tensor(moments["step"].item(), dtype=torch.float32, device=weight.device if fused else "cpu")
        optimizer.state[weight] = {"step": step, **state}


def whole_moments(optimizer: torch.optim.Optimizer, model: Any) -> dict[str, np.ndarray]:
    """AdamW's state by weight and name, and the number of updates that counted. Every process must ask."""
    arrays, step = dict[str, np.ndarray](), 0.0
    for of, weight in trained_weights(model):
        state = optimizer.state.get(weight) or {name: torch.zeros_like(weight) for name in _MOMENTS}
        step = float(state.get("step", 0.0))
        arrays |= {f"{of}.{name}": whole_array(state[name]) for name in _MOMENTS}
    return {"step": np.array([step], np.float32), **arrays}


def attention_heads(variant: Variant) -> dict[str, tuple[int, int, int]]:
    """(heads, kv heads, head_dim) by type of layer."""
    layers = {FULL if variant.is_global(layer) else SLIDING: layer for layer in reversed(range(variant.layers))}
    return {
        kind: (variant.heads, variant.kv_heads_of(layer), variant.head_dim_of(layer)) for kind, layer in layers.items()
    }


def _sum_nll(
    self: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    loss_mask: torch.Tensor,
    attention_mask: Mapping[str, Any],
    pixel_values: torch.Tensor | None = None,
    image_position_ids: torch.Tensor | None = None,
    predicts: bool = False,
) -> Any:
    """See token_nll: what the base's forward pass is replaced by. `predicts`: see next_tokens in train.jax.step.

    Images are (N, P, C) and (N, P, 2), in the order of their soft tokens.
    """
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": attention_mask, "use_cache": False}
    if self.takes_images:
        hidden = _hidden_of_images(self, inputs, pixel_values, image_position_ids)
    else:
        hidden = self.model.language_model(**inputs).last_hidden_state
    embedding, softcap = self.get_output_embeddings().weight, self.config.get_text_config().final_logit_softcapping
    if not predicts:
        return token_nll(hidden, embedding, tokens, loss_mask, softcap)
    marked = hidden[torch.arange(len(hidden), device=hidden.device), loss_mask.int().argmax(dim=1)]  # (B, E)
    return _float32_product(marked.to(embedding.dtype), embedding).argmax(dim=-1)  # whose order no softcap changes


def _hidden_of_images(
    base: Any, inputs: Mapping[str, Any], pixel_values: torch.Tensor | None, image_position_ids: torch.Tensor | None
) -> torch.Tensor:
    tokens, masks = inputs["input_ids"], inputs["attention_mask"]
    assert isinstance(masks, Mapping) and {*masks} == {FULL, SLIDING}, "upstream would make masks of its own"
    blank = pixel_values is None and base.adapts_images
    if blank:
        pixel_values, image_position_ids = _blank_image(base.config.vision_config, tokens.device)
    images = None if pixel_values is None else _embed_images(base, pixel_values, image_position_ids)
    kinds, given = (tokens == base.config.image_token_id).long(), {} if blank else {"image": images}
    hidden: torch.Tensor = base.model(**inputs, mm_token_type_ids=kinds, mm_encoder_outputs=given).last_hidden_state
    if blank and images is not None:
        hidden = hidden + 0 * images.pooler_output[0].sum().to(hidden.dtype)
    return hidden


def _embed_images(base: Any, pixel_values: torch.Tensor, image_position_ids: torch.Tensor | None) -> Any:
    """What upstream makes of images, as outside training: autocast would pool in bfloat16 what it pools in float32."""
    learns = base.adapts_images and torch.is_grad_enabled()
    with torch.set_grad_enabled(learns), torch.autocast(pixel_values.device.type, enabled=False):
        return base.model.get_image_features(pixel_values, image_position_ids, return_dict=True)


def _blank_image(vision: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A black image of one soft token: without one AdamW and FSDP would miss the adapters' gradient, 0."""
    unified = hasattr(vision, "model_patch_size")
    patch, side = (vision.model_patch_size, 1) if unified else (vision.patch_size, vision.pooling_kernel_size)
    grid = torch.arange(side, device=device)
    positions = torch.cartesian_prod(grid, grid).reshape(1, -1, 2)
    return torch.zeros(1, side * side, 3 * patch * patch, device=device), positions


def nf4_config(variant: Variant, *, double: bool = False) -> transformers.BitsAndBytesConfig:
    """How the base is held in nf4, as the JAX backend holds it but for scales that `double` rounds to 8 bits.

    The text model's projections in nf4, all else in bfloat16, also what embeds images. Raises
    RecipeError for experts, which bitsandbytes leaves in bfloat16, and MachineError where it is not installed.
    """
    check_trl_quantized("nf4", variant)
    try:
        import bitsandbytes  # noqa: F401 - transformers imports it, with a page of advice where it cannot
    except ImportError as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        raise MachineError(f"train.dtype: nf4 needs bitsandbytes, which {why}; run: pip install bitsandbytes") from None
    vision = [f"model.{part}" for part in _VISION]
    others = {tensor.module for tensor in text_tensors(variant) if len(tensor.shape) == 2 and not is_quantized(tensor)}
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", *vision, *sorted(others)],  # of 4 bits, too
    )
