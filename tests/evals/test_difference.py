import doctest
import math

import numpy as np
import pytest

from gemsmith.evals import metrics as module
from gemsmith.evals.metrics import (
    bootstrap_interval,
    compare_paired,
    mcnemar_p_value,
    questions_to_see,
    sign_flip_p_value,
)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(module).failed == 0


def test_models_that_answer_alike_are_not_told_apart_and_say_nothing_of_other_questions():
    same = [0.2, 0.4, 1.0] * 20
    found = compare_paired(same, same)
    assert (found.mean, found.low, found.high, found.p_value, found.significant) == (0, 0, 0, 1, False)
    assert found.sample_size_for_2pp is None and "answer every question alike" in found.summary


def test_a_difference_that_is_there_is_said_and_its_direction():
    base = [0.0, 0.2, 0.4] * 50
    tuned = [value + (0.4 if number % 2 else 0.0) for number, value in enumerate(base)]
    better, worse = compare_paired(base, tuned), compare_paired(tuned, base)
    assert better.significant and worse.significant
    assert (better.mean, better.better, better.worse) == (pytest.approx(0.2), 75, 0)
    assert better.low == pytest.approx(-worse.high, abs=0.01) and 0.1 < better.low < 0.2 < better.high < 0.3
    assert better.summary.startswith("The tuned model is better than the base: 40.0 % against 20.0 %, +20.0 points (95")
    assert worse.summary.startswith("The tuned model is worse than the base: ")


def test_a_handful_of_questions_tells_nothing_whatever_the_answers():
    """The bootstrap alone would: its interval of five equal differences is a point."""
    for count, told in ((3, False), (5, False), (6, True)):
        found = compare_paired([0.0] * count, [1.0] * count)
        assert (found.low, found.high, found.significant) == (1, 1, told)


def test_no_right_answer_at_all_is_said():
    assert compare_paired([0.0] * 3, [0.0] * 3).summary.startswith("Neither model has a right answer to any of 3 ")


def test_noise_is_called_a_difference_in_about_one_case_of_twenty():
    generator = np.random.default_rng(1)
    told = 0
    for _ in range(60):
        shares = generator.beta(0.5, 0.5, size=80)
        base, tuned = (generator.binomial(5, shares) / 5 for _ in range(2))
        told += compare_paired(base, tuned).significant
    assert told <= 8  # of 60; more have a chance of 1 in 200


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 0), (9, 1), (40, 25)])
def test_rows_that_are_right_or_wrong_get_mcnemars_p_value(better, worse):
    assert sign_flip_p_value([1] * better + [-1] * worse + [0] * 7) == mcnemar_p_value(better, worse)


def test_the_sampled_p_value_is_that_of_all_choices_of_signs():
    values = np.array([0.2, 0.4, -0.2, 0.6, 0.4, 0.8, -0.4, 0.2, 0.2, 0.6])
    signs = 1 - 2 * ((np.arange(2**10)[:, None] >> np.arange(10)) & 1)
    exact = (np.abs(signs @ values) >= abs(values.sum()) - 1e-9).mean()
    assert sign_flip_p_value(values) == pytest.approx(exact, abs=0.01)


def test_the_interval_is_the_normal_one_where_questions_are_many():
    values = np.random.default_rng(2).normal(0.1, 0.4, size=2000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(values.mean() - half, abs=0.002) and high == pytest.approx(
        values.mean() + half, abs=0.002
    )


def test_as_many_questions_as_the_formula_asks_for_show_the_difference_four_times_in_five():
    deviation, effect = 0.3, 0.1
    needed = questions_to_see(effect, deviation=deviation)
    assert needed == 71
    generator = np.random.default_rng(3)
    samples = generator.normal(effect, deviation, size=(4000, needed))
    seen = (np.abs(samples.mean(axis=1)) > 1.96 * deviation / math.sqrt(needed)).mean()
    assert seen == pytest.approx(0.8, abs=0.02)
    assert questions_to_see(effect, deviation=0.0) is None
