"""What one training step has to do, in counts that derive from the zoo's tensors and do not depend on the machine.

Letters: B rows, L length, H heads, D head dim, E model, F hidden (ffn), R rank, V vocabulary; N images that a row has
room for, P patches and S soft tokens of each.
"""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gemsmith.arch import Tensor, Variant, Vision, VisionTower, lora_targets
from gemsmith.arch.lora_targets import disk_bytes
from gemsmith.arch.tensors import EXPERTS, parameter_count, text_tensors, trained_tensors, vision_tensors
from gemsmith.recipe import backends
from gemsmith.recipe.backends import OTHER_QUERY_BLOCK, Attention, Optimizations, Remat, attention_loops
from gemsmith.recipe.schema import Recipe

_POSITION_BYTES, _PLACE_BYTES, _VALUE_BYTES = 8, 4, 4
# Split by tp along what they put out; the others along what they take in, so that outputs are whole on every device.
_COLUMN = ("q", "k", "v", "gate", "up")
_IN_LAYER = (*_COLUMN, "o", "down", "per_layer_gate", "per_layer_out", "router")


@dataclass(frozen=True, kw_only=True)
class ImageWork:
    """The images of every row, padded to one shape: N `images` of S `soft_tokens` and P `patches` each."""

    vision: Vision
    images: int
    soft_tokens: int
    embed_dim: int
    parameters: int  # of all that embeds images
    whole_parameters: int  # of these, what every device holds: embeddings of positions
    adapters: int  # trained parameters there; without any nothing is walked back

    @property
    def patches(self) -> int:
        return self.soft_tokens * self.vision.patches_per_token

    @property
    def row_bytes(self) -> int:
        """Of a row's patches with their positions, and of the places of its soft tokens."""
        patch_bytes = _VALUE_BYTES * self.vision.patch_dim + _POSITION_BYTES
        return self.images * (self.patches * patch_bytes + self.soft_tokens * _PLACE_BYTES)

    @property
    def row_flops(self) -> float:
        """Of a row: once forward; with adapters also once again, and backward."""
        vision, projector = self.vision, self.vision.embed_dim * self.embed_dim
        attention, patch_parameters = 0, vision.patch_dim * vision.embed_dim
        if isinstance(vision, VisionTower):
            patch_parameters += vision.layers * vision.embed_dim * (4 * vision.heads * vision.head_dim + 3 * vision.ffn)
            attention = 4 * vision.layers * vision.heads * vision.head_dim * self.patches**2
        matmuls = 2 * (self.patches * patch_parameters + self.soft_tokens * projector)
        if not self.adapters:
            return float(self.images * (matmuls + attention))
        # Scores are recomputed with their layer, and once more within it.
        return float(self.images * (3 * matmuls + 4.5 * attention + 6 * self.patches * self.adapters))

    @property
    def row_score_bytes(self) -> float:
        """Of a row's scores in the tower, in float32: as XLA has it they are written once and read once, in each pass.

        With adapters they are made twice more, and so is their gradient once.
        """
        if not isinstance(self.vision, VisionTower):
            return 0.0
        scores = self.images * self.vision.layers * self.vision.heads * self.patches**2
        return 2.0 * _VALUE_BYTES * scores * (4 if self.adapters else 1)

    @property
    def width(self) -> int:
        """Numbers of a patch that are there at once, in the layer or projection that has most."""
        vision = self.vision
        if isinstance(vision, VisionTower):
            return (6 * vision.embed_dim + 3 * vision.ffn) * (2 if self.adapters else 1)
        return vision.patch_dim + 4 * vision.embed_dim

    @property
    def saved_width(self) -> int:
        """Numbers of a patch that wait for the backward pass: every layer's input, where something is adapted."""
        vision = self.vision
        return vision.layers * vision.embed_dim if self.adapters and isinstance(vision, VisionTower) else 0

    @property
    def scores_width(self) -> int:
        """Heads whose scores of a block of queries are there at once, counted as often as they are."""
        return self.vision.heads * (3 if self.adapters else 2) if isinstance(self.vision, VisionTower) else 0


def images_of(recipe: Recipe, variant: Variant, *, images: int, soft_tokens: int) -> ImageWork:
    """The images of rows that have room for so many, each of so many soft tokens."""
    assert variant.vision is not None, f"{variant.name} takes no images"
    tensors = vision_tensors(variant)
    own = {tensor.name for tensor in tensors}
    targets = [target for target in lora_targets(variant, recipe.lora.targets) if target.name in own]
    return ImageWork(
        vision=variant.vision,
        images=images,
        soft_tokens=soft_tokens,
        embed_dim=variant.embed_dim,
        parameters=parameter_count(tensors),
        whole_parameters=parameter_count([tensor for tensor in tensors if tensor.role == "vision_position"]),
        adapters=recipe.lora.rank * sum(sum(target.shape) for target in targets),
    )


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Numbers that one token leaves in one layer for its backward pass."""

    split: int = 0  # those that tp splits
    whole: int = 0

    def __add__(self, other: "Widths") -> "Widths":
        return Widths(split=self.split + other.split, whole=self.whole + other.whole)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One optimizer step: rows of `length` tokens, in micro-batches one after the other."""

    variant: Variant
    rows: int
    length: int
    micro_batches: int
    one_by_one: bool  # whether each device goes through its rows one after the other, whatever `micro_batches` says
    optimizations: Optimizations
    remat: Remat
    offload: tuple[str, ...]
    attention: Attention
    query_block: int
    dtype_bytes: int  # of activations, and of weights while they are used
    parameters: int
    base_bytes: float
    """Of the frozen weights as they are held: less than they are computed with where train.dtype is nf4 or int8."""
    adapters_along_fsdp: int  # adapter parameters on the matrices' sides of the model's width E, which fsdp splits
    adapters_along_tp: int  # those on the sides of heads and hidden units, which tp splits, and fsdp splits further
    layer_parameters: Mapping[str, int]
    """Weights of the layers that each token is multiplied with, by role: of the experts, only those it is sent to."""
    projection_parameters: int  # the same, of per-layer inputs, before the layers
    head_parameters: int
    largest_layer_parameters: int
    layer_bytes: tuple[float, ...]  # of each layer, as it is held
    walked_widths: tuple[Widths, ...]  # of each layer, what is there while it is walked back
    all_widths: Widths  # what the backward passes of all layers read, which without remat is saved
    named_widths: Mapping[str, Widths]  # the results that train.remat can name, each summed over all layers
    images: ImageWork | None = None  # None where rows are text alone
    trained_weights: int = 0  # the text model's that are trained, float32, instead of adapters

    @property
    def dequantizes(self) -> bool:
        """Whether a layer's weights are made anew, wherever they are used."""
        return self.base_bytes < self.parameters * self.dtype_bytes

    @property
    def trained_parameters(self) -> int:
        return self.trained_weights + self.adapters_along_fsdp + self.adapters_along_tp

    @property
    def text_adapters(self) -> int:
        """Adapters' parameters that every token meets."""
        return self.trained_parameters - self.trained_weights - (self.images.adapters if self.images else 0)

    @property
    def nearby_attention(self) -> Attention:
        """What computes attention in sliding layers; where images are seen in both directions no kernel does."""
        sees = self.images is not None and self.variant.bidirectional_images
        return "blocked" if sees and self.attention == "flash" else self.attention

    @property
    def ahead(self) -> int:
        """Later tokens that a query of a sliding layer may see."""
        return self.images.soft_tokens if self.images and self.variant.bidirectional_images else 0

    @property
    def blocked_sliding_layers(self) -> int:
        """Sliding layers that run as blocks of queries for their images' sake, though a kernel runs the others."""
        variant = self.variant
        apart = self.nearby_attention != self.attention
        return sum(not variant.is_global(layer) for layer in range(variant.layers)) if apart else 0

    @property
    def sliding_pairs(self) -> int:
        """Pairs of query and key that one head of a row computes in a sliding layer, padding to whole blocks too."""
        window, how = self.variant.sliding_window, self.nearby_attention
        return attended_pairs(self.length, window, how, block=self.query_block, ahead=self.ahead)

    @property
    def block_length(self) -> int:
        """The row's positions, padded to whole blocks of queries."""
        block = min(self.query_block, self.length)
        return -(-self.length // block) * block

    @property
    def layer_matmul_parameters(self) -> int:
        return self.projection_parameters + sum(self.layer_parameters.values())

    @property
    def recomputed_parameters(self) -> int:
        """Of `layer_matmul_parameters`, those that the backward pass multiplies with once more."""
        saved = (*self.remat, *self.offload)
        return sum(size for role, size in self.layer_parameters.items() if role not in saved) if self.recomputes else 0

    @property
    def kept_widths(self) -> Widths:
        """What of all layers is saved from the forward to the backward pass, beside the layers' inputs."""
        if not self.recomputes:
            return self.all_widths
        return sum((width for name, width in self.named_widths.items() if name in self.remat), start=Widths())

    @property
    def chains(self) -> bool:
        """Whether the backward pass recomputes most layers' inputs."""
        return backends.chains_layers(self.optimizations, self.variant, self.remat, dequantizes=self.dequantizes)

    @property
    def saved_inputs(self) -> int:
        """How many layers' inputs are saved: every one's, or those that blocks of layers begin with."""
        return sum(blocks.repeats for blocks in self.variant.scan_blocks) if self.chains else self.variant.layers

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes layers, all or in part."""
        return self.remat != "none"

    @property
    def recomputes_attention(self) -> bool:
        return self.recomputes and "attended" not in (*self.remat, *self.offload)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def on_chips(work: StepCost, kind: str, recipe: Recipe) -> StepCost:
    """The work as the recipe's backend does it on chips of a kind, such as "tpu"."""
    return replace(
        work,
        attention=backends.attention_on(kind, recipe.train.attention, work.variant),
        # Of the other backend's attention no formula is known: it is taken to be the JAX model's with large blocks.
        query_block=backends.query_block(kind) if recipe.train.backend == "tunix" else OTHER_QUERY_BLOCK,
        one_by_one=backends.goes_row_by_row(kind, recipe.train.backend),
        optimizations=backends.default_optimizations(kind, recipe.train.optimizations),
    )


def step_cost(
    recipe: Recipe, variant: Variant, *, attention: Attention = "blocked", images: ImageWork | None = None
) -> StepCost:
    """The work of one step, whole layers recomputed where train.remat is auto. Raises RecipeError for other targets."""
    tensors = text_tensors(variant)
    inside = (tensor for tensor in tensors if tensor.layer is not None)
    layers = [list(group) for _, group in itertools.groupby(inside, key=lambda tensor: tensor.layer)]
    adapted = () if recipe.train.method == "full" else recipe.lora.targets
    targets = lora_targets(variant, adapted) if adapted else []
    along_model = sum(tensor.shape[1] if tensor.role in _COLUMN else tensor.shape[0] for tensor in targets)
    met: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.role in EXPERTS:
            met[tensor.role] += tensor.size // variant.experts * variant.experts_per_token
        elif tensor.role in _IN_LAYER:
            met[tensor.role] += tensor.size
    remat, dtype = recipe.train.remat, recipe.train.dtype
    return StepCost(
        variant=variant,
        rows=recipe.train.global_batch_size,
        length=recipe.data.max_length,
        micro_batches=recipe.train.gradient_accumulation_steps,
        one_by_one=False,
        optimizations=backends.default_optimizations("", recipe.train.optimizations),
        remat="layer" if remat == "auto" else remat,
        offload=recipe.train.offload,
        attention=attention,
        query_block=OTHER_QUERY_BLOCK,
        dtype_bytes=4 if dtype == "float32" else 2,
        parameters=parameter_count(tensors),
        base_bytes=sum(disk_bytes(tensor, dtype) for tensor in tensors),
        adapters_along_fsdp=recipe.lora.rank * along_model,
        adapters_along_tp=recipe.lora.rank * (sum(sum(tensor.shape) for tensor in targets) - along_model),
        trained_weights=0 if adapted else parameter_count(trained_tensors(variant)),
        layer_parameters=met,
        projection_parameters=sum(tensor.size for tensor in tensors if tensor.role == "per_layer_projection"),
        head_parameters=variant.vocabulary * variant.embed_dim,
        largest_layer_parameters=max(map(parameter_count, layers)),
        layer_bytes=tuple(sum(disk_bytes(tensor, dtype) for tensor in group) for group in layers),
        walked_widths=tuple(
            # PyTorch, unlike XLA, keeps all that the layer's backward pass reads until it has read it.
            _walked_widths(variant, group) if recipe.train.backend == "tunix" else _widths(variant, group, adapted)
            for group in layers
        ),
        all_widths=sum((_widths(variant, group, adapted) for group in layers), start=Widths()),
        named_widths=_named_widths(layers, adapted, recipe.lora.rank),
        images=images,
    )


@functools.cache
def attended_pairs(
    length: int, window: int | None, attention: Attention, *, block: int = OTHER_QUERY_BLOCK, ahead: int = 0
) -> int:
    """Query-key pairs that one head of one row computes.

    Flash attention skips what the causal triangle or the window excludes, blocked attention the keys that a loop over
    blocks of queries cannot see, the dense form nothing.

    >>> [attended_pairs(4096, 1024, kind) for kind in ("flash", "blocked", "dense")]
    [3670528, 5505024, 16777216]
    """
    if attention == "flash":
        reach = min(length, window or length)
        return reach * (reach + 1) // 2 + (length - reach) * reach
    if attention == "dense":
        return length * length
    block = min(block, length)
    loops = attention_loops(-(-length // block) * block, block=block, window=window, ahead=ahead)
    return sum(len(blocks) * block * keys for blocks, keys in loops)


@functools.cache
def forward_attention_flops(
    variant: Variant,
    length: int,
    attention: Attention = "flash",
    nearby_attention: Attention = "flash",
    *,
    block: int = OTHER_QUERY_BLOCK,
    ahead: int = 0,
) -> int:
    """Of one row: scores and their product with V. `nearby_attention` and `ahead` are of sliding layers."""
    nearby = attended_pairs(length, variant.sliding_window, nearby_attention, block=block, ahead=ahead)
    pairs = {True: attended_pairs(length, None, attention, block=block), False: nearby}
    layers = range(variant.layers)
    return sum(4 * variant.heads * variant.head_dim_of(layer) * pairs[variant.is_global(layer)] for layer in layers)


def most_keys(length: int, attention: Attention, *, block: int) -> int:
    """Keys that a block of queries is compared with at most, where no window hides any."""
    if attention == "dense":
        return length
    block = min(block, length)
    return max(keys for _, keys in attention_loops(-(-length // block) * block, block=block, window=None))


def _widths(variant: Variant, tensors: list[Tensor], adapted: tuple[str, ...]) -> Widths:
    """What a layer's backward pass reads: matmuls' outputs, again for their adapters, and what is between matmuls."""
    shapes = {tensor.role: tensor.shape for tensor in tensors}
    widths = {role: shape[0] * (2 if role in adapted else 1) for role, shape in shapes.items()}
    # What attention puts out, gelu(gate) and its product with up, the same of experts.
    between = shapes["o"][1] + 2 * shapes["up"][0] + 4 * variant.experts_per_token * variant.expert_ffn
    # Norms and residuals; what goes to experts and back.
    beside = (6 + 2 * variant.experts_per_token) * variant.embed_dim
    split = sum(widths.get(role, 0) for role in _COLUMN) + between
    return Widths(split=split, whole=widths["o"] + widths["down"] + beside)


def _walked_widths(variant: Variant, tensors: list[Tensor]) -> Widths:
    """What a layer's backward pass holds at its widest, in the walk back through the MLP.

    Of attention projections, heads and the result, of the MLP gate, up, their product and two gradients, of the layer
    its input and its output's gradient; experts likewise, with what goes to them, comes back, and a gradient of these.
    Adapters add to their projections' outputs in place.
    """
    outputs = {tensor.role: tensor.shape[0] for tensor in tensors if tensor.role in _COLUMN}
    key = outputs.get("k", 0)
    heads = 3 * outputs["q"] + 2 * (key + outputs.get("v", 0)) + (key if "v" not in outputs else 0)
    sent = variant.experts_per_token
    split = heads + 5 * (outputs["gate"] + sent * variant.expert_ffn)
    return Widths(split=split, whole=(2 + 3 * sent) * variant.embed_dim)


def _named_widths(layers: Iterable[list[Tensor]], adapted: tuple[str, ...], rank: int) -> dict[str, Widths]:
    """The results that train.remat can name, of all layers: projections' outputs, attention's, what A gives."""
    found: defaultdict[str, Widths] = defaultdict(Widths)
    for tensors in layers:
        for tensor in tensors:
            if tensor.role in _COLUMN:
                found[tensor.role] += Widths(split=tensor.shape[0])
            elif tensor.role in ("o", "down"):
                found[tensor.role] += Widths(whole=tensor.shape[0])
            if tensor.role == "o":
                found["attended"] += Widths(split=tensor.shape[1])
            if tensor.role in adapted:
                found["lora"] += Widths(whole=rank)
    return dict(found)
