"""How a model lies on a machine's devices while it is served: what fits, by formula, and why it was taken."""

from collections.abc import Iterator
from dataclasses import dataclass

from gemsmith.arch import Variant
from gemsmith.errors import MachineError
from gemsmith.hardware import Machine
from gemsmith.hardware.model.limits import allowed_tp
from gemsmith.hardware.model.serving import ServingMemory, serving_memory
from gemsmith.serve.settings import ServeSettings

UTILISATION = 0.90  # the share of a device's memory that vLLM may take
BATCHED = (8192, 4096)
"""Tokens of a forward pass to try: vLLM's default on large GPUs, and half, which leaves more to keys and values."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    tp: int
    copies: int  # servers' workers that have all the weights, each on `tp` devices
    weight_dtype: str
    batched_tokens: int
    memory: ServingMemory


def choose_layout(machine: Machine, variant: Variant, settings: ServeSettings, length: int) -> Layout:
    """The best layout that fits, bfloat16 before fp8. Raises MachineError where none does."""
    kv_dtype = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else settings.dtype
    limit = UTILISATION * machine.chip.hbm_bytes / machine.chip.devices
    tried = []
    for tp, dtype, batched in _candidates(machine, variant, settings):
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
        copies = machine.devices // tp
        layout = Layout(tp=tp, copies=copies, weight_dtype=dtype, batched_tokens=batched, memory=memory)
        if memory.total <= limit:
            return layout
        tried.append(layout)
    if not tried:
        raise MachineError(
            f"--machine {machine.name}: its {machine.devices} devices cannot share the {variant.heads} heads of "
            f"{variant.name}"
        )
    least = min(tried, key=lambda layout: layout.memory.total)
    raise MachineError(
        f"--machine {machine.name}: {variant.name} needs {least.memory.total / 1e9:.1f} GB a device with "
        f"{least.weight_dtype} weights and serve.max_model_len {length} (estimated), {limit / 1e9:.1f} may be used; "
        "lower serve.max_model_len, or name a larger machine"
    )


def tensor_parallel_reason(machine: Machine, variant: Variant, layout: Layout) -> str:
    heads = f"{variant.kv_heads} kv heads and {variant.global_kv_heads} global ones of {variant.name}"
    kv = {variant.kv_heads, variant.global_kv_heads}
    if all(number % layout.tp == 0 for number in kv):
        return f"divides the {heads}"
    held = " and ".join(f"{layout.tp // number} hold each of {number}" for number in sorted(kv) if number % layout.tp)
    less = "one program has all chips" if machine.chip.kind == "tpu" else "fewer lack memory"
    return f"of the {heads}: {held}; {less}"


def memory_reason(machine: Machine, layout: Layout) -> str:
    memory, limit = layout.memory, UTILISATION * machine.chip.hbm_bytes / machine.chip.devices
    return (
        f"GB a device, estimated: {layout.weight_dtype} weights {memory.weights / 1e9:.1f}, one sequence's keys and "
        f"values {memory.kv_cache / 1e9:.1f}, a forward pass {memory.workspace / 1e9:.1f}; of {limit / 1e9:.1f} that "
        "vLLM may use"
    )


def _candidates(machine: Machine, variant: Variant, settings: ServeSettings) -> Iterator[tuple[int, str, int]]:
    """Tensor parallel, dtype of weights and tokens of a forward pass; what is best comes first."""
    shared = [tp for tp in reversed(allowed_tp(variant)) if machine.devices % tp == 0]
    if machine.chip.kind == "tpu":
        sizes = shared[:1]  # one program over all chips of a slice
    else:
        # A second copy of the weights serves more than a kv head that two GPUs hold, where there is room for it.
        kv = (variant.kv_heads, variant.global_kv_heads)
        splitting = [tp for tp in shared if all(heads % tp == 0 for heads in kv)]
        sizes = splitting + sorted(set(shared) - set(splitting))
    for dtype in ("float32",) if settings.dtype == "float32" else ("bfloat16", "fp8"):
        for tp in sizes:
            for batched in BATCHED:
                yield tp, dtype, batched
