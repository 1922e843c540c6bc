import pytest

from gemsmith.analysis.cost import break_even, cost_curve


@pytest.fixture
def curve_of(plain_side, rented):
    def make(first, other):
        sides = [
            plain_side(name, train_hours=1.0, train_rates=rented(trained), serve_rates=rented(rate))
            for name, (trained, rate) in (("a", first), ("b", other))
        ]
        return cost_curve(*sides, "on demand")

    return make


def test_the_two_cost_the_same_at_the_break_even(curve_of):
    curve = curve_of((56.11, 25.92), (119.23, 22.12))
    first, other = curve.usd(curve.break_even_hours)
    assert first == pytest.approx(other, rel=1e-12) and curve.break_even_hours == pytest.approx(16.61, abs=0.01)
    assert curve.say("TPU", "GPU") == "TPU is cheaper up to 16.6 h of serving, GPU from then on."


def test_lines_that_meet_before_the_start_never_meet(curve_of):
    curve = curve_of((56.11, 21.52), (119.23, 22.12))
    assert curve.break_even_hours is None
    assert curve.say("TPU", "GPU") == "TPU is cheaper at any time; GPU / TPU goes from 2.12 to 1.03."
    for hours, ratio in ((1, 1.82), (24, 1.135)):
        first, other = curve.usd(hours)
        assert other / first == pytest.approx(ratio, abs=0.001)


def test_parallel_lines_never_meet(curve_of):
    assert break_even(1, 2, 3, 3) is None
    assert curve_of((1, 3), (1, 3)).say("a", "b") == "Both cost the same at any time."
    assert curve_of((2, 3), (1, 3)).say("a", "b").startswith("b is cheaper at any time")


def test_without_a_price_there_is_no_curve(plain_side, rented):
    priced = plain_side(train_hours=1.0, train_rates=rented(1), serve_rates=rented(1))
    assert cost_curve(priced, plain_side("b", train_hours=1.0), "spot") is None
    free = plain_side(train_hours=1.0, train_rates=rented(0), serve_rates=rented(0))
    assert cost_curve(free, free, "spot") is None
