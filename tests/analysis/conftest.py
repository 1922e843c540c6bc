"""Sides made of the demo's kept records, and of nothing but numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemsmith.analysis.sides import LoadCell, Rate, Side, side_of_run
from gemsmith.recipe.load import load_recipe
from gemsmith.runs.bench_records import Requests
from gemsmith.runs.plan_records import PlanPrice
from gemsmith.runs.records import Record, read_record_file
from gemsmith.runs.stages import STAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_records() -> dict[str, Record]:
    """The demo's records, with a price of an hour in the plan, and the machine that trained."""
    records = {
        name: read_record_file(ROOT / f"benchmarks/records/demo/{name}.json", stage.record, missing="", damaged="")
        for name, stage in STAGES.items()
    }
    plan = records["plan"]
    price = PlanPrice(usd_per_hour=2.0, basis="shop here, a price list", date="2026-05-01")
    machines = tuple(machine.model_copy(update={"price": price}) for machine in plan.machines)
    records["plan"] = plan.model_copy(update={"machines": machines})
    records["train"] = records["train"].model_copy(update={"machine": "cpu"})
    return records


@pytest.fixture
def demo_side(demo_records) -> Callable[..., Side]:
    """Returns a function that makes a side of the demo: `demo_side("b", ["lora.rank=8"], train={"hosts": 2})`."""

    def make(name: str = "a", overrides: list[str] | None = None, *, without: tuple[str, ...] = (), **changes: Any):
        recipe = load_recipe(ROOT / "recipes/demo.yaml", overrides or [])
        records = {
            stage: record.model_copy(update=changes.get(stage, {}))
            for stage, record in demo_records.items()
            if stage not in without
        }
        return side_of_run(name, f"runs/{name}", recipe, records)

    return make


@pytest.fixture
def plain_side() -> Callable[..., Side]:
    """Returns a function that makes a side with no conditions but those given."""

    def make(name: str = "a", **values: Any) -> Side:
        return Side(**{"name": name, "source": name, "conditions": {}, **values})

    return make


@pytest.fixture
def rented() -> Callable[[float], dict[str, Rate]]:
    """Returns a function that makes prices on demand, and spot at a quarter of them."""

    def make(usd: float) -> dict[str, Rate]:
        rate = Rate(machine="m", usd_per_hour=usd, basis="shop", date="2026")
        return {"on demand": rate, "spot": rate.model_copy(update={"usd_per_hour": usd / 4})}

    return make


@pytest.fixture
def cell() -> Callable[..., LoadCell]:
    """Returns a function that makes a load and what came of it."""

    def make(speed: float = 100.0, **values: Any) -> LoadCell:
        return LoadCell(**{"input_tokens": 64, "output_tokens": 32, "output_tokens_per_s": speed, **values})

    return make


@pytest.fixture
def served() -> Callable[..., LoadCell]:
    """Returns a function that makes a load of 60 requests, kept one by one, of a machine `slower` times slower."""

    def make(slower: float, *, prompts: str | None = None, seed: int = 0) -> LoadCell:
        noise = np.random.default_rng(seed)
        ttft_ms = slower * 40 * noise.lognormal(0, 0.3, 60)
        latency_ms = ttft_ms + slower * 31 * 10 * noise.lognormal(0, 0.1, 60)
        start_ms = slower * 120.0 * np.arange(60)
        each = Requests(
            prompts_sha256=prompts,
            start_ms=tuple(map(float, start_ms)),
            ttft_ms=tuple(map(float, ttft_ms)),
            latency_ms=tuple(map(float, latency_ms)),
            input_tokens=(64,) * 60,
        )
        return LoadCell(
            input_tokens=64,
            output_tokens=32,
            requests=60,
            output_tokens_per_s=60 * 32 / float((start_ms + latency_ms).max() / 1000),
            ttft_ms=float(np.median(ttft_ms)),
            tpot_ms=float(np.median(each.tpot_ms(32))),
            each=each,
        )

    return make
