"""Bytes that one device needs at the peak of a training step, by formula.

Against the peaks that XLA gives for the 31B, LoRA rank 64 (jax 0.10.2, libtpu 0.0.42.1, compiled without a device, GiB a chip):

    machine, mesh, rows x length, attention           XLA   formula
    v5p-8  tp 4            1 x 4096  dense           19.8
"""

from dataclasses import asdict, dataclass

from gemsmith.plan.work import Work
from gemsmith.recipe import Mesh

ADAPTER_BYTES = 4
"""Adapters, their gradients and both moments are float32."""
LOGIT_CHUNK = 512
"""Tokens whose logits are held at once."""
SCORE_BUFFERS = 3
"""Of dense attention, in float32: scores, probabilities, and the gradient of one of them."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device, by what they are for."""

    base: float
    adapters: float
    """With gradients and both moments."""
    kept: float
    """Activations kept from the forward to the backward pass."""
    workspace: float
    """The larger of one layer's backward pass and the head, each with the weights gathered for it."""

    @property
    def total(self) -> int:
        return int(sum(asdict(self).values()))


def memory_of(work: Work, mesh: Mesh) -> Memory:
    """What one device of the mesh holds at the peak of a step."""
    devices = mesh.fsdp * mesh.tp
    return Memory(
        base=work.parameters * work.dtype_bytes / devices,
        adapters=work.trained_parameters * ADAPTER_BYTES * 4 / devices,
        kept=_kept(work, mesh),
        workspace=max(_layer_workspace(work, mesh), _head_workspace(work, mesh)),
    )


def rows_per_device(work: Work, mesh: Mesh) -> int:
    """Rows that the fullest of the fsdp devices gets."""
    return -(-work.rows // mesh.fsdp)


def _kept(work: Work, mesh: Mesh) -> float:
    """With remat each layer's input; without it everything that its backward pass reads."""
    tokens = rows_per_device(work, mesh) * work.length
    variant = work.variant
    numbers: float = variant.layers * (variant.hidden + variant.per_layer_input)
    if work.remat == "none":
        numbers += sum(width.split / mesh.tp + width.whole for width in work.widths)
    kept = tokens * numbers * work.dtype_bytes
    if work.remat == "none":
        kept += sum(_scores(work, mesh) for _ in range(variant.layers))
    return kept


def _layer_workspace(work: Work, mesh: Mesh) -> float:
    """One layer computed again and walked back, and under fsdp its gathered weights beside those of the next one."""
    tokens = rows_per_device(work, mesh) * work.length
    widest = max(width.split / mesh.tp + width.whole for width in work.widths)
    gathered = 2 * work.largest_layer_parameters * work.dtype_bytes / mesh.tp if mesh.fsdp > 1 else 0.0
    return tokens * widest * work.dtype_bytes + _scores(work, mesh) + gathered


def _head_workspace(work: Work, mesh: Mesh) -> float:
    """A chunk's logits and their gradient in float32, and under fsdp the gathered head."""
    logits = 2 * min(LOGIT_CHUNK, work.tokens) * work.variant.vocabulary * 4 / mesh.tp
    gathered = work.head_parameters * work.dtype_bytes / mesh.tp if mesh.fsdp > 1 else 0.0
    return logits + gathered


def _scores(work: Work, mesh: Mesh) -> float:
    if work.attention == "flash":
        return 0.0
    heads = work.variant.heads / mesh.tp
    return SCORE_BUFFERS * rows_per_device(work, mesh) * heads * work.length**2 * 4
