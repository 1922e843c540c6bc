"""Whether the tuned model scores otherwise than the base. Both answer the same rows; only those that differ count."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANT = 0.05
"""A p-value below it tells the two scores apart."""
# Were all of fewer rows to change in the same way, chance alone would do that more often: 2 × 0.5⁵ = 0.0625.
_FEWEST_ROWS = 6


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many rows each model has right, how many only one of them has, and the p-value of that."""

    rows: int
    base_right: int
    tuned_right: int
    better: int
    worse: int
    p_value: float


def compare(base: Sequence[bool], tuned: Sequence[bool]) -> Comparison:
    """The two models' answers to the same rows, right or wrong, row by row."""
    pairs = list(zip(base, tuned, strict=True))
    better, worse = pairs.count((False, True)), pairs.count((True, False))
    return Comparison(
        rows=len(pairs),
        base_right=sum(base),
        tuned_right=sum(tuned),
        better=better,
        worse=worse,
        p_value=mcnemar_p_value(better, worse),
    )


def mcnemar_p_value(better: int, worse: int) -> float:
    """The two-sided p-value of the exact McNemar test.

    It is how likely a fair coin splits the differing rows at least this unevenly.

    With n = better + worse: min(1, 2 Σ C(n, k) / 2ⁿ) for k from 0 to min(better, worse); 1 where no row differs.
    McNemar, Psychometrika 12 (1947) 153; exact: Fagerland, Lydersen and Laake, BMC Medical Research Methodology 13
    (2013) 91.

    >>> mcnemar_p_value(3, 2), mcnemar_p_value(0, 6)
    (1.0, 0.03125)
    """
    n, fewer = better + worse, min(better, worse)
    if 2 * fewer >= n - 1:  # as even as can be, where the sum is 1 and rounding must not make it less
        return 1.0
    if n < 1000:
        return 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    # In logarithms: such a binomial has hundreds of digits.
    logarithms = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(math.exp(logarithm) for logarithm in logarithms))


def describe_change(better: int, worse: int, p_value: float) -> str:
    """The rows in which the two models differ, in words.

    >>> describe_change(1, 40, 4e-11)
    '1 row better, 40 worse; exact McNemar test, p < 0.001'
    """
    size = f"p = {p_value:.3g}" if p_value >= 0.001 else "p < 0.001"
    return f"{better:,} row{'s' if better != 1 else ''} better, {worse:,} worse; exact McNemar test, {size}"


def worse_notices(found: Comparison) -> tuple[str, ...]:
    """That the tuned model scores lower, where it does so beyond chance."""
    if found.p_value >= SIGNIFICANT or found.better > found.worse:
        return ()
    return (f"The tuned model scores lower than the base: {_describe(found)}; do not use it for this task.",)


def unmoved_notices(found: Comparison) -> tuple[str, ...]:
    """That the score did not move, where chance alone could have moved it as far."""
    if found.p_value < SIGNIFICANT:
        return ()
    moved = "did not move" if found.base_right == found.tuned_right else "did not move beyond chance"
    return (f"The score {moved}: {_describe(found)}; {_advice(found)}.",)


def _describe(found: Comparison) -> str:
    rows = describe_change(found.better, found.worse, found.p_value)
    return f"base {found.base_right:,} of {found.rows:,} right, tuned {found.tuned_right:,} of {found.rows:,} ({rows})"


def _advice(found: Comparison) -> str:
    if found.rows < _FEWEST_ROWS:
        return f"fewer than {_FEWEST_ROWS} rows cannot tell two models apart, whatever the answers: hold out more"
    if found.tuned_right == found.base_right == 0:
        return "look in logs/eval_rows.jsonl whether eval.scorer fits the answers"
    if found.tuned_right == found.base_right == found.rows:
        return "these rows are too easy to tell the two apart"
    if found.better + found.worse == 0:
        return "look in logs/eval_rows.jsonl whether the answers differ at all"
    return "more held-out rows would show a smaller difference, more training may make a larger one"
