import math

import pytest

from gemsmith.analysis.cost import cost_curve
from gemsmith.analysis.sides import finite


def test_a_load_in_words_tells_loads_apart(cell):
    cells = [
        cell(),
        cell(request_rate=4.0),
        cell(request_rate=4.5),
        cell(max_concurrency=64),
        cell(request_rate=4.0, max_concurrency=64),
        cell(asked="rate not said"),
        cell(input_tokens=65),
    ]
    assert len({each.load for each in cells}) == len(cells)
    assert cells[0].load == "64 in, 32 out, a burst"


def test_costs_are_hours_times_price(plain_side, rented):
    side = plain_side(train_hours=3.0, train_rates=rented(16.0), serve_rates=rented(20.0))
    assert side.train_usd("on demand") == 48.0 and side.train_usd("spot") == 12.0
    assert plain_side(train_hours=3.0).train_usd("on demand") is None
    assert cost_curve(side, side, "on demand").usd(10) == (248.0, 248.0)
    assert cost_curve(side, plain_side(train_hours=3.0, train_rates=rented(16.0)), "spot") is None


def test_tokens_are_those_recorded_or_what_speed_and_hours_say(plain_side):
    assert plain_side(tokens=5.0, real_tokens_per_s=1.0, train_hours=1.0).trained_tokens == 5.0
    assert plain_side(real_tokens_per_s=2.0, train_hours=1.0).trained_tokens == 7200.0
    assert plain_side(real_tokens_per_s=2.0).trained_tokens is None


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_not_finite_is_none(value):
    assert finite(value) is None


def test_what_is_finite_stays():
    assert finite(1.5) == 1.5
