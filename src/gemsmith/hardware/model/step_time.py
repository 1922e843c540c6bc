"""Seconds of one training step by formula: FLOPs at a share of the peak, bytes through HBM and between chips.

benchmarks/records/plan_accuracy.json has it beside XLA's estimates for compiled steps, and beside published runs.
"""

from dataclasses import dataclass, replace

from gemsmith.hardware import Machine
from gemsmith.hardware.model import memory
from gemsmith.hardware.model.memory import micro_batches, rows_per_device, tokens_per_device, weight_shards
from gemsmith.hardware.model.work import StepCost, forward_attention_flops
from gemsmith.recipe.backends import OTHER_QUERY_BLOCK
from gemsmith.recipe.schema import Mesh

ATTENTION_SHARE = 0.7
"""Attention kernels reach this much of the share that matmuls reach; splash is assumed to reach 50 % of v5p's peak."""
FLOAT32_SHARE = {"tpu": 1 / 6, "gpu": 1 / 15, "cpu": 1.0}
"""Of the bfloat16 peak: a TPU takes six products for one; a GPU leaves its tensor cores, which an H100's others have a
fifteenth of, an L4's a fourth. A processor's peak in the catalog is float32's already."""
OPTIMIZER_PASSES = 7
"""Times that AdamW reads or writes as much as the adapters: parameter, gradient, two moments in, three of them out."""
MEASURED_WITHIN = 1.15
"""The factor that a step may be off trainings measured on its machine (benchmarks/records/plan_calibration.json)."""

_RECOMPUTED = {"flash": 0.5, "blocked": 0.5, "dense": 0.0}
"""Forward passes of attention that its own backward pass makes: flash and blocked recompute the scores, half of one."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step.

    `low`: all traffic between chips hidden, matmuls at their best; `high`: none hidden, at their worst. On a machine
    on which trainings were measured: MEASURED_WITHIN around what matmuls reached in them.
    """

    flops: float  # of the whole step, over all devices, recomputation counted
    low_s: float
    high_s: float
    ideal_s: float  # of the FLOPs at the chips' whole peak
    hbm_s: float
    interconnect_s: float
    dcn_s: float = 0.0  # the gradients of the adapters over the data center network; none where there is one slice

    @property
    def beside_s(self) -> float:
        """What is added to matmuls where a run was measured: half of the traffic between chips is taken as hidden."""
        return self.hbm_s + (self.interconnect_s + self.dcn_s) / 2


def step_time(work: StepCost, machine: Machine, mesh: Mesh) -> StepTime:
    chip = machine.chip
    # Rows that do not fill the mesh cost as much as if they did.
    filled = micro_batches(work, mesh) * rows_per_device(work, mesh) * mesh.replica * mesh.fsdp / work.rows
    matmul, attention = filled * matmul_flops(work), filled * attention_flops(work)
    matmul += filled * work.rows * work.images.row_flops if work.images else 0.0
    share = FLOAT32_SHARE[chip.kind] if work.dtype_bytes == 4 else 1.0
    ideal_s = (matmul + attention / ATTENTION_SHARE) / (chip.flops_per_s * share * machine.chips)
    hbm_s = _hbm_bytes(work, mesh) / (chip.hbm_bytes_per_s / chip.devices)
    interconnect_s = 0.0
    if machine.interconnect_bytes_per_s is not None:
        received = _received_bytes(work, mesh, slices=machine.slices)
        interconnect_s = received / (machine.interconnect_bytes_per_s / chip.devices)
    dcn_s = 0.0
    if machine.slices > 1 and chip.dcn_bytes_per_s is not None:
        # A ring's all-reduce of n slices moves 2 (n - 1) / n of what is summed: a device's shard of the adapters'
        # gradients, once a step, in the dtype of the forward pass. 248 MB a chip of the 31B on two slices of v5p-8,
        # rank 64, compiled with no device; this gives 245.
        ring = 2 * (machine.slices - 1) / machine.slices
        received = ring * work.trained_parameters * work.dtype_bytes / (weight_shards(mesh) * mesh.tp)
        dcn_s = received / (chip.dcn_bytes_per_s / chip.devices)
    time = StepTime(
        flops=matmul + attention,
        low_s=max(ideal_s / chip.efficiency_high + hbm_s, interconnect_s, dcn_s),
        high_s=ideal_s / chip.efficiency_low + hbm_s + interconnect_s + dcn_s,
        ideal_s=ideal_s,
        hbm_s=hbm_s,
        interconnect_s=interconnect_s,
        dcn_s=dcn_s,
    )
    if machine.measured_low is None or machine.measured_high is None:
        return time
    return replace(
        time,
        low_s=(ideal_s / machine.measured_high + time.beside_s) / MEASURED_WITHIN,
        high_s=(ideal_s / machine.measured_low + time.beside_s) * MEASURED_WITHIN,
    )


def share_reached(work: StepCost, machine: Machine, mesh: Mesh, step_s: float) -> float | None:
    """The share of the peak that matmuls came to in a step; None where the formula's traffic alone takes as long."""
    time = step_time(work, machine, mesh)
    return time.ideal_s / (step_s - time.beside_s) if step_s > time.beside_s else None


def matmul_flops(work: StepCost) -> float:
    """Of a step, a weight and token: 2 forward, 2 for activations' gradients, 2 for what is trained, 2 recomputed.

    The loss has the head's gradient from the logits at hand.
    """
    again = work.recomputed_parameters / work.layer_matmul_parameters
    each = 6 if work.trained_weights else 4
    base = each * (work.layer_matmul_parameters + work.head_parameters) + 2 * work.recomputed_parameters
    return float(work.tokens * (base + (6 + 2 * again) * work.text_adapters))


def attention_flops(work: StepCost) -> float:
    """Of one step: scores and their product with V forward, twice that backward, what layer and kernel recompute."""
    return _scores_flops(work) * (3.0 + _RECOMPUTED[work.attention] + (1.0 if work.recomputes_attention else 0.0))


def forward_share(work: StepCost) -> float:
    """What a forward pass, such as an evaluation's, has of the FLOPs of a step of as many rows."""
    text = 2.0 * work.tokens * (work.layer_matmul_parameters + work.head_parameters + work.text_adapters)
    forward, step = text + _scores_flops(work), matmul_flops(work) + attention_flops(work)
    if work.images:
        forward += work.rows * replace(work.images, adapters=0).row_flops
        step += work.rows * work.images.row_flops
    return forward / step


def _scores_flops(work: StepCost) -> float:
    """Of all rows, forward."""
    kinds = (work.attention, work.nearby_attention)
    each = forward_attention_flops(work.variant, work.length, *kinds, block=work.query_block, ahead=work.ahead)
    return float(work.rows * each)


def _hbm_bytes(work: StepCost, mesh: Mesh) -> float:
    """On one device: the weights once a pass, each pass's activations in and out of matmul and adapter, AdamW."""
    passes = 3 if work.recomputes else 2
    weights = passes * micro_batches(work, mesh) * work.base_bytes / mesh.tp
    if work.dequantizes:  # written, and read again
        weights += 2 * passes * micro_batches(work, mesh) * work.parameters * work.dtype_bytes / mesh.tp
    tokens = micro_batches(work, mesh) * tokens_per_device(work, mesh)
    numbers = work.all_widths.split / mesh.tp + work.all_widths.whole
    activations = 2 * passes * tokens * numbers * work.dtype_bytes
    updates = OPTIMIZER_PASSES * work.trained_parameters * memory.ADAPTER_BYTES / (weight_shards(mesh) * mesh.tp)
    return weights + activations + _score_bytes(work, mesh) + updates


def _score_bytes(work: StepCost, mesh: Mesh) -> float:
    """On one device: scores that images put into memory, in float32.

    The tower's, and those of sliding layers that no kernel computes: each block's are written and read forward, and
    scores, their gradient and its product with them backward. On a CPU small blocks stay in the cache.
    """
    if work.images is None or work.query_block != OTHER_QUERY_BLOCK:
        return 0.0
    times = micro_batches(work, mesh)
    of_tower = times * memory.images_per_device(work, mesh) / work.images.images * work.images.row_score_bytes
    passes = 4 + work.recomputes_attention
    heads = times * rows_per_device(work, mesh) * work.blocked_sliding_layers * work.variant.heads / mesh.tp
    return of_tower + 2 * passes * 4 * heads * work.sliding_pairs


def _received_bytes(work: StepCost, mesh: Mesh, *, slices: int) -> float:
    """Bytes that one device receives from the others of its slice.

    The gathered weights once forward and once backward, the adapters' gradients, the all-to-all of a row's devices
    around attention, and tp's two sums a layer and direction.
    """
    passes, variant, shards = 3 if work.recomputes else 2, work.variant, weight_shards(mesh)
    replicas = max(1, mesh.replica // slices)
    others, copies = (shards - 1) / shards, 2 * (replicas - 1) / replicas
    adapters = (2 * others + copies / shards) * work.trained_parameters * memory.ADAPTER_BYTES
    gathered = (2 * micro_batches(work, mesh) * others * work.base_bytes + adapters) / mesh.tp
    tokens = micro_batches(work, mesh) * tokens_per_device(work, mesh)
    one_sum = 2 * (mesh.tp - 1) / mesh.tp * tokens * variant.embed_dim * work.dtype_bytes
    # Queries and what they attend to, keys and values.
    heads = sum(
        2 * (variant.heads + variant.kv_heads_of(layer)) * variant.head_dim_of(layer) for layer in range(variant.layers)
    )
    traded = passes * tokens * (mesh.sequence - 1) / mesh.sequence * heads * work.dtype_bytes / mesh.tp
    return gathered + traded + 2 * passes * variant.layers * one_sum
