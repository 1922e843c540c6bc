import math
from typing import Any

import numpy as np
import pytest

from gemsmith.bench.cell import Count, LoadSpec, describe_load, notices_of, plan_cells, read_cell
from gemsmith.errors import EngineError
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.serving import BURST, GRIDS, Bench, Load
from gemsmith.runs.bench_records import BenchCell, Slo
from support.cases import each

SWEEP = {"input_tokens": [16, 32], "output_tokens": 8, "request_rates": [8, 2, 32.5], "prompts": 4}


def make_ask(requests: int = 12, *, warmup: int = 0, output_tokens: int = 16, **load: Any) -> LoadSpec:
    return LoadSpec(
        number=1,
        load=Load(**{"input_tokens": 16, "output_tokens": output_tokens, "request_rate": 20.0} | load),
        count=Count(warmup=warmup, measured=requests - warmup),
        seed=1,
    )


ASK = make_ask()


def make_bench(**keys: Any) -> Bench:
    return build_recipe({"checkpoint": "/c", "data": {"train": "x"}, "bench": SWEEP | keys}).bench


def test_the_sweep_is_every_length_from_its_lowest_rate_on() -> None:
    asks = plan_cells(make_bench(), 3)
    pairs = [(ask.load.input_tokens, ask.load.request_rate) for ask in asks]
    assert pairs == [(16, 2), (16, 8), (16, 32.5), (32, 2), (32, 8), (32, 32.5)]
    assert len({ask.seed for ask in asks}) == len({ask.result_file for ask in asks}) == 6
    assert {ask.count.measured for ask in asks} == {4}
    assert plan_cells(make_bench(), 3) == asks


def test_a_cells_seed_is_that_of_its_load_and_of_the_run_wherever_it_stands() -> None:
    few, many = plan_cells(make_bench(request_rates=[8]), 3), plan_cells(make_bench(), 3)
    assert {ask.seed for ask in few} < {ask.seed for ask in many}
    assert not {ask.seed for ask in few} & {ask.seed for ask in plan_cells(make_bench(), 4)}


def test_a_named_grid_takes_the_place_of_the_recipes_own_keys() -> None:
    asks = plan_cells(make_bench(grid="paper"), 0)
    assert [ask.load for ask in asks] == list(GRIDS["paper"].loads)
    assert [ask.number for ask in asks if ask.count.measured < 200] == [1], "what is sent once"
    burst = plan_cells(make_bench(request_rates=["burst", 1]), 0)
    assert [ask.load.request_rate for ask in burst] == [1, BURST, 1, BURST]


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl"])
def test_where_all_requests_are_whole_a_cell_holds_what_the_client_computed(
    metric: str, result: dict[str, Any]
) -> None:
    cell = read_cell(ASK, result)
    assert (cell.completed, cell.failed, cell.cut, cell.input_tokens, cell.output_tokens, cell.request_rate) == (
        12,
        0,
        0,
        16,
        16,
        20.0,
    )
    assert (cell.real_input_tokens, cell.real_output_tokens) == (16, 16)
    found = getattr(cell, f"{metric}_ms")
    assert [found.mean, found.p50, found.p90, found.p99] == pytest.approx(
        [result[f"{name}_{metric}_ms"] for name in ("mean", "p50", "p90", "p99")], abs=0.001
    )
    assert found.p50 <= found.p90 <= found.p99
    # vLLM's client counts the time before the first request, too: here 1 / 20 s.
    assert result["duration"] - 0.1 < cell.duration_s < result["duration"]
    assert cell.output_tokens_per_s == pytest.approx(12 * 16 / cell.duration_s, rel=0.001)
    assert cell.requests_per_s == pytest.approx(12 / cell.duration_s, rel=0.001)
    assert cell.e2e_ms.p99 == pytest.approx(max(result["latencies"]) * 1000, rel=0.05)


def test_streams_that_ended_early_are_in_no_number_but_their_own(cut_result: dict[str, Any]) -> None:
    assert cut_result["completed"] == 12 and cut_result["output_lens"].count(3) == 3
    cell = read_cell(ASK, cut_result)
    assert (cell.completed, cell.failed, cell.cut) == (9, 0, 3)
    assert cell.failures == {"wrong length": 3}
    assert cell.output_tokens_per_s == pytest.approx(9 * 16 / cell.duration_s, rel=0.001)
    assert cell.requests_per_s == pytest.approx(9 / cell.duration_s, rel=0.001)
    # A stream that ends after three tokens has the times of another machine.
    for index in (2, 5, 9):
        cut_result["ttfts"][index], cut_result["latencies"][index], cut_result["itls"][index] = 77.0, 99.0, [11.0, 11.0]
    assert read_cell(ASK, cut_result) == cell


def test_a_cell_keeps_its_requests_one_by_one_and_its_numbers_are_theirs(result: dict[str, Any]) -> None:
    result["errors"][3] = "http 500: no"
    cell = read_cell(make_ask(warmup=2), result | {"prompts_sha256": "ab"})
    each = cell.requests
    assert each is not None and each.prompts_sha256 == "ab"
    kept = [place for place in range(2, 12) if place != 3]
    assert each.ttft_ms == tuple(round(1000 * result["ttfts"][place], 3) for place in kept)
    assert each.latency_ms == tuple(round(1000 * result["latencies"][place], 3) for place in kept)
    assert each.input_tokens == (16,) * 9 == tuple(result["input_lens"][place] for place in kept)
    assert each.start_ms[0] == 0 and list(each.start_ms) == sorted(each.start_ms)
    assert cell.ttft_ms.p50 == pytest.approx(float(np.median(each.ttft_ms)), abs=0.001)
    assert cell.tpot_ms.p50 == pytest.approx(float(np.median(each.tpot_ms(16))), abs=0.001)
    ends = [start + latency for start, latency in zip(each.start_ms, each.latency_ms, strict=True)]
    assert cell.duration_s == pytest.approx(max(ends) / 1000, abs=0.001)
    assert BenchCell.model_validate_json(cell.model_dump_json()) == cell


def test_a_stream_of_more_tokens_than_asked_for_is_not_whole_either(result: dict[str, Any]) -> None:
    result["output_lens"][0] = 17
    assert read_cell(ASK, result).cut == 1


def test_failed_requests_are_counted_under_their_causes_and_their_times_left_out(result: dict[str, Any]) -> None:
    causes = {3: "http 429: Too Many Requests", 4: "http 429: ", 7: "cut stream: 3 of 16 tokens", 8: "no connection: x"}
    for place, error in causes.items():
        for column, empty in (("output_lens", 0), ("ttfts", 99.0), ("latencies", 99.0), ("itls", [])):
            result[column][place] = empty
        result["errors"][place] = error
    cell = read_cell(ASK, result)
    assert (cell.completed, cell.failed, cell.cut) == (8, 3, 1)
    assert cell.failures == {"http 429": 2, "cut stream": 1, "no connection": 1}
    assert 1 < cell.ttft_ms.p50 < cell.ttft_ms.p99 < 50
    assert tuple(notices_of([cell])) == (
        "4 of 12 requests of the load test were not answered whole (2 http 429, 1 cut stream, 1 no connection); no "
        "latency and no rate counts them.",
    )


def test_requests_of_the_warm_up_are_in_no_number_but_their_own(result: dict[str, Any]) -> None:
    result["ttfts"][0], result["latencies"][0], result["start_times"][0] = 77.0, 99.0, 0.0
    result["errors"][1] = "timeout: TimeoutError"
    cell = read_cell(make_ask(warmup=2), result)
    assert (cell.completed, cell.warmup, cell.warmup_failures, cell.failures) == (10, 2, {"timeout": 1}, {})
    assert cell.ttft_ms.p99 < 50 and cell.duration_s < 1
    assert any("1 requests of warm-up failed" in notice for notice in notices_of([cell]))


def test_goodput_is_the_share_of_all_measured_requests_that_kept_the_slo(result: dict[str, Any]) -> None:
    result["ttfts"] = [0.010] * 9 + [0.050] * 3
    result["latencies"] = [0.010 + 15 * 0.020] * 8 + [0.010 + 15 * 0.040] + [0.050 + 15 * 0.020] * 3
    result["errors"][0] = "http 500: Internal Server Error"
    goodputs = {
        (ttft, tpot): read_cell(ASK, result, Slo(ttft_ms=ttft, tpot_ms=tpot)).goodput
        for ttft, tpot in ((30, None), (None, 30), (30, 30), (100, 100), (1, None))
    }
    assert goodputs == {(30, None): 0.6667, (None, 30): 0.8333, (30, 30): 0.5833, (100, 100): 0.9167, (1, None): 0.0}
    cell = read_cell(ASK, result, Slo(ttft_ms=30, tpot_ms=30))
    assert cell.good_requests_per_s == pytest.approx(7 / cell.duration_s, rel=0.01)
    assert read_cell(ASK, result).goodput is None


def test_answers_of_one_token_have_no_time_between_tokens(result: dict[str, Any]) -> None:
    one = result | {"output_lens": [1] * 12, "itls": [[]] * 12, "latencies": result["ttfts"]}
    cell = read_cell(make_ask(output_tokens=1), one)
    assert cell.completed == 12 and cell.itl_ms.p99 == cell.tpot_ms.p99 == 0


def test_a_cell_of_which_no_request_was_whole_has_counts_and_no_times(result: dict[str, Any]) -> None:
    cell = read_cell(ASK, result | {"errors": ["http 500: no"] * 12}, Slo(ttft_ms=1000))
    assert (cell.completed, cell.failed, cell.goodput, cell.requests_per_s) == (0, 12, 0.0, 0.0)
    assert cell.requests is None


COLUMNS = ["input_lens", "output_lens", "start_times", "ttfts", "latencies", "itls", "errors"]


@each("name", COLUMNS)
@each(
    "value", ["missing", None, "x", [], [None] * 12, [["x"]] * 12, math.nan, -1, [math.nan] * 12, [-1] * 12, math.inf]
)
def test_a_damaged_result_is_one_line(name: str, value: Any, result: dict[str, Any]) -> None:
    damaged = {key: item for key, item in (result | {name: value}).items() if (key, value) != (name, "missing")}
    with pytest.raises(
        EngineError, match=r"^bench: cell 1 \(16 tokens in, 20 requests/s\): 01-16in-20rps\.json [^\n]*$"
    ):
        read_cell(ASK, damaged)


def test_a_result_of_other_requests_is_one_line(result: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"contradicts itself: 12 requests told of, 11 asked for"):
        read_cell(make_ask(11), result)


def test_a_server_that_falls_behind_is_a_notice(result: dict[str, Any]) -> None:
    whole = read_cell(ASK, result)
    assert not list(notices_of([whole]))
    slow = result | {"start_times": [0.05 * place for place in range(12)], "latencies": [2.0] * 11 + [8.0]}
    assert "In 1 of 2 cells fewer than 90 %" in next(notices_of([whole, read_cell(ASK, slow)]))
    assert not list(notices_of([read_cell(make_ask(request_rate=BURST), slow)]))


@pytest.mark.parametrize(
    ("load", "words", "file"),
    [
        ({}, "16 tokens in, 20 requests/s", "01-16in-20rps.json"),
        ({"request_rate": BURST}, "16 tokens in, a burst", "01-16in-burst.json"),
        ({"request_rate": BURST, "max_concurrency": 64}, "16 tokens in, 64 at once", "01-16in-burst-64atonce.json"),
    ],
)
def test_a_load_is_told_in_words_and_in_its_files_name(load: dict[str, Any], words: str, file: str) -> None:
    ask = make_ask(**load)
    assert (describe_load(ask.load), ask.result_file) == (words, file)


def test_a_burst_survives_the_record(result: dict[str, Any]) -> None:
    cell = read_cell(make_ask(request_rate=BURST), result)
    assert BenchCell.model_validate_json(cell.model_dump_json()) == cell and cell.request_rate == math.inf


def test_a_low_rate_may_be_quiet_for_longer() -> None:
    assert ASK.idle_timeout_s == pytest.approx(600 + 60 + 1)
    assert make_ask(request_rate=0.1).idle_timeout_s == pytest.approx(600 + 60 + 200)
    assert make_ask(request_rate=BURST).idle_timeout_s == 660
