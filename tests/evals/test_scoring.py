import pytest

from gemsmith.evals.generate import GradedAnswer
from gemsmith.evals.metrics import wilson_interval
from gemsmith.evals.results import score


# The first four: Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3. The last: n / (n + z²).
@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_the_interval_is_wilsons(right: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(right, n) == pytest.approx((low, high), abs=5.1e-5)


def test_the_interval_is_symmetric_in_right_and_wrong_and_holds_the_share() -> None:
    for right in range(51):
        low, high = wilson_interval(right, 50)
        other_low, other_high = wilson_interval(50 - right, 50)
        assert (low, high) == pytest.approx((1 - other_high, 1 - other_low), abs=1e-12)
        assert 0 <= low <= right / 50 <= high <= 1


def test_a_score_counts() -> None:
    right = [GradedAnswer(text="", right=True, cut=cut) for cut in (True, False, False)]
    found = score([(answer,) for answer in (*right, GradedAnswer(text="", right=False, cut=False, failed="timeout"))])
    assert (found.score, found.n, found.cut, found.failed, found.ungraded) == (0.75, 4, 1, {"timeout": 1}, {})
    assert found.low < 0.75 < found.high


def test_other_measures_of_the_same_answers_have_shares_and_intervals_of_their_own() -> None:
    verdicts = [(True, True), (False, True), (False, True), (False, False)]
    found = score(
        [
            (GradedAnswer(text="", right=right, cut=False, others={"length-normalized": normalized}),)
            for right, normalized in verdicts
        ]
    )
    assert (found.score, found.others["length-normalized"].score) == (0.25, 0.75)
    assert found.others["length-normalized"].low < 0.75 < found.others["length-normalized"].high
