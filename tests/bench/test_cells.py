import math
from typing import Any

import pytest

from gemsmith.bench.cells import Ask, notices_of, plan_cells, read_cell
from gemsmith.errors import EngineError
from gemsmith.recipe import Recipe
from gemsmith.recipe_file import build_recipe

SWEEP = {"input_tokens": [16, 32], "output_tokens": 8, "request_rates": [2, 8, 32.5], "prompts": 4}
ASK = Ask(number=1, input_tokens=16, output_tokens=16, request_rate=20.0, prompts=12, seed=1)


def make_recipe(**bench_: Any) -> Recipe:
    return build_recipe(
        {
            "checkpoint": "/c",
            "seed": 3,
            "data": {"train": "x"},
            "serve": {"max_model_len": 640},
            "bench": SWEEP | bench_,
        }
    )


def test_the_sweep_is_every_length_at_every_rate_with_a_seed_of_its_own() -> None:
    asks = plan_cells(make_recipe())
    assert [(ask.input_tokens, ask.request_rate) for ask in asks] == [
        (16, 2),
        (16, 8),
        (16, 32.5),
        (32, 2),
        (32, 8),
        (32, 32.5),
    ]
    assert len({ask.seed for ask in asks}) == len({ask.result_file for ask in asks}) == 6
    assert plan_cells(make_recipe()) == asks


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
    assert cell.duration_s == pytest.approx(result["duration"], abs=0.001)
    assert cell.output_tokens_per_s == pytest.approx(result["output_throughput"], abs=0.01)
    assert cell.requests_per_s == pytest.approx(result["request_throughput"], abs=0.001)


def test_streams_that_ended_early_are_in_no_number_but_their_own(cut_result: dict[str, Any]) -> None:
    assert cut_result["completed"] == 12 and cut_result["output_lens"].count(3) == 3
    cell = read_cell(ASK, cut_result)
    assert (cell.completed, cell.failed, cell.cut) == (9, 0, 3)
    assert cell.output_tokens_per_s == pytest.approx(9 * 16 / cut_result["duration"], abs=0.01)
    assert cell.requests_per_s == pytest.approx(9 / cut_result["duration"], abs=0.001)
    # A stream that ends after three tokens has the times of another machine.
    for index in (2, 5, 9):
        cut_result["ttfts"][index], cut_result["latencies"][index], cut_result["itls"][index] = 77.0, 99.0, [11.0, 11.0]
    assert read_cell(ASK, cut_result) == cell


def test_a_stream_of_more_tokens_than_asked_for_is_not_whole_either(result: dict[str, Any]) -> None:
    result["output_lens"][0] = 17
    assert read_cell(ASK, result).cut == 1


def test_failed_requests_are_counted_and_their_empty_times_left_out(result: dict[str, Any]) -> None:
    for column, empty in (("output_lens", 0), ("ttfts", 0.0), ("latencies", 0.0), ("itls", [])):
        result[column][3] = empty
    cell = read_cell(ASK, result | {"completed": 11, "failed": 1})
    assert (cell.completed, cell.failed, cell.cut) == (11, 1, 0) and cell.ttft_ms.p50 > 1


def test_answers_of_one_token_have_no_time_between_tokens(result: dict[str, Any]) -> None:
    one = result | {"output_lens": [1] * 12, "itls": [[]] * 12, "latencies": result["ttfts"]}
    cell = read_cell(Ask(number=1, input_tokens=16, output_tokens=1, request_rate=20.0, prompts=12, seed=1), one)
    assert cell.completed == 12 and cell.itl_ms.p99 == cell.tpot_ms.p99 == 0


def test_a_cell_without_a_whole_request_is_an_error_that_says_why(cut_result: dict[str, Any]) -> None:
    lengths = [0] + [3] * 11
    with pytest.raises(EngineError, match=r"none of 12 requests was completed: 1 failed, 11 ended early"):
        read_cell(ASK, cut_result | {"output_lens": lengths, "completed": 11, "failed": 1})


@pytest.mark.parametrize(
    "name", ["input_lens", "output_lens", "ttfts", "latencies", "itls", "completed", "failed", "duration"]
)
@pytest.mark.parametrize(
    "value", ["missing", None, "x", [], [None] * 12, ["x"] * 12, math.nan, -1, [math.nan] * 12, [-1] * 12, math.inf]
)
def test_a_damaged_result_is_one_line(name: str, value: Any, result: dict[str, Any]) -> None:
    damaged = {key: item for key, item in (result | {name: value}).items() if (key, value) != (name, "missing")}
    with pytest.raises(
        EngineError, match=r"^bench: cell 1 \(16 tokens in at 20 requests/s\): 01-16in-20rps\.json [^\n]*$"
    ):
        read_cell(ASK, damaged)


@pytest.mark.parametrize(
    "change",
    [
        {"completed": 11},
        {"failed": 1},
        {"completed": 11, "failed": 1},
        {"completed": 13, "failed": -1},
        {"duration": 0},
    ],
)
def test_a_result_that_contradicts_itself_is_one_line(change: dict[str, Any], result: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"01-16in-20rps\.json contradicts itself"):
        read_cell(ASK, result | change)


def test_a_result_of_other_requests_is_one_line(result: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"12 told of, 11 asked for"):
        read_cell(Ask(number=1, input_tokens=16, output_tokens=16, request_rate=20.0, prompts=11, seed=1), result)


def test_only_streams_that_ended_early_are_a_notice(result: dict[str, Any], cut_result: dict[str, Any]) -> None:
    whole, cut = read_cell(ASK, result), read_cell(ASK, cut_result)
    assert notices_of([whole]) == ()
    assert notices_of([whole, cut])[0].startswith("3 of 24 requests ")


def test_a_long_prompt_and_a_low_rate_may_be_quiet_for_longer() -> None:
    assert ASK.quiet_s == pytest.approx(120 + 1.6 + 1)
    slow = Ask(number=1, input_tokens=4096, output_tokens=16, request_rate=0.1, prompts=12, seed=1)
    assert slow.quiet_s == pytest.approx(120 + 409.6 + 200)
