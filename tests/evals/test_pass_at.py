"""pass@k against counting, and its interval."""

from itertools import combinations

import pytest

from gemsmith.evals.metrics import mean_interval, pass_at, wilson_interval


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(samples):
    for passed in range(samples + 1):
        right = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            chosen = list(combinations(right, k))
            assert pass_at(k, samples=samples, passed=passed) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_an_interval_of_noughts_and_ones_is_wilsons():
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson_interval(3, 4)


def test_an_interval_over_problems_is_about_two_standard_errors_and_the_same_again():
    values = [0.2, 0.4, 0.6, 0.8, 1.0] * 20
    low, high = mean_interval(values)
    assert (low, high) == mean_interval(values)
    assert low == pytest.approx(0.6 - 1.96 * 0.0283, abs=0.005) and high == pytest.approx(
        0.6 + 1.96 * 0.0283, abs=0.005
    )
