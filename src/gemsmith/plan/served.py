"""What load tests measured on a machine say of serving there: shares of the roofline that its formulas are of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsmith.bench_records import BenchCell, BenchRecord
from gemsmith.errors import RunError
from gemsmith.hardware import Machine
from gemsmith.plan.serving import least_s
from gemsmith.recipe import Recipe
from gemsmith.resolve import recipe_variant
from gemsmith.sizing.generation import Served, decode_step, prefill

STREAMED_MS = 0.1
"""A TPOT below says that answers came in one piece, so that TTFT is the time of the whole request."""
ALONE = 2.0
"""Requests under way, on average, up to which a TTFT is that of a prompt by itself."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Those of one load test's cells."""

    decode: tuple[float, ...]
    prefill: tuple[float, ...]


def read_served(recipe: Recipe, bench: BenchRecord, machine: Machine) -> Served:
    """The model as the load test's server had it on its devices."""
    facts = bench.server
    dtype = (facts.dtype if facts and facts.dtype else recipe.serve.dtype).removeprefix("torch.")
    quantised = bool(facts and facts.quantization not in (None, "none"))
    kv_dtype = facts.kv_cache_dtype if facts and facts.kv_cache_dtype not in (None, "auto") else dtype
    return Served(
        variant=recipe_variant(recipe),
        machine=machine,
        tp=(facts.tensor_parallel if facts else None) or 1,
        weight_dtype="fp8" if quantised else dtype,
        kv_dtype="fp8" if str(kv_dtype).startswith("fp8") else str(kv_dtype),
    )


def shares_reached(served: Served, cells: Sequence[BenchCell], *, copies: int = 1) -> Shares:
    """What share of the roofline prompts and decode steps came to in each cell that tells.

    A prompt alone takes the TTFT of loads with at most ALONE requests under way. A request takes requests * prefill +
    output_tokens * decode_step, as plans have it, so that its latency tells decode_step where the prompt's is known.
    Requests under way are their latencies over the cell's time.
    """
    told = [
        cell
        for cell in cells
        if cell.completed and not cell.probe and cell.e2e_ms is not None and cell.tpot_ms.p50 >= STREAMED_MS
    ]
    alone = {
        cell.input_tokens: cell.ttft_ms.p50 / 1000
        for cell in sorted(told, key=under_way, reverse=True)
        if under_way(cell) / copies <= ALONE
    }
    decodes = []
    for cell in told:
        requests, prompt_s = max(1.0, under_way(cell) / copies), alone.get(cell.input_tokens)
        if prompt_s is None or cell.e2e_ms is None:
            continue
        step_s = (cell.e2e_ms.mean / 1000 - requests * prompt_s) / cell.output_tokens
        if step_s > 0:
            context = cell.input_tokens + cell.output_tokens / 2
            decodes.append(least_s(decode_step(served, requests=requests, context=context)) / step_s)
    return Shares(
        decode=tuple(decodes),
        prefill=tuple(least_s(prefill(served, tokens)) / seconds for tokens, seconds in sorted(alone.items())),
    )


def read_shares(folder: Path, recipe: Recipe, bench: BenchRecord, machine: Machine) -> Shares:
    """The same of a run's load test. Raises RunError where it says too little, or more than the machine can."""
    served = read_served(recipe, bench, machine)
    found = shares_reached(served, bench.cells, copies=(bench.server.data_parallel if bench.server else None) or 1)
    if not found.decode or not found.prefill:
        raise RunError(
            f"--calibrate {folder}: bench.json has no load with at most {ALONE:g} requests under way, which tells what "
            "a prompt takes alone; add a low rate to bench.request_rates and run: gemsmith bench --force"
        )
    if machine.chip.kind != "cpu" and max(*found.decode, *found.prefill) > 1:
        raise RunError(
            f"--calibrate {folder}: bench.json has a step shorter than {machine.name} can make by its row in the "
            "catalogue; give its chip a higher flops_per_s or hbm_bytes_per_s in hardware.catalogue"
        )
    return found


def under_way(cell: BenchCell) -> float:
    """Requests on average: all their latencies over the time (Little 1961)."""
    return cell.completed * cell.e2e_ms.mean / 1000 / cell.duration_s if cell.e2e_ms and cell.duration_s else 0.0
