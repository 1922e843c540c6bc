import doctest
import json
import math
from pathlib import Path

import numpy as np
import pytest

from gemsmith.evals import metrics as module
from gemsmith.evals.metrics import (
    bootstrap_interval,
    compare_paired,
    questions_to_see,
    sign_flip_p_value,
)

DEMO = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "eval.json"


def compare_rows(both, better, worse, neither):
    base = [True] * both + [False] * better + [True] * worse + [False] * neither
    tuned = [True] * both + [True] * better + [False] * worse + [False] * neither
    return compare_paired(base, tuned)


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


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


# By hand: 2 (C(12, 0) + C(12, 1) + C(12, 2)) / 2**12 = 158 / 4096, and so on.
@pytest.mark.parametrize(("better", "worse", "expected"), [
    (0, 0, 1.0),
    (1, 0, 1.0),
    (5, 5, 1.0),
    (5, 6, 1.0),
    (10, 2, 158 / 4096),
    (5, 0, 2 / 32),
    (6, 0, 2 / 64),
])  # fmt: skip
def test_rows_that_are_right_or_wrong_get_the_p_value_of_a_fair_coin(better, worse, expected):
    """McNemar's exact test."""
    for one, other in ((better, worse), (worse, better)):
        assert sign_flip_p_value([1] * one + [-1] * other + [0] * 7) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("better", "worse"), [(540, 460), (600, 401), (999, 1), (1050, 950)])
def test_many_rows_get_the_p_value_of_a_fair_coin(better, worse):
    n = better + worse
    exact = 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    assert sign_flip_p_value([1] * better + [-1] * worse) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("counts", "says"), [
    ((10, 3, 2, 185), "6.5 % against 6.0 %, +0.5 points (95 % interval -1.5 to +2.5 over 200 questions, 3 better and 2 "
                      "worse, p = 1); to see a difference of 2 points would take about 491 questions like these."),
    ((12, 0, 0, 188), "whether the answers differ at all"),
    ((0, 0, 0, 200), "whether the scorer fits the answers"),
    ((200, 0, 0, 0), "these questions are too easy"),
    ((0, 3, 0, 0), "fewer than 6 questions cannot tell two models apart"),
    ((0, 5, 0, 195), "p = 0.0625"),
    ((100, 3, 9, 0), "This does not tell the tuned model from the base"),
])  # fmt: skip
def test_a_score_that_did_not_move_is_said_with_what_would_show_more(counts, says):
    found = compare_rows(*counts)
    assert not found.significant and says in found.summary


@pytest.mark.parametrize("counts", [(0, 194, 0, 6), (100, 20, 5, 0), (0, 6, 0, 0)])
def test_rows_that_moved_beyond_chance_are_told_apart(counts):
    both, better, worse, neither = counts
    assert compare_rows(*counts).summary.startswith("The tuned model is better than the base: ")
    fell = compare_rows(both, worse, better, neither)
    assert fell.significant and fell.mean < 0 and (fell.better, fell.worse) == (worse, better)


def test_scores_are_compared_in_pairs():
    with pytest.raises(ValueError, match="broadcast"):
        compare_paired([1.0, 0.0, 1.0], [1.0, 0.0])


def test_the_demos_score_moved():
    record = json.loads(DEMO.read_text())
    right = [round(record[name]["score"] * record[name]["n"]) for name in ("base", "tuned")]
    assert right == [0, 195]
    assert compare_rows(both=0, better=195, worse=0, neither=5).significant


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
