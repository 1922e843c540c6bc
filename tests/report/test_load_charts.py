"""The load test's charts: what is drawn beside what, and what is marked."""

import json
import math

import pytest

from gemsmith.report.bench_charts import load_charts
from gemsmith.runs.bench_records import BenchRecord
from gemsmith.runs.run import read_record

RING = ("muted", "ring", "saturated: under 95 % good")


@pytest.fixture
def bench(make_run):
    return read_record(make_run(steps=2, lengths=(512,), rates=(1.0, 4.0)), BenchRecord)


def charts_of(bench, *cells):
    return {chart.name: chart for chart in load_charts(bench.model_copy(update={"cells": cells}))}


def test_probes_and_numbers_at_once_have_no_place_among_the_rates(bench, undrawn):
    burst = bench.cells[0].model_copy(update={"request_rate": math.inf})
    closed = burst.model_copy(update={"max_concurrency": 64, "input_tokens": 128})
    probe = bench.cells[0].model_copy(update={"request_rate": 2.0, "probe": True})
    alt = charts_of(bench, *bench.cells, burst, closed, probe)["throughput"].alt
    assert "512 in, a burst" in alt and "128 in" not in alt and "2 requests/s" not in alt
    assert "128 in, 64 at once" in charts_of(bench, closed)["throughput"].alt


def test_loads_of_requests_at_once_have_an_axis_of_their_own(bench):
    at_once = [
        bench.cells[0].model_copy(update={"request_rate": math.inf, "max_concurrency": number}) for number in (8, 64)
    ]
    svg = charts_of(bench, *at_once)["ttft"].svg
    assert "requests at once" in svg and ">64<" in svg and "burst" not in svg


def test_goodput_is_drawn_with_an_slo_alone_and_saturated_loads_are_ringed(bench):
    assert "goodput" not in charts_of(bench, *bench.cells)
    cells = [cell.model_copy(update={"goodput": good}) for cell, good in zip(bench.cells, (0.95, 0.949), strict=True)]
    charts = charts_of(bench, *cells)
    assert list(charts) == ["trade", "throughput", "goodput", "ttft", "tpot", "itl"]
    assert all(RING in chart.legend for chart in charts.values())
    assert "512 in, 4 requests/s: 94.9\u00a0% good" in charts["goodput"].alt
    whole = charts_of(bench, *(cell.model_copy(update={"goodput": 0.95}) for cell in bench.cells))
    assert RING not in whole["goodput"].legend


def test_the_values_under_the_pointer_are_the_record_s(bench, undrawn):
    cell = bench.cells[1]
    update = {"output_tokens_per_s": 1234.0, "ttft_ms": cell.ttft_ms.model_copy(update={"p50": 56.7})}
    points = json.loads(charts_of(bench, cell.model_copy(update=update))["trade"].points)
    assert points == [[1234, 57, "512 in, 4 requests/s: 1,234 tokens/s, TTFT p50 56.7 ms"]]


def test_nothing_is_drawn_of_cells_without_an_answer_and_what_is_not_finite_draws(bench):
    none = bench.cells[0].model_copy(update={"completed": 0})
    assert charts_of(bench, none) == {}
    nan = bench.cells[0].ttft_ms.model_copy(update={"p50": math.nan, "p90": math.inf, "p99": math.nan})
    lost = bench.cells[0].model_copy(update={"ttft_ms": nan, "output_tokens_per_s": math.nan})
    assert "not finite" in charts_of(bench, lost)["ttft"].alt


def test_points_of_latency_against_throughput_are_named_by_their_load(bench):
    assert ">1<" in charts_of(bench, *bench.cells)["trade"].svg and ">4<" in charts_of(bench, *bench.cells)["trade"].svg
    cells = [cell.model_copy(update={"input_tokens": length}) for cell in bench.cells for length in (1, 2, 3, 4)]
    svg = charts_of(bench, *cells)["trade"].svg
    assert ">1<" not in svg and svg.count(">4<") == 4, "of many lines the heaviest load alone"
