"""Bytes that one device needs at the peak of a training step, by formula.

Of what XLA reserves for the steps of benchmarks/records/tpu_compile it gives 0.95 to 1.06 (tests hold it to that).
Without remat it is too high: 130.3 GiB a chip for the 31B on four of v5p, where XLA's nearest build came to 102.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemsmith.hardware.model.work import StepCost, most_keys
from gemsmith.recipe.backends import ATTENDED, LOGIT_TOKENS, Remat, splits_vocabulary
from gemsmith.recipe.schema import Mesh

ADAPTER_BYTES = 4  # adapters, their gradients and both moments are float32
SCORE_BUFFERS = 3  # of blocked or dense attention, in float32: scores, probabilities, and the gradient of one of them

LAYERS_IN_FLIGHT = 3
"""Of those that XLA's scheduler works on at once where their weights come from other devices: it gathers the next ones'
before it needs them, and where nothing keeps the order, computes these layers ahead, too."""
WAITING_OF_TP = 6
"""Results as wide as the model that wait in each layer of a block for its adapters' gradients, which XLA's scheduler
leaves to the block's end: the outputs of o and down, and four gradients, each summed over tp's devices."""
BATCH_BYTES = 16  # of a position of a batch: its token, its place, its segment and whether it is trained on

CPU_HELD = {"tunix": (1.1, 2.0), "trl": (0.7, 1.6)}
"""On a CPU, by backend: GiB of Python, libraries and compilation, and how often a process holds what a step is reckoned
to (benchmarks/records/cpu_memory.json): a file's pages beside the weights read from them, XLA's copies."""
# A projection recomputed costs as many FLOPs a byte of its result as it has inputs: of down the hidden units, of o
# the heads' numbers, of the others the model's width. What A gives is R wide, so it costs next to nothing to save.
ORDER = ("lora", "down", "o", "attended", "v", "k", "q", "gate", "up")
ROOM = 0.8  # of the chip's memory: the formula knows of no fragments


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they are for."""

    base: float
    adapters: float
    """Or the weights themselves where these are trained: with gradients, moments, and a copy in the base's dtype."""
    saved: float  # activations saved from the forward to the backward pass
    layer: "Workspace"  # while one layer is walked back
    head: "Workspace"  # while the loss is computed; the two do not exist at once
    data: float  # of a micro-batch; images of all of a step
    tower: "Workspace"  # while images are embedded, before all else

    @property
    def workspace(self) -> "Workspace":
        """The largest of the three."""
        return max(self.layer, self.head, self.tower, key=lambda workspace: workspace.total)

    @property
    def total(self) -> int:
        return int(self.base + self.adapters + self.saved + self.workspace.total + self.data)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Bytes on one device that are there for a part of the step."""

    activations: float = 0.0
    attention: float = 0.0  # scores of one block of queries
    logits: float = 0.0
    gathered: float = 0.0  # weights of other devices
    dequantized: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.attention + self.logits + self.gathered + self.dequantized


def memory_of(work: StepCost, mesh: Mesh) -> Memory:
    """What one device of the mesh holds at the peak of a step."""
    copy_bytes = work.dtype_bytes if work.dtype_bytes != ADAPTER_BYTES else 0
    base = 0.0 if work.trained_weights else work.base_bytes / (weight_shards(mesh) * mesh.tp)
    data = float(BATCH_BYTES * tokens_per_device(work, mesh))
    if images := work.images:
        # What embeds images is not split over tp; it stays in the dtype that it is computed in.
        split = (images.parameters - images.whole_parameters) / weight_shards(mesh)
        base += (split + images.whole_parameters) * work.dtype_bytes
        data += -(-work.rows // (mesh.replica * mesh.fsdp)) * images.row_bytes
    return Memory(
        base=base,
        adapters=(work.adapters_along_fsdp + (work.adapters_along_tp + work.trained_weights) / mesh.tp)
        / weight_shards(mesh)
        * (4 * ADAPTER_BYTES + copy_bytes),
        saved=_saved(work, mesh),
        layer=_layer_workspace(work, mesh),
        head=_head_workspace(work, mesh),
        data=data,
        tower=_tower_workspace(work, mesh),
    )


def held_on_cpu(work: StepCost, step_bytes: int, backend: str) -> int:
    """The most that a process on a CPU holds, of which `step_bytes` are memory_of's; XLA widens bfloat16 there."""
    gib, times = CPU_HELD[backend]
    return int(gib * 2**30 + times * step_bytes * (4 / work.dtype_bytes if backend == "tunix" else 1))


def memory_breakdown(work: StepCost, memory: Memory) -> dict[str, int]:
    """The peak by part, as a step comes to hold them; but for rounding their sum is the memory's total."""
    copy_bytes = work.dtype_bytes if work.dtype_bytes != ADAPTER_BYTES else 0
    number = memory.adapters / (4 * ADAPTER_BYTES + copy_bytes)
    peak = memory.workspace
    activations = "tower's activations" if peak is memory.tower else "layer's activations"
    parts = {
        "frozen weights": memory.base,
        "trained weights" if work.trained_weights else "adapters": number * (ADAPTER_BYTES + copy_bytes),
        "moments": number * 2 * ADAPTER_BYTES,
        "gradients": number * ADAPTER_BYTES,
        "data": memory.data,
        "saved activations": memory.saved,
        activations: peak.activations,
        "attention scores": peak.attention,
        "logits": peak.logits,
        "gathered weights": peak.gathered,
        "dequantized weights": peak.dequantized,
    }
    return {name: round(held) for name, held in parts.items() if held}


def rows_per_device(work: StepCost, mesh: Mesh) -> int:
    """Rows of a micro-batch that the fullest of the devices along replica and fsdp gets."""
    return -(-work.rows // (mesh.replica * mesh.fsdp * micro_batches(work, mesh)))


def micro_batches(work: StepCost, mesh: Mesh) -> int:
    """Micro-batches of a step that a device goes through one after the other."""
    return -(-work.rows // (mesh.replica * mesh.fsdp)) if work.one_by_one else work.micro_batches


def tokens_per_device(work: StepCost, mesh: Mesh) -> int:
    """Tokens of a micro-batch whose activations a device holds: its rows, or its part of them."""
    return rows_per_device(work, mesh) * -(-work.length // mesh.sequence)


def images_per_device(work: StepCost, mesh: Mesh) -> int:
    """Images of a micro-batch that a device embeds: they are split over all, or with their rows."""
    assert work.images is not None, "of rows with images"
    of_rows = rows_per_device(work, mesh) * work.images.images
    beside = mesh.sequence * mesh.tp
    return of_rows if of_rows % beside else of_rows // beside


def weight_shards(mesh: Mesh) -> int:
    """Devices that the weights' side of the model's width is split over."""
    return mesh.fsdp * mesh.sequence


def _saved(work: StepCost, mesh: Mesh) -> float:
    """With remat layers' inputs and the results that it names; without it all that the layer's backward pass reads."""
    variant = work.variant
    numbers: float = work.saved_inputs * variant.embed_dim + variant.layers * variant.per_layer_input
    kept = work.kept_widths
    numbers += kept.split / mesh.tp + kept.whole
    saved = tokens_per_device(work, mesh) * numbers * work.dtype_bytes
    if work.remat == "none" and work.attention == "dense":
        saved += variant.layers * _scores(work, mesh)
    if work.images:
        saved += images_per_device(work, mesh) * work.images.patches * work.images.saved_width * work.dtype_bytes
        features = rows_per_device(work, mesh) * work.images.images * work.images.soft_tokens * variant.embed_dim
        saved += features * work.dtype_bytes
        if work.remat == "none" or ATTENDED in work.remat:
            # What attention puts out for the padding of rows to whole blocks.
            heads = work.blocked_sliding_layers * variant.heads * variant.head_dim / mesh.tp
            padding = work.block_length - work.length
            saved += rows_per_device(work, mesh) * padding * heads * work.dtype_bytes
    return saved


def _layer_workspace(work: StepCost, mesh: Mesh) -> Workspace:
    """One layer recomputed and walked back; its dequantized weights beside quantized ones.

    Under fsdp the gathered weights of all layers in flight, and where nothing keeps the order their activations.
    """
    shards = weight_shards(mesh)
    in_flight = LAYERS_IN_FLIGHT if shards > 1 else 1
    in_order = not work.recomputes or (work.optimizations.in_turn and not work.chains)
    widths = [width.split / mesh.tp + width.whole for width in work.walked_widths]
    numbers = _heaviest(widths, 1 if in_order else in_flight)
    if mesh.tp > 1:
        period = max(blocks.period for blocks in work.variant.scan_blocks)
        numbers += WAITING_OF_TP * work.variant.embed_dim * (period - 1)
    return Workspace(
        activations=tokens_per_device(work, mesh) * work.dtype_bytes * numbers,
        attention=_scores(work, mesh),
        gathered=_heaviest(work.layer_bytes, in_flight) / mesh.tp if shards > 1 else 0.0,
        dequantized=work.largest_layer_parameters * work.dtype_bytes / mesh.tp if work.dequantizes else 0.0,
    )


def _heaviest(layers: Sequence[float], count: int) -> float:
    """The sum of as many layers in a row, where that is largest."""
    return max(sum(layers[first : first + count]) for first in range(max(1, len(layers) - count + 1)))


def _head_workspace(work: StepCost, mesh: Mesh) -> Workspace:
    """A chunk's logits and their gradient in float32; hidden states, in chunks, and their gradient.

    Under fsdp also the embedding matrix: gathered, or where the vocabulary is split, laid out anew.
    """
    tokens, shards = tokens_per_device(work, mesh), weight_shards(mesh)
    splits = work.optimizations.splits_vocabulary and splits_vocabulary(
        tokens=tokens * mesh.fsdp * mesh.sequence,
        vocabulary=work.variant.vocabulary,
        dtype_bytes=work.dtype_bytes,
        shards=shards,
        tp=mesh.tp,
    )
    matrix = work.head_parameters * work.dtype_bytes / mesh.tp if shards > 1 else 0.0
    return Workspace(
        activations=3.0 * tokens * work.variant.embed_dim * work.dtype_bytes,
        logits=2 * min(LOGIT_TOKENS, tokens) * work.variant.vocabulary * 4 / mesh.tp,
        gathered=matrix / shards if splits else matrix,
    )


def _tower_workspace(work: StepCost, mesh: Mesh) -> Workspace:
    """One layer of the tower, with the scores of a block of queries."""
    if work.images is None:
        return Workspace()
    tower, count = work.images, images_per_device(work, mesh)
    scores = min(work.query_block, tower.patches) * tower.patches * tower.scores_width
    return Workspace(
        activations=float(count * tower.patches * tower.width * work.dtype_bytes), attention=float(4 * count * scores)
    )


def _scores(work: StepCost, mesh: Mesh) -> float:
    """One block's scores in a global layer, where they are largest. Flash keeps them on the chip."""
    if work.nearby_attention == "flash":
        return 0.0
    heads = rows_per_device(work, mesh) * work.variant.heads / mesh.tp
    queries = work.length if work.attention == "dense" else min(work.query_block, work.length)
    if work.attention == "flash":
        # Of a sliding layer that no kernel computes; and which pairs are seen, a byte for each and every head: XLA
        # makes that once for all layers, of all blocks.
        keys = min(work.block_length, queries + work.variant.sliding_window + 2 * work.query_block + work.ahead)
        return heads * (SCORE_BUFFERS * queries * keys * 4 + work.sliding_pairs)
    return SCORE_BUFFERS * heads * queries * most_keys(work.length, work.attention, block=work.query_block) * 4


def choose_remat(work: StepCost, mesh: Mesh, *, device_bytes: float) -> Remat:
    """The names that fit the device's memory beside all else, `layer` where none does.

    Never `none`: what no name saves costs more to write and read than to compute. On CPU: 1.1 to 1.2 times as long.
    """
    saved: tuple[str, ...] = ()
    for name in (name for name in ORDER if name not in work.offload):
        if memory_of(replace(work, remat=(*saved, name)), mesh).total <= ROOM * device_bytes:
            saved = (*saved, name)
    return saved or "layer"
