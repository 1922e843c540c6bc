import json

import pytest

from gemsmith.analysis.compare import compare_sides
from gemsmith.analysis.cost import Curve
from gemsmith.analysis.ratios import common_cells
from gemsmith.analysis.summary import read_sides
from gemsmith.report import bench_charts as charts
from gemsmith.system.format import decimal


@pytest.fixture
def comparison(make_run):
    return compare_sides(read_sides([make_run(name, steps=steps).path for name, steps in (("a", 60), ("b", 90))]))


@pytest.fixture(autouse=True)
def drawn_nowhere(undrawn):
    pass


def test_losses_say_whether_they_are_of_the_same_tokens(comparison, make_run):
    chart = charts.loss_chart(comparison)
    assert "not of the same tokens: data:loss_mask_sha256" in chart.unit
    assert [words for *_, words in chart.legend] == ["a", "b"]
    alone = compare_sides(read_sides([make_run("c").path, make_run("d", without=("train",)).path]))
    assert charts.loss_chart(alone) is None


def test_bars_say_the_recorded_numbers(comparison):
    pair = comparison.pairs[0]
    first = comparison.sides[0].cells[0]
    assert f"{first.load}: {first.output_tokens_per_s:.0f}" in charts.serving_charts(comparison, pair)[0].alt
    throughput, ttft, tpot = charts.serving_charts(comparison, pair)
    assert ttft.unit.startswith("ms") and tpot.title == "Time per output token (TPOT)"
    assert f"{first.load}: {decimal(first.tpot_ms)}" in tpot.alt and tpot.alt != throughput.alt


def test_the_values_under_the_pointer_are_the_records(comparison):
    pair, (first, other) = comparison.pairs[0], comparison.sides
    words = [words for *_, words in json.loads(charts.serving_charts(comparison, pair)[0].points)]
    cells = [
        (side, cell) for pair in common_cells(first, other) for side, cell in zip((first, other), pair, strict=True)
    ]
    assert words == [
        f"{side.name}, {cell.load}: {decimal(cell.output_tokens_per_s)} output tokens/s" for side, cell in cells
    ]
    losses = [words for *_, words in json.loads(charts.loss_chart(comparison).points)]
    assert len(losses) == len(first.losses) + len(other.losses) and losses[0].startswith("a, step 1: ")


def test_a_cost_has_values_at_its_ends_and_at_the_break_even():
    curve = Curve(way="spot", trained_usd=(1, 2), usd_per_hour=(2, 1), machines=("", ""), break_even_hours=1.0)
    words = [words for *_, words in json.loads(charts.cost_chart(curve, ("a", "b")).points)]
    assert words[0] == "a, training and 0 h of serving: $1.00" and words[-1].endswith("24.0 h of serving: $26.00")
    assert {f"{name}, training and 1.00 h of serving: $3.00" for name in "ab"} <= set(words)


def test_without_a_common_load_there_are_no_bars(make_run):
    paths = [make_run("a", lengths=(128,)).path, make_run("b", lengths=(256,)).path]
    compared = compare_sides(read_sides(paths))
    assert charts.serving_charts(compared, compared.pairs[0]) == []


def test_the_third_side_keeps_its_color(make_run):
    compared = compare_sides(read_sides([make_run(name).path for name in "abc"]))
    assert [color for color, *_ in charts.serving_charts(compared, compared.pairs[1])[0].legend] == ["s1", "s3"]
    assert [color for color, *_ in charts.loss_chart(compared).legend] == ["s1", "s2", "s3"]


def test_a_break_even_is_drawn_where_it_is_within_a_month():
    def curve(even):
        return Curve(way="spot", trained_usd=(1, 2), usd_per_hour=(2, 1), machines=("", ""), break_even_hours=even)

    assert "the same after 16.6 h" in str(charts.cost_chart(curve(16.6), ("a", "b")).legend)
    assert "the same" not in str(charts.cost_chart(curve(5000.0), ("a", "b")).legend)
    assert "the same" not in str(charts.cost_chart(curve(None), ("a", "b")).legend)
