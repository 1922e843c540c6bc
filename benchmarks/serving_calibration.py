"""Writes how well serving plans that are calibrated by load tests predict other loads and models on this machine, to
benchmarks/records/serving_calibration.json.

    python benchmarks/serving_calibration.py

Needs the serving environment, as gemsmith serve does. vLLM serves three models of random weights one after the other,
each under four loads. Plans are calibrated on the loads of some and asked for the output tokens/s of the others.
"""

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemsmith import __version__
from gemsmith.arch import Variant
from gemsmith.bench.sweep import run_sweep
from gemsmith.hardware import Machine, load_catalog
from gemsmith.hardware.model.serving import Served
from gemsmith.plan.serving import Shares, output_tokens_per_s, roofline_utilization, under_way
from gemsmith.recipe.serving import Bench
from gemsmith.runs.bench_records import BenchCell
from gemsmith.runs.run import host_info, start_clock
from gemsmith.serve.client.endpoint import endpoint_of
from gemsmith.serve.server import running_server
from gemsmith.serve.settings import ServeSettings, find_vllm
from plan_calibration import VARIANTS
from short import RECORDS, SHORT
from tiny_checkpoints import make_checkpoint

RECORD = RECORDS / "serving_calibration.json"
MODELS = ("22 M",) if SHORT else ("9 M", "22 M", "84 M")
INPUTS, OUTPUT, AT_ONCE, PROMPTS = (64, 256), 32, (1, 8), 24
# Calibrated on the loads of these, or on those of one length of prompts alone.
CALIBRATED_ON = () if SHORT else (("9 M", "84 M"), ("9 M",), ("22 M",), ("84 M",))


def measure(name: str, folder: Path) -> list[BenchCell]:
    """Each length of prompts with each number of requests at once."""
    checkpoint = make_checkpoint(VARIANTS[name], folder / "model", dtype="float32", shards=1)
    settings, cells = ServeSettings(max_model_len=352, dtype="float32"), list[BenchCell]()
    with running_server(checkpoint, name="m", settings=settings, log=folder / "vllm.log") as server:
        endpoint = endpoint_of(server, weights_sha256="")
        for at_once in AT_ONCE:
            bench = Bench(
                input_tokens=INPUTS,
                output_tokens=OUTPUT,
                request_rates=("burst",),
                max_concurrency=at_once,
                prompts=PROMPTS,
            )
            cells += run_sweep(endpoint, find_vllm(), bench, seed=0, folder=folder / f"bench-{at_once}")["cells"]
    return cells


def served_on(machine: Machine, variant: Variant) -> Served:
    return Served(variant=variant, machine=machine, tp=1, weight_dtype="float32", kv_dtype="float32")


def calibrated(machine: Machine, shares: Sequence[Shares]) -> Machine:
    """The machine as its row is after `gemsmith plan --calibrate` with these load tests."""
    decode, prefill = ([share for each in shares for share in each[name]] for name in ("decode", "prefill"))
    return replace(
        machine,
        served_decode_low=min(decode),
        served_decode_high=max(decode),
        served_prefill_low=min(prefill),
        served_prefill_high=max(prefill),
    )


def predictions(machine: Machine, cells: Mapping[str, Sequence[BenchCell]]) -> Iterator[dict[str, Any]]:
    """Every model's loads by plans that were calibrated on others', and each length by plans from the other length."""
    reached = {name: roofline_utilization(served_on(machine, VARIANTS[name]), found) for name, found in cells.items()}
    for on in CALIBRATED_ON:
        plan = calibrated(machine, [reached[name] for name in on])
        for name in MODELS:
            if name not in on:
                yield from _judge(" and ".join(on), name, plan, cells[name])
    for name, found in cells.items():
        for tokens in INPUTS:
            known = [cell for cell in found if cell.input_tokens == tokens]
            plan = calibrated(machine, [roofline_utilization(served_on(machine, VARIANTS[name]), known)])
            others = [cell for cell in found if cell.input_tokens != tokens]
            yield from _judge(f"{name}, prompts of {tokens} alone", name, plan, others)


def _judge(on: str, name: str, plan: Machine, cells: Sequence[BenchCell]) -> Iterator[dict[str, Any]]:
    for cell in cells:
        low, high = output_tokens_per_s(
            served_on(plan, VARIANTS[name]),
            requests=max(1.0, under_way(cell)),
            input_tokens=cell.input_tokens,
            output_tokens=cell.output_tokens,
        )
        yield {
            "calibrated_on": on,
            "model": name,
            "input_tokens": cell.input_tokens,
            "at_once": cell.max_concurrency,
            "planned_output_tokens_per_s": [round(low, 1), round(high, 1)],
            "measured_output_tokens_per_s": cell.output_tokens_per_s,
            "within": low <= cell.output_tokens_per_s <= high,
            "middle_over_measured": round(math.sqrt(low * high) / cell.output_tokens_per_s, 3),
        }


def main() -> None:
    clock, engine = start_clock(), find_vllm()
    cells: dict[str, list[BenchCell]] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            cells[name] = measure(name, Path(folder))
    machine = load_catalog().machines["cpu"]
    found = list(predictions(machine, cells))
    record = {
        "schema_version": 1,
        "when": clock.started,
        "duration_s": round(clock.elapsed_s(), 1),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "vllm": f"{engine.package} {engine.version}",
        "machine": host_info().model_dump(),
        "load_average": os.getloadavg(),
        "how": "closed loops on a machine shared with others; the planned range is that of the shares of the roofline "
        "that the calibrating loads came to, and 15 % around it",
        "within": f"{sum(each['within'] for each in found)} of {len(found)}",
        "shares": {name: roofline_utilization(served_on(machine, VARIANTS[name]), cells[name]) for name in MODELS},
        "predictions": found,
        "cells": {
            name: [
                {
                    "input_tokens": cell.input_tokens,
                    "at_once": cell.max_concurrency,
                    "ttft_ms_p50": cell.ttft_ms.p50,
                    "tpot_ms_p50": cell.tpot_ms.p50,
                    "output_tokens_per_s": cell.output_tokens_per_s,
                }
                for cell in of_model
            ]
            for name, of_model in cells.items()
        },
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for each in found:
        print(json.dumps(each), file=sys.stderr)


if __name__ == "__main__":
    main()
