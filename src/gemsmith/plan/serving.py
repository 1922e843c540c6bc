"""Serving the tuned model on a machine by formula: what fits, how fast it is at full load, and what it costs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemsmith.arch import Variant
from gemsmith.errors import MachineError, RunError
from gemsmith.hardware import Machine
from gemsmith.hardware.model import ImageWork, images_of
from gemsmith.hardware.model.serving import Roofline, Served, decode_step, kv_bytes, prefill, serving_memory
from gemsmith.hardware.model.step_time import MEASURED_WITHIN
from gemsmith.plan.cost import LOAD_BYTES_PER_S, on_demand, rounded_range
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.bench_records import BenchCell, BenchRecord
from gemsmith.runs.plan_records import ServingPlan
from gemsmith.runs.records import Range, ServerFacts
from gemsmith.runs.resolve import recipe_variant
from gemsmith.serve.command import UTILIZATION, Layout, choose_layout
from gemsmith.serve.settings import settings_of
from gemsmith.serve.vllm_checks import tpu_warnings
from gemsmith.serve.vllm_issues import CPU_KV_BYTES
from gemsmith.system.format import rough, span

MOST_REQUESTS = 256  # requests that vLLM takes into a batch at once, unless told otherwise (max_num_seqs)
DECODE_SHARE = {"tpu": (0.25, 0.6), "gpu": (0.5, 0.97)}
"""Of the roofline, that a decode step reaches: TPOTs of arXiv 2605.25645 for Gemma 4 31B come to 0.26 to 0.59 on v6e-8
and 0.52 to 0.66 on 2xH100; on an RTX PRO 6000 one stream at 24.1 tokens/s comes to 0.94, and 494 tokens/s of as many
requests as fit to 0.97 (CARD)."""
PREFILL_SHARE = {"gpu": 0.8}
"""Of the peak, that a prompt's matmuls reach at best, where that is more than training's: 6,352 tokens/s of a prompt of
1,024 on an RTX PRO 6000 are 0.76 (CARD: huggingface.co/LilaRest/gemma-4-31B-it-NVFP4-turbo, its column of the 31B in
bfloat16, read 2026-11-23). benchmarks/records/plan_accuracy.json has the ranges beside all that was published."""
STREAMED_MS = 0.1  # a TPOT below says that answers came in one piece, so that TTFT is the time of the whole request
ALONE = 2.0  # requests under way, on average, up to which a TTFT is that of a prompt by itself
WEIGHT_BYTES_PER_S = {"mount": (LOAD_BYTES_PER_S[0], 52e6), "stream": (6.7e9, 0.8e9)}
"""From a bucket to the chips, at best and at worst, by --load of `gemsmith launch`. These, and the seconds below, are
published or assumed: docs/how-to/plan.md has each source (read 2026-11-26)."""
IMAGE_S = {"cloud-run": (6.0, 20.0), "node": (10.0, 120.0)}
WARM_UP_S = {"tpu": (480.0, 600.0), "gpu": (40.0, 180.0), "cpu": (31.0, 92.0)}
Shares = dict[str, tuple[float, ...]]  # of the roofline, by decode and prefill: those of one load test's cells


def plan_serving(recipe: Recipe, variant: Variant, machine: Machine, in_prompt: int = 0) -> list[ServingPlan]:
    """A row for each length of prompts and answers of the bench's grid; none for several hosts.

    With bench.images each prompt has `in_prompt` images, at least one, of data.image_tokens. One server does not
    span hosts. Of a CPU no speed is known but what load tests measured on it: else it has no row.
    """
    if machine.hosts > 1 or (machine.chip.kind not in DECODE_SHARE and machine.served_decode_low is None):
        return []
    loads = {(load.input_tokens, load.output_tokens): load.max_concurrency for load in recipe.bench.plan.loads}
    images = max(1, in_prompt) if recipe.bench.images and variant.vision is not None else 0
    return [plan_lengths(recipe, variant, machine, *each, images=images, most=most) for each, most in loads.items()]


def plan_lengths(
    recipe: Recipe,
    variant: Variant,
    machine: Machine,
    input_tokens: int,
    output_tokens: int,
    *,
    images: int = 0,
    most: int | None = None,
) -> ServingPlan:
    """Of prompts and answers of such lengths, with as many requests at once as there is room for, `most` if given."""
    input_tokens = max(input_tokens, images * recipe.data.image_tokens)
    asked: dict[str, Any] = {"machine": machine.name, "input_tokens": input_tokens, "output_tokens": output_tokens}
    serve, context = recipe.serve, input_tokens + output_tokens
    settings = settings_of(recipe, images=serve.images or images > 0)
    try:
        layout = choose_layout(machine, variant, settings, max(context, serve.max_model_len or 0))
    except MachineError as error:
        return ServingPlan(**asked, images=images, fits=False, why=str(error))
    warnings = tpu_warnings(machine, variant, settings, layout.weight_dtype, in_image=True, place="folder")
    kv_dtype = settings.kv_cache_dtype if settings.kv_cache_dtype != "auto" else settings.dtype
    served = Served(variant=variant, machine=machine, tp=layout.tp, weight_dtype=layout.weight_dtype, kv_dtype=kv_dtype)
    prompt_images = None
    if images:  # which are only walked forward
        whole = images_of(recipe, variant, images=images, soft_tokens=recipe.data.image_tokens)
        prompt_images = replace(whole, adapters=0)
    return ServingPlan(
        **asked,
        images=images,
        fits=True,
        warnings=tuple(warning.why for warning in warnings),
        measured=f"{machine.served_source}, {machine.served_date}" if machine.served_source else None,
        weight_dtype=layout.weight_dtype,
        tensor_parallel=layout.tp,
        copies=layout.copies,
        cold_start_s={load: cold_start_s(machine, variant, load) for load in WEIGHT_BYTES_PER_S},
        **_full_load(served, layout, input_tokens, output_tokens, prompt_images, most),
    )


def cold_start_s(machine: Machine, variant: Variant, load: str) -> dict[str, Range]:
    """Seconds from no server to its first answer, by what takes them; estimated."""
    weights = serving_memory(variant, tp=1, max_model_len=1, weight_dtype="bfloat16").weights
    best, worst = WEIGHT_BYTES_PER_S[load]
    return {
        "image": IMAGE_S["cloud-run" if machine.name.startswith("cloud-run") else "node"],
        "weights": rounded_range((weights / best, weights / worst)),
        "warm-up": WARM_UP_S[machine.chip.kind],
    }


def describe_cold_start(parts: dict[str, Range]) -> str:
    """Its whole and its parts in words.

    >>> describe_cold_start({"image": (6, 20), "weights": (60, 1200)}).replace(chr(160), " ")
    '66 s – 20 min: image 6.0–20 s, weights 60 s – 20 min'
    """
    low, high = map(sum, zip(*parts.values(), strict=True))
    each = [f"{name} {span(rough(least), rough(most))}" for name, (least, most) in parts.items()]
    return f"{span(rough(low), rough(high))}: {', '.join(each)}"


def _full_load(
    served: Served, layout: Layout, input_tokens: int, output_tokens: int, images: ImageWork | None, most: int | None
) -> dict[str, Any]:
    """Memory, times and dollars with as many requests at once as there is room for: fields of ServingPlan."""
    variant, machine, chip = served.variant, served.machine, served.machine.chip
    kv_per_request = kv_bytes(variant, served.tp, served.kv_dtype, input_tokens + output_tokens)
    kv_room: float = CPU_KV_BYTES
    if chip.kind != "cpu":
        kv_room = UTILIZATION * chip.hbm_bytes / chip.devices - layout.memory.weights - layout.memory.workspace
    copies = min(layout.copies, most or layout.copies)  # that have something to do
    requests = max(1, min(int(kv_room / kv_per_request), MOST_REQUESTS, (most or MOST_REQUESTS * copies) // copies))
    low, high = output_tokens_per_s(
        served, requests=requests, input_tokens=input_tokens, output_tokens=output_tokens, images=images
    )
    low, high = low * copies, high * copies
    price = on_demand(machine)
    usd = None if price is None or price.usd_per_hour is None else price.usd_per_hour / 3600 * 1e6
    return {
        "weights_bytes_per_chip": round(layout.memory.weights * chip.devices),
        "kv_room_bytes_per_chip": round(kv_room * chip.devices),
        "kv_bytes_per_request": round(kv_per_request * chip.devices),
        "requests": requests * copies,
        "prefill_s": rounded_range(prefill_s(served, input_tokens, images)),
        "decode_step_s": rounded_range(decode_s(served, requests=requests, context=input_tokens + output_tokens / 2)),
        "output_tokens_per_s": rounded_range((low, high)),
        "usd_per_million_tokens": None if usd is None else rounded_range((usd / high, usd / low)),
    }


def output_tokens_per_s(
    served: Served, *, requests: float, input_tokens: int, output_tokens: int, images: ImageWork | None = None
) -> Range:
    """Of one copy whose batch stays full: while a request is answered, every other's prompt is once prefilled.

    At best, on a GPU of which no load test is known, beside the decode steps: these wait for memory, matmuls do not.
    """
    steps = decode_s(served, requests=requests, context=input_tokens + output_tokens / 2)
    prompts = prefill_s(served, input_tokens, images)
    decodes, prefills = ([count * one for one in each] for count, each in ((output_tokens, steps), (requests, prompts)))
    hidden = requests > 1 and served.machine.chip.kind == "gpu" and served.machine.served_decode_low is None
    least = max(decodes[0], prefills[0]) if hidden else decodes[0] + prefills[0]
    return requests * output_tokens / (decodes[1] + prefills[1]), requests * output_tokens / least


def decode_s(served: Served, *, requests: float, context: float) -> Range:
    """A token for each request: DECODE_SHARE of the roofline, or what load tests on the machine measured."""
    roofline, machine = decode_step(served, requests=requests, context=context), served.machine
    if machine.served_decode_low is not None and machine.served_decode_high is not None:
        return _measured(roofline, machine.served_decode_low, machine.served_decode_high)
    low, high = DECODE_SHARE[machine.chip.kind]
    return max(roofline.hbm_s, roofline.matmul_s, roofline.interconnect_s) / high, least_s(roofline) / low


def prefill_s(served: Served, tokens: int, images: ImageWork | None = None) -> Range:
    """A prompt alone with its images, matmuls as training's and up to PREFILL_SHARE, or as load tests measured."""
    roofline, machine, chip = prefill(served, tokens, images), served.machine, served.machine.chip
    if machine.served_prefill_low is not None and machine.served_prefill_high is not None:
        return _measured(roofline, machine.served_prefill_low, machine.served_prefill_high)
    least_matmul_s = roofline.matmul_s / max(chip.efficiency_high, PREFILL_SHARE.get(chip.kind, 0))
    high_s = max(roofline.matmul_s / chip.efficiency_low, roofline.hbm_s) + roofline.interconnect_s
    return max(least_matmul_s, roofline.hbm_s, roofline.interconnect_s), high_s


def least_s(roofline: Roofline) -> float:
    """The seconds that a share of the roofline is of: nothing but what devices send each other is added."""
    return max(roofline.hbm_s, roofline.matmul_s) + roofline.interconnect_s


def _measured(roofline: Roofline, low: float, high: float) -> Range:
    """MEASURED_WITHIN around the shares of the roofline that were measured."""
    return least_s(roofline) / high / MEASURED_WITHIN, least_s(roofline) / low * MEASURED_WITHIN


def roofline_utilization(served: Served, cells: Sequence[BenchCell], *, copies: int = 1) -> Shares:
    """What share of the roofline prompts and decode steps came to in each cell that tells.

    A prompt alone takes the TTFT of loads with at most ALONE requests under way. A request takes requests * prefill +
    output_tokens * decode_step, as plans have it, so that its latency tells decode_step where the prompt's is known.
    Requests under way are their latencies over the cell's time.
    """
    told = [cell for cell in cells if cell.completed and not cell.probe and cell.tpot_ms.p50 >= STREAMED_MS]
    alone = {
        cell.input_tokens: cell.ttft_ms.p50 / 1000
        for cell in sorted(told, key=under_way, reverse=True)
        if under_way(cell) / copies <= ALONE
    }
    decodes = []
    for cell in told:
        requests, prompt_s = max(1.0, under_way(cell) / copies), alone.get(cell.input_tokens)
        if prompt_s is None:
            continue
        step_s = (cell.e2e_ms.mean / 1000 - requests * prompt_s) / cell.output_tokens
        if step_s > 0:
            context = cell.input_tokens + cell.output_tokens / 2
            decodes.append(least_s(decode_step(served, requests=requests, context=context)) / step_s)
    prefills = (least_s(prefill(served, tokens)) / seconds for tokens, seconds in sorted(alone.items()))
    return {"decode": tuple(decodes), "prefill": tuple(prefills)}


def read_shares(folder: Path, recipe: Recipe, bench: BenchRecord, machine: Machine) -> Shares:
    """The same of a run's load test. Raises RunError where it says too little, or more than the machine can."""
    facts = bench.server or ServerFacts()
    dtype = (facts.dtype or recipe.serve.dtype).removeprefix("torch.")
    kv_dtype = dtype if facts.kv_cache_dtype in (None, "auto") else str(facts.kv_cache_dtype)
    served = Served(
        variant=recipe_variant(recipe),
        machine=machine,
        tp=facts.tensor_parallel or 1,
        weight_dtype="fp8" if facts.quantization not in (None, "none") else dtype,
        kv_dtype="fp8" if kv_dtype.startswith("fp8") else kv_dtype,
    )
    found = roofline_utilization(served, bench.cells, copies=facts.data_parallel or 1)
    if not all(found.values()):
        raise RunError(
            f"--calibrate {folder}: bench.json has no load with at most {ALONE:g} requests under way, which tells what "
            "a prompt takes alone; add a low rate to bench.request_rates and run: gemsmith bench --force"
        )
    if machine.chip.kind != "cpu" and max(map(max, found.values())) > 1:
        raise RunError(
            f"--calibrate {folder}: bench.json has a step shorter than {machine.name} can make by its row in the "
            "catalog; give its chip a higher flops_per_s or hbm_bytes_per_s in hardware.catalog"
        )
    return found


def under_way(cell: BenchCell) -> float:
    """Requests on average: all their latencies over the time (Little 1961)."""
    return cell.completed * cell.e2e_ms.mean / 1000 / cell.duration_s if cell.duration_s else 0.0
