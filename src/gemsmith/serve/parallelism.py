"""How a model lies on a machine's devices while it is served: what fits, by formula, and why it was taken."""

from collections.abc import Iterator
from dataclasses import dataclass

from gemsmith.arch import Variant
from gemsmith.errors import MachineError
from gemsmith.hardware import Machine
from gemsmith.hardware.model.serving import ServingMemory, serving_memory
from gemsmith.serve.container import Choice
from gemsmith.serve.settings import ServeSettings

UTILISATION = 0.90
"""The share of a device's memory that vLLM may take."""
BATCHED = (8192, 4096)
"""Tokens of a forward pass to try: vLLM's default on large GPUs, and half, which leaves more to keys and values."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a model lies on the devices of a machine."""

    tp: int
    copies: int
    """Servers' workers that have all the weights, each on `tp` devices."""
    weight_dtype: str
    batched_tokens: int
    memory: ServingMemory


def choose_split(machine: Machine, variant: Variant, settings: ServeSettings, length: int) -> Split:
    """Tensor parallel, copies and dtype: bfloat16 where that fits, and kv heads that tp divides where those do.

    Raises MachineError where nothing fits.
    """
    tried = [_split(machine, variant, settings, length, *one) for one in _candidates(machine, variant, settings)]
    limit = UTILISATION * machine.chip.hbm_bytes / machine.chip.devices
    if fitting := next((split for split in tried if split.memory.total <= limit), None):
        return fitting
    if not tried:
        raise MachineError(
            f"--on {machine.name}: its {machine.devices} devices cannot share the {variant.heads} heads of "
            f"{variant.name}"
        )
    least = min(tried, key=lambda split: split.memory.total)
    raise MachineError(
        f"--on {machine.name}: {variant.name} needs {least.memory.total / 1e9:.1f} GB a device with "
        f"{least.weight_dtype} weights and serve.max_model_len {length} (estimated), {limit / 1e9:.1f} may be used; "
        "lower serve.max_model_len, or name a larger machine"
    )


def tensor_parallel_choice(machine: Machine, variant: Variant, split: Split) -> Choice:
    heads = f"{variant.kv_heads} kv heads and {variant.global_kv_heads} global ones of {variant.name}"
    kv = {variant.kv_heads, variant.global_kv_heads}
    if all(number % split.tp == 0 for number in kv):
        why = f"divides the {heads}"
    else:
        held = " and ".join(f"{split.tp // number} hold each of {number}" for number in sorted(kv) if number % split.tp)
        less = "one program has all chips" if machine.chip.kind == "tpu" else "fewer lack memory"
        why = f"of the {heads}: {held}; {less}"
    return Choice(what=f"--tensor-parallel-size {split.tp}", why=why)


def memory_choice(machine: Machine, split: Split) -> Choice:
    memory, limit = split.memory, UTILISATION * machine.chip.hbm_bytes / machine.chip.devices
    parts = ", ".join(
        f"{name} {size / 1e9:.1f}"
        for name, size in (
            (f"{split.weight_dtype} weights", memory.weights),
            ("one sequence's keys and values", memory.kv_cache),
            ("a forward pass", memory.workspace),
        )
    )
    return Choice(what="memory", why=f"GB a device, estimated: {parts}; of {limit / 1e9:.1f} that vLLM may use")


def _candidates(machine: Machine, variant: Variant, settings: ServeSettings) -> Iterator[tuple[int, str, int]]:
    """Tensor parallel, dtype of weights and tokens of a forward pass; what is best comes first."""
    kv = (variant.kv_heads, variant.global_kv_heads)
    shared = [tp for tp in range(machine.devices, 0, -1) if machine.devices % tp == 0 and variant.heads % tp == 0]
    shared = [tp for tp in shared if all(heads % tp == 0 or tp % heads == 0 for heads in kv)]
    if machine.chip.kind == "tpu":
        sizes = shared[:1]  # one program over all chips of a slice
    else:
        # A second copy of the weights serves more than a kv head that two GPUs hold, where there is room for it.
        splitting = [tp for tp in shared if all(heads % tp == 0 for heads in kv)]
        sizes = splitting + sorted(set(shared) - set(splitting))
    for dtype in ("float32",) if settings.dtype == "float32" else ("bfloat16", "fp8"):
        for tp in sizes:
            for batched in BATCHED:
                yield tp, dtype, batched


def _split(
    machine: Machine, variant: Variant, settings: ServeSettings, length: int, tp: int, dtype: str, batched: int
) -> Split:
    kv_dtype = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else settings.dtype
    memory = serving_memory(
        variant,
        tp=tp,
        max_model_len=length,
        weight_dtype=dtype,
        kv_dtype=kv_dtype,
        batched_tokens=batched,
        # No switch is known to leave the encoder out on a TPU.
        images=settings.images or machine.chip.kind == "tpu",
    )
    return Split(tp=tp, copies=machine.devices // tp, weight_dtype=dtype, batched_tokens=batched, memory=memory)
