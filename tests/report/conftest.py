"""Runs with records as the stages would leave them, made by formula from a seed; `make_run` varies them."""

import hashlib
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gemsmith.analysis import summary as findings
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import ResolvedValue
from gemsmith.report import charts as drawing
from gemsmith.runs.bench_records import BenchCell, BenchRecord, Percentiles
from gemsmith.runs.eval_records import Difference, EvalRecord, ModelResult, Score, TaskResult
from gemsmith.runs.plan_records import MachinePlan, PlanRecord
from gemsmith.runs.records import (
    Check,
    Computer,
    DataRecord,
    ExportRecord,
    FileSum,
    Provenance,
    Record,
    ServeRecord,
    TrainRecord,
    TrainStep,
    VerifyRecord,
)
from gemsmith.runs.run import Run, inputs_sha256, open_run, read_record, write_record
from gemsmith.runs.stages import STAGES

HOSTILE = '<script>alert("x")</script>&amp; \' ${1+1} {{ 7*7 }} \u202egnp.exe\u202c \x00\x1b[31m 漢字 العربية 🦊'
STARTED = {stage: f"2026-05-01T{9 + index:02}:{7 * index:02}:00+00:00" for index, stage in enumerate(STAGES)}
SECONDS = {
    "plan": 0.21,
    "data": 14.3,
    "train": 236.4,
    "export": 6.2,
    "verify": 9.8,
    "serve": 58.4,
    "bench": 96.1,
    "eval": 44.7,
}
VERSIONS = {
    "train": {
        "python": "3.11.2",
        "jax": "0.10.0",
        "flax": "0.12.1",
        "google-tunix": "0.1.7",
        "qwix": "0.1.8",
        "optax": "0.2.8",
    },
    "bench": {"python": "3.11.2", "vllm": "0.32.0"},
}


def unlabeled_cells(html: str) -> tuple[int, list[str]]:
    """How many tables are stacked on a phone, and their cells that would then have no name."""
    tables = re.findall(r'<table class="[^"]*stacked[^"]*">(.*?)</table>', html, re.DOTALL)
    rows = [row for table in tables for row in re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], re.DOTALL)]
    cells = [cell for row in rows for cell in re.findall(r"<td([^>]*)>", row)]
    return len(tables), [cell for cell in cells if not re.search(r'data-label="[^"]', cell)]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def provenance(run: Run, stage: str) -> Provenance:
    return Provenance(
        started=STARTED[stage],
        duration_s=SECONDS[stage],
        gemsmith="0.1.0",
        versions=VERSIONS.get(stage, {"python": "3.11.2"}),
        machine=Computer(system="Linux 6.1.0", processor="x86_64", cores=2, memory_bytes=8 * 2**30),
        seed=run.recipe.seed,
        inputs_sha256=inputs_sha256(run, stage),
    )


def wilson(score: float, n: int) -> Score:
    z = 1.959964
    middle, width = score + z * z / (2 * n), z * math.sqrt(score * (1 - score) / n + z * z / (4 * n * n))
    return Score(
        score=score,
        low=max(0.0, (middle - width) / (1 + z * z / n)),
        high=min(1.0, (middle + width) / (1 + z * z / n)),
        n=n,
    )


def plan_record(run: Run, model: str) -> PlanRecord:
    machines = []
    for name, chips, limit, used, step, rate in (
        ("v5p-8", 4, 95, 61.2, 3.1, 16.8),
        ("v6e-8", 8, 32, 36.4, 2.4, 21.52),
        ("2xh100", 2, 80, 74.9, 5.2, 22.12),
    ):
        hours = (step * 311 / 3600, 1.6 * step * 311 / 3600)
        fits = used < limit
        machines.append(
            MachinePlan(
                name=name,
                chips=chips,
                fits=fits,
                hbm_bytes_per_chip=int(used * 2**30),
                hbm_limit_bytes_per_chip=limit * 2**30,
                step_s=(step, 1.6 * step),
                hours=hours if fits else None,
                usd=(hours[0] * rate, hours[1] * rate) if fits else None,
                mesh={"fsdp": chips, "tp": 1},
                notes=()
                if fits
                else ("does not fit: lower data.max_length or train.global_batch_size, or take a larger slice",),
            )
        )
    return PlanRecord(
        provenance=provenance(run, "plan"),
        model=model,
        parameters=30_697_345_280,
        trained_parameters=485_490_688,
        steps=311,
        priced_steps=311,
        tokens_per_step=32_768,
        machines=tuple(machines),
        assumptions=(
            "bf16 base, fp32 adapters and moments",
            "every layer recomputed in the backward pass",
            "40 to 65 % of peak FLOP/s",
        ),
    )


def data_record(run: Run, steps: int) -> DataRecord:
    return DataRecord(
        provenance=provenance(run, "data"),
        rows=9_959,
        dropped={"too long (over 4096 tokens)": 41, "no assistant turn": 3},
        ignored_columns={"id": 10_003, "source": 9_000},
        packed_rows=8 * steps,
        tokens=int(8 * steps * 4096 * 0.964),
        supervised_tokens=int(8 * steps * 4096 * 0.42),
        packing_efficiency=0.964,
        length_percentiles={"p50": 814, "p90": 1733, "p99": 3310, "p100": 5128},
        template_sha256=digest("template"),
        steps=steps,
        rows_sha256=digest("rows"),
    )


def train_steps(steps: int) -> list[TrainStep]:
    draw = random.Random(7)
    return [
        TrainStep(
            step=step,
            loss=0.31 + 1.4 * math.exp(-step / (0.12 * steps + 1)) + 0.06 * draw.gauss(0, 1) * math.exp(-step / steps),
            grad_norm=abs(0.35 + 2.2 * math.exp(-step / (0.05 * steps + 1)) + 0.09 * draw.gauss(0, 1)),
            learning_rate=1e-4
            * min((step - 1) / 30, 0.5 * (1 + math.cos(math.pi * max(0, step - 31) / max(1, steps - 30)))),
            real_tokens=31_000 + draw.randrange(1_200),
            loss_tokens=9_000 + step,
            token_accuracy=0.5 + 0.4 * step / steps,
            step_s=(9.5 if step == 1 else 0.68) * (1 + 0.04 * draw.random()),
        )
        for step in range(1, steps + 1)
    ]


def train_record(run: Run, model: str, steps: Sequence[TrainStep], resumed_at: Sequence[int]) -> TrainRecord:
    timed = steps[1:] or steps
    return TrainRecord(
        provenance=provenance(run, "train"),
        backend="tunix",
        model=model,
        steps=tuple(steps),
        adapted={"q": 60, "k": 60, "v": 50, "o": 60, "gate": 60, "up": 60, "down": 60},
        trained_parameters=485_490_688,
        mesh={"fsdp": 4, "tp": 1},
        resumed_at=tuple(resumed_at),
        real_tokens_per_s=sum(step.real_tokens for step in timed) / (sum(step.step_s for step in timed) or 1),
        peak_memory_bytes=3_221_225_472,
        last_checkpoint=f"checkpoints/{len(steps)}",
    )


def export_record(run: Run, step: int) -> ExportRecord:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json", "tokenizer.json"]
    return ExportRecord(
        provenance=provenance(run, "export"),
        step=step,
        adapter=(FileSum(name="adapter_model.safetensors", bytes=1_941_962_752, sha256=digest("adapter")),),
        merged=tuple(
            FileSum(name=name, bytes=31_270_000_000 >> (8 * i), sha256=digest(name)) for i, name in enumerate(names)
        ),
        merged_tensors=410,
        copied_tensors=422,
    )


def verify_record(run: Run, passed: bool) -> VerifyRecord:
    difference = 3.1e-6 if passed else 0.82
    return VerifyRecord(
        provenance=provenance(run, "verify"),
        passed=passed,
        checks=(
            Check(
                name="tensors",
                passed=True,
                detail="the merged files hold the base's 832 tensors, same names, shapes and dtypes",
            ),
            Check(name="changed", passed=True, detail="410 tensors differ from the base, all of them adapted ones"),
            Check(
                name="logits",
                passed=passed,
                detail=f"largest difference of merged against base + adapter: {difference:.2g} (allowed 0.0001)",
            ),
            Check(name="adapter", passed=True, detail="PEFT loads it and reports rank 64, alpha 64"),
        ),
        changed_tensors=410,
        expected_tensors=410,
        logits_max_abs_difference=difference,
    )


def serve_record(run: Run, model: str, answer: str) -> ServeRecord:
    return ServeRecord(
        provenance=provenance(run, "serve"),
        url="http://127.0.0.1:8000",
        model=model,
        command=("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "merged", "--dtype", "float32"),
        start_s=41.7,
        vllm="0.32.0",
        answer=answer,
    )


def bench_record(run: Run, lengths: Sequence[int], rates: Sequence[float], failed: int) -> BenchRecord:
    def percentiles(middle: float, spread: float) -> Percentiles:
        return Percentiles(mean=1.1 * middle, p50=middle, p90=middle * (1 + spread), p99=middle * (1 + 2.6 * spread))

    cells = []
    for length in lengths:
        for rate in rates:
            busy = rate * (0.3 + length / 4096)
            worst = failed if (length, rate) == (max(lengths), max(rates)) else 0
            cells.append(
                BenchCell(
                    input_tokens=length,
                    output_tokens=256,
                    request_rate=rate,
                    completed=128 - worst,
                    failed=worst,
                    real_input_tokens=length * 1.07,
                    real_output_tokens=256.0,
                    duration_s=128 / rate,
                    ttft_ms=percentiles(35 + length / 40 + 1.9 * busy**1.6, 0.35 + busy / 60),
                    tpot_ms=percentiles(13 + 0.55 * busy, 0.12 + busy / 200),
                    itl_ms=percentiles(12.5 + 0.6 * busy, 0.3 + busy / 120),
                    e2e_ms=percentiles(256 * (13 + 0.55 * busy), 0.3 + busy / 120),
                    output_tokens_per_s=256 * rate / (1 + busy / 11),
                    requests_per_s=rate / (1 + busy / 11),
                )
            )
    return BenchRecord(
        provenance=provenance(run, "bench"),
        cells=tuple(cells),
        prefix_caching=False,
        command=("python", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--request-rate", "1"),
    )


ADDER = "module adder(input [{0}:0] a, input [{0}:0] b, output [{0}:0] y);\n  assign y = a + b;\nendmodule\n"


def eval_record(run: Run, hostile: bool) -> EvalRecord:
    examples = [
        {
            "prompt": f"Write a module named adder that adds two {bits}-bit numbers a and b into y.",
            "expected": ADDER.format(bits - 1),
            "base": "The answer is 7.",
            "base_right": False,
            "tuned": ADDER.format(bits - 1) if bits != 8 else ADDER.format(bits - 1).replace("a + b", "a - b"),
            "tuned_right": bits != 8,
        }
        for bits in (4, 8, 12)
    ]
    if hostile:
        examples.append(
            {
                "prompt": HOSTILE + "long " * 20_000,
                "expected": "x" * 9_000,
                "base": "",
                "tuned": HOSTILE,
                "tuned_right": False,
            }
        )
    base, tuned = wilson(0.03, 200), wilson(0.94, 200)
    difference = Difference(
        mean=0.91,
        low=0.87,
        high=0.95,
        p_value=1e-6,
        significant=True,
        questions=200,
        better=183,
        worse=1,
        sample_size_for_2pp=1_600,
        summary="The tuned model scores higher: 0.910 (0.870 to 0.950).",
    )
    task = TaskResult(
        task="verilog-exact",
        samples=1,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        max_tokens=512,
        questions_sha256=digest("questions"),
        base=ModelResult(score=base, answers=200),
        tuned=ModelResult(score=tuned, answers=200),
        difference=difference,
    )
    return EvalRecord(
        provenance=provenance(run, "eval"),
        scorer="verilog-exact",
        base=base,
        tuned=tuned,
        examples=tuple(examples),
        tasks=(task,),
    )


def build_run(
    folder: Path,
    *,
    without: Sequence[str] = (),
    steps: int = 311,
    resumed_at: Sequence[int] = (),
    verified: bool = True,
    failed_requests: int = 0,
    lengths: Sequence[int] = (512, 4096),
    rates: Sequence[float] = (1.0, 4.0, 16.0),
    model: str = "gemma4-31b",
    hostile: bool = False,
    train: Sequence[TrainStep] | None = None,
) -> Run:
    """A run directory with a record for each stage but those `without`."""
    recipe = build_recipe(
        {
            "checkpoint": HOSTILE.replace("\x00", "") if hostile else "google/gemma-4-31B-it",
            "data": {"train": "rows.jsonl", "eval": {"task": "verilog", "rows": 200, "split": "held-out"}},
        }
    )
    derived = [
        ResolvedValue("serve.port", None, "a free one is taken when the server starts"),
        ResolvedValue("model", None, "what the checkpoint is"),
    ]
    run = open_run(folder, recipe, derived)
    model = HOSTILE if hostile else model
    made: dict[str, Callable[[], Record]] = {
        "plan": lambda: plan_record(run, model),
        "data": lambda: data_record(run, steps),
        "train": lambda: train_record(run, model, train_steps(steps) if train is None else train, resumed_at),
        "export": lambda: export_record(run, steps),
        "verify": lambda: verify_record(run, verified),
        "serve": lambda: serve_record(run, model, HOSTILE if hostile else "module m; endmodule"),
        "bench": lambda: bench_record(run, lengths, rates, failed_requests),
        "eval": lambda: eval_record(run, hostile),
    }
    for stage, make in made.items():
        if stage not in without:
            write_record(run, make())
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Returns a function that makes a run; its keywords are those of `build_run`."""

    def make(name: str = "run", **how: Any) -> Run:
        return build_run(tmp_path / name, **how)

    return make


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the drawing out of the charts: a page takes two seconds with it, and most tests ask for words."""

    def draw(*_: Any, points: Sequence[tuple[float, float]] = (), **__: Any) -> Any:
        return '<svg aria-hidden="true"></svg>', list(points)

    monkeypatch.setattr(drawing, "draw_chart", draw)


@pytest.fixture
def told() -> Callable[..., list[findings.Notice]]:
    """Changes a stage's record, and returns what is to be told of the run: `told(run, "data", notices=())`."""

    def told(run: Run, stage: str, **warnings: Any) -> list[findings.Notice]:
        write_record(run, read_record(run, STAGES[stage].record).model_copy(update=warnings))
        return findings.find_notices(findings.read_findings(run))

    return told
