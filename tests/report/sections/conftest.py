"""A run as large as the page must stay readable with: 156 problems of five samples, 41 loads, four chips, images."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape

import pytest

from gemsmith.recipe.serving import GRIDS, Load
from gemsmith.report.page import render_page
from gemsmith.runs.bench_records import BenchCell, BenchRecord, DeviceLoad, Percentiles, Saturation, ServerLoad, Slo
from gemsmith.runs.eval_records import (
    Difference,
    EvalRecord,
    LmEvalRecord,
    LmEvalScore,
    ModelResult,
    PassAt,
    ProblemScore,
    Score,
    TaskResult,
)
from gemsmith.runs.plan_records import PlanPrice, PlanRecord
from gemsmith.runs.records import DataRecord, ServeRecord, ServerFacts, TrainRecord
from gemsmith.runs.run import Run, read_record, write_record

GIB = 2**30
PARTS = {
    "frozen weights": int(14.3 * GIB),
    "adapters": int(0.45 * GIB),
    "moments": int(0.9 * GIB),
    "gradients": int(0.45 * GIB),
    "saved activations": int(22.5 * GIB),
    "attention scores": int(7.5 * GIB),
    "logits": int(4.1 * GIB),
    "runtime": int(1.5 * GIB),
}
PRICE = PlanPrice(usd_per_hour=16.8, basis="seller region", date="2026")
FACTS = ServerFacts(
    version="0.32.0",
    dtype="bfloat16",
    quantization="none",
    kv_cache_dtype="fp8",
    tensor_parallel=8,
    max_model_len=16_384,
    prefix_caching=False,
    kv_blocks=16_211,
    unread=("data_parallel", "chunked_prefill", "kv_block_tokens", "kv_cache_tokens"),
)
CPP = "module TopModule (input clk, input [7:0] d, output reg [7:0] q);\n  always @(posedge clk) q {} d;\nendmodule\n"


def paper_cell(load: Load, *, probe: bool = False) -> BenchCell:
    """A load as a server of eight chips would take it, by formula."""

    def spread(middle: float) -> Percentiles:
        return Percentiles(mean=1.1 * middle, p50=middle, p90=1.6 * middle, p99=(2.4 + busy) * middle)

    asked = 64.0 if math.isinf(load.request_rate) else load.request_rate
    most = 3000 / (1 + load.input_tokens / 2500) / load.output_tokens
    busy = min(asked / most, 6.0)
    done = min(asked, most)
    kept = max(0.0, min(1.0, 1.6 - 0.65 * busy))
    return BenchCell(
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        request_rate=load.request_rate,
        max_concurrency=load.max_concurrency,
        completed=498 if busy > 4 else 500,
        failed=2 if busy > 4 else 0,
        failures={"timeout": 2} if busy > 4 else {},
        real_input_tokens=load.input_tokens - 0.4,
        real_output_tokens=load.output_tokens,
        duration_s=500 / done,
        ttft_ms=spread((40 + load.input_tokens / 30) * (1 if busy < 1 else 4 * busy**2)),
        tpot_ms=spread(14 + 6 * busy),
        itl_ms=spread(13 + 5 * busy),
        e2e_ms=spread((14 + 6 * busy) * load.output_tokens),
        output_tokens_per_s=done * load.output_tokens,
        requests_per_s=done,
        warmup=32,
        goodput=kept,
        good_requests_per_s=kept * done,
        probe=probe,
        server=ServerLoad(
            samples=60,
            running_mean=20 * busy,
            running_max=256.0 if busy > 1 else 60.0,
            waiting_mean=max(0.0, 90 * (busy - 1)),
            waiting_max=max(0.0, 400 * (busy - 1)),
            kv_use_mean=min(1.0, busy / 3),
            kv_use_max=min(1.0, busy / 2),
            preemptions=int(max(0, busy - 3)),
        ),
        devices=tuple(
            DeviceLoad(
                name="NVIDIA H100 80GB HBM3",
                samples=60,
                memory_bytes_max=(70 + number) * 2**30,
                busy_mean=min(1.0, busy / (2 + number)),
                busy_max=1.0,
                power_w_mean=120 + 90 * busy,
            )
            for number in range(2)
        ),
    )


def large_bench(record: BenchRecord) -> BenchRecord:
    loads = GRIDS["paper"].loads
    probes = [replace(load, request_rate=1.37 * load.request_rate) for load in loads if load.request_rate == 2.0]
    cells = [*map(paper_cell, loads), *(paper_cell(load, probe=True) for load in probes)]
    saturations = tuple(
        Saturation(input_tokens=load.input_tokens, output_tokens=load.output_tokens, held_at=2.0, exceeded_at=2.74)
        for load in probes
    )
    return record.model_copy(
        update={
            "cells": tuple(cells),
            "grid": "paper",
            "slo": Slo(ttft_ms=2000.0, tpot_ms=50.0),
            "saturations": saturations,
            "server": FACTS,
            "endpoint": {"url": "http://127.0.0.1:8000"},
        }
    )


def model_result(score: Score, *, problems: int, seed: int, share: float) -> ModelResult:
    draw = random.Random(seed)
    scored = []
    for number in range(problems):
        passed = sum(draw.random() < share * (0.2 if number % 3 else 1.6) for _ in range(5))
        reasons = {"compile error": (5 - passed) // 2, "wrong output": 5 - passed - (5 - passed) // 2}
        name = f"Prob{number + 1:03}_{'conwaylife' if number % 7 else 'review2015_fancytimer'}"
        reasons = {reason: count for reason, count in reasons.items() if count}
        scored.append(ProblemScore(name=name, samples=5, passed=passed, reasons=reasons))
    total = sum(each.passed for each in scored) / (5 * problems) if problems else score.score
    score = score.model_copy(
        update={"score": total, "low": max(0, total - 0.06), "high": min(1, total + 0.06), "n": problems or score.n}
    )
    ks = [(1, total), (5, min(1.0, total * 1.25))] if problems else []
    return ModelResult(
        score=score,
        pass_at=tuple(PassAt(k=k, score=value, low=value - 0.05, high=min(1, value + 0.05)) for k, value in ks),
        problems=tuple(scored),
        answers=5 * problems or score.n,
        mean_output_tokens=311.4,
        retries={"server died": 1} if problems else {},
    )


def task_result(name: str, base: ModelResult, tuned: ModelResult) -> TaskResult:
    mean = tuned.score.score - base.score.score
    difference = Difference(
        mean=mean,
        low=mean - 0.07,
        high=mean + 0.07,
        p_value=0.0004,
        significant=True,
        questions=len(tuned.problems) or 200,
        better=61,
        worse=12,
        sample_size_for_2pp=4_100,
        summary=f"The tuned model scores higher on {name}.",
    )
    return TaskResult(
        task=name,
        samples=5,
        temperature=0.8,
        top_p=0.95,
        seed=0,
        max_tokens=2048,
        prompt="official",
        questions_sha256="0" * 64,
        judged_by="Icarus 12.0",
        sandbox=True,
        base=base,
        tuned=tuned,
        difference=difference,
    )


def large_eval(record: EvalRecord) -> EvalRecord:
    verilog = task_result(
        "verilog-eval",
        model_result(record.base, problems=156, seed=1, share=0.35),
        model_result(record.tuned, problems=156, seed=2, share=0.55),
    )
    others = [
        task_result(name, model_result(record.base, problems=0, seed=1, share=0), tuned)
        for name in ("verilog-exact", "my own rows of questions and answers")
        for tuned in [model_result(record.tuned, problems=0, seed=1, share=0)]
    ]
    examples = [
        {
            "prompt": f"Problem {number}: " + "The module should implement a register. " * 12,
            "expected": "",
            "base": CPP.format("="),
            "tuned": CPP.format("<="),
            "base_right": False,
            "tuned_right": True,
            "base_reason": "wrong output",
        }
        for number in range(5)
    ]
    tasks = (verilog, *others)
    fields = {"scorer": "verilog-eval", "base": verilog.base.score, "tuned": verilog.tuned.score, "tasks": tasks}
    return record.model_copy(update=fields | {"examples": tuple(examples), "server": FACTS, "held_out_also_trained": 3})


@pytest.fixture
def large_run(make_run: Callable[..., Run]) -> Run:
    """Trained on four chips of a TPU, with prices, memory in parts, and 1,244 steps."""
    run = make_run(name="large", steps=1_244, resumed_at=(600,))
    train, plan, data = (read_record(run, kind) for kind in (TrainRecord, PlanRecord, DataRecord))
    first = plan.machines[0].model_copy(update={"parts": PARTS, "usd_spot": (2.1, 3.3), "price": PRICE})
    write_record(run, plan.model_copy(update={"machines": (first, *plan.machines[1:])}))
    images = {"images": 812, "soft_tokens": 227_360, "most_patches": 5_040}
    write_record(run, data.model_copy(update=images))
    machine = train.provenance.machine.model_copy(update={"accelerators": ("TPU v5",) * 4})
    provenance = train.provenance.model_copy(update={"machine": machine, "duration_s": 1_300.0})
    used = {
        "peak_memory_bytes": int(55.7 * GIB),
        "machine": "v5p-8",
        "compile_s": 118.2,
        "spikes": (700,),
        "skipped": (700,),
    }
    write_record(run, train.model_copy(update={"provenance": provenance, **used}))
    write_record(run, large_bench(read_record(run, BenchRecord)))
    write_record(run, large_eval(read_record(run, EvalRecord)))
    write_record(run, read_record(run, ServeRecord).model_copy(update={"server": FACTS}))
    score = {
        "arc_easy": {"acc": LmEvalScore(value=0.791, stderr=0.008), "acc_norm": LmEvalScore(value=0.77, stderr=None)}
    }
    lm_eval = LmEvalRecord(
        provenance=provenance,
        lm_eval="0.4.13",
        tasks=("arc_easy",),
        limit=None,
        rows={"arc_easy": 2_376},
        base=score,
        tuned=score,
    )
    write_record(run, lm_eval)
    return run


@pytest.fixture
def section_words(undrawn: None) -> Callable[[Run, str], str]:
    """Returns a function that gives the words of one section of a run's page, without what the charts look like."""

    def words(run: Run, section: str) -> str:
        html = re.search(rf'<section id="{section}".*?</section>', render_page(run), re.DOTALL)
        assert html is not None
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", html[0])).split())

    return words
