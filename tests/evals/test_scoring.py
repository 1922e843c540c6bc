import pytest

from gemsmith.evals.scoring import is_right, score, wilson_interval


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


def test_exact_ignores_white_space_at_the_ends_alone() -> None:
    assert is_right(" yes\n", "yes", "exact")
    assert not is_right("y es", "yes", "exact") and not is_right("Yes", "yes", "exact")


def test_verilog_exact_ignores_spacing_and_comments_and_nothing_else() -> None:
    expected = "module m(input a, output y);\n  assign y = ~a;\nendmodule"
    assert is_right(
        "Here it is:\nmodule m( input a, output y );  // one\nassign y=~a; /* two */\nendmodule\n",
        expected,
        "verilog-exact",
    )
    assert not is_right(expected.replace("~a", "a"), expected, "verilog-exact")
    assert not is_right("", expected, "verilog-exact")


def test_a_score_counts() -> None:
    found = score([True, False, True, True], cut=1)
    assert (found.score, found.n, found.cut) == (0.75, 4, 1)
    assert found.low < 0.75 < found.high
