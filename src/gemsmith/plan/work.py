"""What one training step has to do, in counts that derive from the zoo's tensors and do not depend on the machine.

Letters: B rows, L length, H heads, D head dim, E model, F hidden (ffn), R rank, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from gemsmith.recipe import Recipe
from gemsmith.zoo import Tensor, Variant, lora_targets, text_tensors
from gemsmith.zoo.quantised import held_bytes

Attention = Literal["blocked", "flash", "dense"]
"""`blocked` is the JAX model's: a block of queries at a time against every key that it may see. The others are what it is compared with."""
QUERY_BLOCK = 512
"""Of the JAX model's attention."""
Remat = Literal["none", "layer"] | tuple[str, ...]
"""The recipe's train.remat: names are those of results that are kept."""
# Split by tp along what they put out; the others along what they take in, so that their outputs are whole on every device.
_COLUMN = ("q", "k", "v", "gate", "up")
_IN_LAYER = (*_COLUMN, "o", "down", "per_layer_gate", "per_layer_out", "router")
_EXPERTS = ("expert_gate_up", "expert_down")


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Numbers that one token leaves in one layer for its backward pass: those that tp splits, and those that it does not."""

    split: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step of LoRA training: rows of `length` tokens, all in one pass."""

    variant: Variant
    rows: int
    length: int
    remat: Remat
    attention: Attention
    dtype_bytes: int
    """Of a number that is computed with."""
    parameters: int
    base_bytes: float
    """Of the frozen weights as they are held: less than they are computed with where train.dtype is nf4 or int8."""
    adapters_along_fsdp: int
    """Adapter parameters that fsdp splits: the matrices' sides of the model's width E, as their kernels are split."""
    adapters_along_tp: int
    """Those that tp splits: the sides of heads and hidden units. Under fsdp alone every device has all of them."""
    layer_matmul_parameters: int
    """Weights of the layers that each token is multiplied with: of the experts, only those it is sent to."""
    head_parameters: int
    largest_layer_parameters: int
    largest_layer_bytes: float
    """As it is held."""
    recomputed_parameters: int
    """Of `layer_matmul_parameters`, those that the backward pass multiplies with once more."""
    widths: tuple[Widths, ...]
    """Of each layer."""
    kept_widths: tuple[Widths, ...]
    """What of each layer is kept from the forward to the backward pass, beside the layer's input."""

    @property
    def dequantises(self) -> bool:
        """Whether a layer's weights are made anew, wherever they are used."""
        return self.base_bytes < self.parameters * self.dtype_bytes

    @property
    def trained_parameters(self) -> int:
        return self.adapters_along_fsdp + self.adapters_along_tp

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass runs layers again, all or in part."""
        return self.remat != "none"

    @property
    def recomputes_attention(self) -> bool:
        return self.recomputes and "attended" not in self.remat

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def work_of(recipe: Recipe, variant: Variant, *, attention: Attention = "blocked") -> Work:
    """The work of one step of the recipe. Raises RecipeError for LoRA targets that do not exist."""
    layers: dict[int, list[Tensor]] = {layer: [] for layer in range(variant.layers)}
    outside: list[Tensor] = []
    for tensor in text_tensors(variant):
        (outside if tensor.layer is None else layers[tensor.layer]).append(tensor)
    projection = sum(tensor.size for tensor in outside if tensor.role == "per_layer_projection")
    targets = lora_targets(variant, recipe.lora.targets)
    along_model = sum(tensor.shape[1] if tensor.role in _COLUMN else tensor.shape[0] for tensor in targets)
    sizes = {layer: sum(tensor.size for tensor in tensors) for layer, tensors in layers.items()}
    remat, adapted = recipe.train.remat, recipe.lora.targets
    widths = tuple(_widths(variant, tensors, adapted) for tensors in layers.values())
    matmul = {tensor: _met_by_a_token(variant, tensor) for group in layers.values() for tensor in group}
    again = 0 if remat == "none" else sum(size for tensor, size in matmul.items() if tensor.role not in remat)
    return Work(
        variant=variant,
        rows=recipe.train.rows_per_step,
        length=recipe.data.max_length,
        remat=remat,
        attention=attention,
        dtype_bytes=4 if recipe.train.dtype == "float32" else 2,
        parameters=sum(sizes.values()) + sum(tensor.size for tensor in outside),
        base_bytes=sum(held_bytes(tensor, recipe.train.dtype) for tensor in text_tensors(variant)),
        adapters_along_fsdp=recipe.lora.rank * along_model,
        adapters_along_tp=recipe.lora.rank * (sum(sum(tensor.shape) for tensor in targets) - along_model),
        layer_matmul_parameters=projection + sum(matmul.values()),
        head_parameters=variant.vocabulary * variant.hidden,
        largest_layer_parameters=max(sizes.values()),
        largest_layer_bytes=max(sum(held_bytes(tensor, recipe.train.dtype) for tensor in group) for group in layers.values()),
        recomputed_parameters=again,
        widths=widths,
        kept_widths=widths
        if remat == "none"
        else tuple(_kept_by_name(group, remat, adapted, recipe.lora.rank) for group in layers.values()),
    )


def attended_pairs(length: int, window: int | None, attention: Attention) -> int:
    """Query-key pairs that one head of one row computes.

    Flash attention skips what the causal triangle or the window excludes, blocked attention what lies before a block's windows, the
    dense form nothing.

    >>> [attended_pairs(4096, 1024, kind) for kind in ("flash", "blocked", "dense")]
    [3670528, 6291456, 16777216]
    """
    if attention == "flash":
        reach = min(length, window or length)
        return reach * (reach + 1) // 2 + (length - reach) * reach
    return length * keys_of_a_block(length, window, attention)


def keys_of_a_block(length: int, window: int | None, attention: Attention) -> int:
    """Keys that each query is compared with, whether it sees them or not."""
    if attention == "dense" or window is None or length <= QUERY_BLOCK:
        return length
    return min(QUERY_BLOCK + window, length)


def _met_by_a_token(variant: Variant, tensor: Tensor) -> int:
    if tensor.role in _EXPERTS:
        return tensor.size // variant.experts * variant.experts_per_token
    return tensor.size if tensor.role in _IN_LAYER else 0


def _widths(variant: Variant, tensors: list[Tensor], adapted: tuple[str, ...]) -> Widths:
    """What a layer's backward pass reads: each matmul's output, once more from its adapter, and what stands between the matmuls."""
    split = whole = 0
    ffn = 0
    for tensor in tensors:
        if tensor.role not in (*_COLUMN, "o", "down"):
            continue
        width = tensor.shape[0] * (2 if tensor.role in adapted else 1)
        if tensor.role in _COLUMN:
            split += width
        else:
            whole += width
        ffn = tensor.shape[0] if tensor.role == "up" else ffn
        split += tensor.shape[1] if tensor.role == "o" else 0  # what attention puts out
    split += 2 * ffn  # gelu(gate) and its product with up
    split += 4 * variant.experts_per_token * variant.expert_ffn
    whole += 6 * variant.hidden + 2 * variant.experts_per_token * variant.hidden  # norms and residuals; what goes to experts and back
    return Widths(split=split, whole=whole)


def _kept_by_name(tensors: list[Tensor], remat: Remat, adapted: tuple[str, ...], rank: int) -> Widths:
    """The results that train.remat names: projections' outputs, what attention puts out, what adapters' A give."""
    split = sum(tensor.shape[0] for tensor in tensors if tensor.role in _COLUMN and tensor.role in remat)
    whole = sum(tensor.shape[0] for tensor in tensors if tensor.role in ("o", "down") and tensor.role in remat)
    split += sum(tensor.shape[1] for tensor in tensors if tensor.role == "o" and "attended" in remat)
    whole += sum(rank for tensor in tensors if tensor.role in adapted and "lora" in remat)
    return Widths(split=split, whole=whole)
