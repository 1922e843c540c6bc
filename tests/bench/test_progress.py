import pytest

from gemsmith.bench.cell import Count, LoadSpec
from gemsmith.bench.sweep import expected_s
from gemsmith.recipe.serving import BURST, Load
from gemsmith.runs.bench_records import BenchCell, Percentiles

NONE = Percentiles(mean=0, p50=0, p90=0, p99=0)


def ask(rate: float, *, tokens: int = 64) -> LoadSpec:
    load = Load(input_tokens=tokens, output_tokens=10, request_rate=rate)
    return LoadSpec(number=1, load=load, count=Count(warmup=20, measured=80), seed=0)


def cell(speed: float, *, tokens: int = 64) -> BenchCell:
    return BenchCell(
        input_tokens=tokens,
        output_tokens=10,
        request_rate=1.0,
        completed=80,
        failed=0,
        real_input_tokens=64,
        real_output_tokens=10,
        duration_s=1,
        ttft_ms=NONE,
        tpot_ms=NONE,
        itl_ms=NONE,
        e2e_ms=NONE,
        output_tokens_per_s=speed,
        requests_per_s=1,
    )


def test_a_cell_takes_as_long_as_its_requests_arrive_or_are_answered() -> None:
    assert expected_s(ask(2), []) == 50
    assert expected_s(ask(2), [cell(100)]) == 50
    assert expected_s(ask(2), [cell(5)]) == 200
    assert expected_s(ask(BURST), [cell(100)]) == pytest.approx(10)


def test_the_speed_is_that_with_prompts_of_the_same_length_where_there_is_one() -> None:
    done = [cell(100), cell(10, tokens=8192)]
    assert expected_s(ask(BURST, tokens=8192), done) == 100
    assert expected_s(ask(BURST, tokens=512), done) == 10
