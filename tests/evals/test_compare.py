import doctest
import json
import math
from pathlib import Path

import pytest

from gemsmith.evals import metrics as module
from gemsmith.evals.metrics import Comparison, compare, mcnemar_p_value, unmoved_notices, worse_notices

DEMO = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "eval.json"


def comparison(both: int, better: int, worse: int, neither: int) -> Comparison:
    base = [True] * both + [False] * better + [True] * worse + [False] * neither
    tuned = [True] * both + [True] * better + [False] * worse + [False] * neither
    return compare(base, tuned)


def test_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


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
def test_the_p_value_is_that_of_a_fair_coin(better: int, worse: int, expected: float) -> None:
    assert mcnemar_p_value(better, worse) == mcnemar_p_value(worse, better) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("better", "worse"), [(540, 460), (600, 401), (999, 1), (1050, 950)])
def test_many_rows_give_the_same_p_value_by_logarithms(better: int, worse: int) -> None:
    n = better + worse
    exact = 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n
    assert mcnemar_p_value(better, worse) == pytest.approx(exact, rel=1e-9)


def test_a_million_rows_that_differ_take_no_time() -> None:
    assert mcnemar_p_value(500_000, 499_000) == pytest.approx(0.3176, abs=1e-3)  # the normal approximation's


def test_rows_are_compared_in_pairs() -> None:
    found = comparison(both=10, better=3, worse=2, neither=185)
    assert (found.rows, found.base_right, found.tuned_right, found.better, found.worse) == (200, 12, 13, 3, 2)
    with pytest.raises(ValueError, match="longer"):
        compare([True], [True, False])


@pytest.mark.parametrize(("counts", "says"), [
    ((10, 3, 2, 185), "The score did not move beyond chance: base 12 of 200 right, tuned 13 of 200 (3 rows better, 2 "
                      "worse; "),
    ((10, 1, 1, 188), "The score did not move: base 11 of 200 right, tuned 11 of 200 (1 row better, 1 worse; exact "
                      "McNemar test, p = 1); "),
    ((12, 0, 0, 188), "whether the answers differ at all"),
    ((0, 0, 0, 200), "whether eval.scorer fits the answers"),
    ((200, 0, 0, 0), "these rows are too easy"),
    ((0, 3, 0, 0), "fewer than 6 rows cannot tell two models apart"),
    ((0, 5, 0, 195), "p = 0.0625"),
    ((100, 3, 9, 0), "beyond chance"),
])  # fmt: skip
def test_a_score_that_did_not_move_is_said(counts: tuple[int, ...], says: str) -> None:
    found = comparison(*counts)
    (notice,) = unmoved_notices(found)
    assert says in notice
    assert worse_notices(found) == ()


@pytest.mark.parametrize("counts", [(0, 194, 0, 6), (100, 20, 5, 0), (0, 6, 0, 0)])
def test_a_score_that_rose_is_no_notice(counts: tuple[int, ...]) -> None:
    found = comparison(*counts)
    assert unmoved_notices(found) == worse_notices(found) == ()


def test_a_score_that_fell_is_a_grave_notice() -> None:
    found = comparison(both=11, better=1, worse=39, neither=149)
    assert unmoved_notices(found) == ()
    (notice,) = worse_notices(found)
    assert notice.startswith(
        "The tuned model scores lower than the base: base 50 of 200 right, tuned 12 of 200 (1 row better, 39 worse; "
    )
    assert "p < 0.001" in notice


def test_the_demos_score_moved() -> None:
    record = json.loads(DEMO.read_text())
    right = [round(record[name]["score"] * record[name]["n"]) for name in ("base", "tuned")]
    assert right == [0, 195]
    assert unmoved_notices(comparison(both=0, better=195, worse=0, neither=5)) == ()
