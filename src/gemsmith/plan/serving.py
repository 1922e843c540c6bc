"""What serving the tuned model takes on a machine by formula: what fits, how fast it is at most load, what it costs."""

from gemsmith.errors import MachineError
from gemsmith.hardware import Machine
from gemsmith.plan.cost import on_demand, rounded
from gemsmith.plan_records import ServingPlan
from gemsmith.recipe import Recipe
from gemsmith.records import Range
from gemsmith.serve.engine import ServeSettings
from gemsmith.serve.split import UTILISATION, Split, choose_split
from gemsmith.sizing.generation import Roofline, Served, decode_step, prefill
from gemsmith.sizing.serving import kv_bytes
from gemsmith.zoo import Variant

MOST_REQUESTS = 256
"""Requests that vLLM takes into a batch at once, unless told otherwise (max_num_seqs)."""
DECODE_SHARE = {"tpu": (0.25, 0.6), "gpu": (0.5, 0.8)}
"""Of the roofline, that a decode step reaches: TPOTs of arXiv 2605.25645 for Gemma 4 31B come to 0.26 to 0.59 on v6e-8
and 0.52 to 0.66 on 2xH100, and 24 requests at 548 output tokens/s on an RTX PRO 6000 to at least 0.6."""


def plan_serving(recipe: Recipe, variant: Variant, machine: Machine) -> list[ServingPlan]:
    """A row for each length of prompts in bench.input_tokens; none for CPUs, and for several hosts.

    One server does not span hosts, and of CPUs no speed is known.
    """
    if machine.chip.kind not in DECODE_SHARE or machine.hosts > 1:
        return []
    lengths = [(tokens, recipe.bench.output_tokens) for tokens in recipe.bench.input_tokens]
    return [plan_lengths(recipe, variant, machine, *each) for each in lengths]


def plan_lengths(
    recipe: Recipe, variant: Variant, machine: Machine, input_tokens: int, output_tokens: int
) -> ServingPlan:
    """Of prompts and answers of such lengths, with as many requests at once as there is room for."""
    serve, context = recipe.serve, input_tokens + output_tokens
    settings = ServeSettings(dtype=serve.dtype, kv_cache_dtype=serve.kv_cache_dtype, pictures=serve.pictures)
    try:
        split = choose_split(machine, variant, settings, max(context, serve.max_model_len or 0))
    except MachineError as error:
        return ServingPlan(
            machine=machine.name, input_tokens=input_tokens, output_tokens=output_tokens, fits=False, why=str(error)
        )
    kv_dtype = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else settings.dtype
    served = Served(variant=variant, machine=machine, tp=split.tp, weight_dtype=split.weight_dtype, kv_dtype=kv_dtype)
    one = kv_bytes(variant, split.tp, kv_dtype, context)
    room = _room_bytes(machine, split)
    each = max(1, min(int(room / one), MOST_REQUESTS))
    speed = output_tokens_per_s(served, requests=each, input_tokens=input_tokens, output_tokens=output_tokens)
    together = (speed[0] * split.copies, speed[1] * split.copies)
    price = on_demand(machine)
    dollars = None if price is None or price.usd_per_hour is None else price.usd_per_hour / 3600 * 1e6
    chip = machine.chip
    return ServingPlan(
        machine=machine.name,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        fits=True,
        weight_dtype=split.weight_dtype,
        tensor_parallel=split.tp,
        copies=split.copies,
        weights_bytes_per_chip=round(split.memory.weights * chip.devices),
        kv_room_bytes_per_chip=round(room * chip.devices),
        kv_bytes_per_request=round(one * chip.devices),
        requests=each * split.copies,
        prefill_s=_rounded(prefill_s(served, input_tokens)),
        decode_step_s=_rounded(decode_s(served, requests=each, context=input_tokens + output_tokens / 2)),
        output_tokens_per_s=_rounded(together),
        usd_per_million_tokens=None if dollars is None else _rounded((dollars / together[1], dollars / together[0])),
    )


def output_tokens_per_s(served: Served, *, requests: float, input_tokens: int, output_tokens: int) -> Range:
    """Of one copy whose batch stays full: while a request is answered, every other's prompt is once prefilled."""
    steps = decode_s(served, requests=requests, context=input_tokens + output_tokens / 2)
    prompts = prefill_s(served, input_tokens)
    slow, fast = (requests * output_tokens / (output_tokens * steps[end] + requests * prompts[end]) for end in (1, 0))
    return slow, fast


def decode_s(served: Served, *, requests: float, context: float) -> Range:
    """A token for each request: DECODE_SHARE of the roofline."""
    roofline = decode_step(served, requests=requests, context=context)
    low, high = DECODE_SHARE[served.machine.chip.kind]
    least = max(roofline.hbm_s, roofline.matmul_s)
    return max(least, roofline.interconnect_s) / high, (least + roofline.interconnect_s) / low


def prefill_s(served: Served, tokens: int) -> Range:
    """A prompt alone, matmuls at what training is taken to reach."""
    roofline, chip = prefill(served, tokens), served.machine.chip
    return (
        max(roofline.matmul_s / chip.efficiency_high, roofline.hbm_s, roofline.interconnect_s),
        _slowest(roofline, chip.efficiency_low),
    )


def _slowest(roofline: Roofline, share: float) -> float:
    return max(roofline.matmul_s / share, roofline.hbm_s) + roofline.interconnect_s


def _room_bytes(machine: Machine, split: Split) -> float:
    """For keys and values on one device, beside the weights and one forward pass."""
    limit = UTILISATION * machine.chip.hbm_bytes / machine.chip.devices
    return limit - split.memory.weights - split.memory.workspace


def _rounded(values: Range) -> Range:
    return rounded(values[0]), rounded(values[1])
