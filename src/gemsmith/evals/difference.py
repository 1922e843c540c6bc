"""Whether one model scores higher than another on the same questions, and how many it would take to see 2 points."""

import math
from collections.abc import Sequence

import numpy as np

from gemsmith.eval_records import Difference
from gemsmith.evals.compare import SIGNIFICANT, mcnemar_p_value
from gemsmith.evals.pass_at import RESAMPLES, SEED
from gemsmith.evals.scoring import Z_95

POINTS = 0.02
Z_80 = 0.8416212335729143
"""The 80 % quantile of the normal distribution: a difference that is there is seen four times in five."""


def compare_paired(base: Sequence[float], tuned: Sequence[float]) -> Difference:
    """The difference of two models' scores, one for each question, both in the same order.

    It is told apart from chance where the sign-flip test says so and the interval of the paired bootstrap leaves out 0:
    the one knows that a handful of questions can tell nothing, the other is the interval that is shown.
    """
    differences = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    assert len(differences)
    low, high = bootstrap_interval(differences)
    p_value = sign_flip_p_value(differences)
    mean = float(differences.mean())
    told_apart = p_value < SIGNIFICANT and not low <= 0 <= high
    needed = questions_to_see(POINTS, deviation=float(differences.std()))
    return Difference(
        mean=mean,
        low=low,
        high=high,
        p_value=p_value,
        told_apart=told_apart,
        questions=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        questions_for_2_points=needed,
        summary=_describe(base, tuned, (mean, low, high), p_value, told_apart=told_apart, needed=needed),
    )


def bootstrap_interval(differences: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean difference: the quantiles of 10,000 resamples of the questions, seeded.

    A question is drawn with both its scores, so what makes it easy or hard for both models cancels.
    """
    values = np.asarray(differences, dtype=float)
    generator = np.random.default_rng(SEED)
    means = np.concatenate([
        values[generator.integers(len(values), size=(count, len(values)))].mean(axis=1)
        for count in _chunks(len(values))
    ])  # fmt: skip
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def sign_flip_p_value(differences: Sequence[float] | np.ndarray) -> float:
    """The two-sided p-value of the paired randomisation test of a mean of 0 (Fisher 1935, The Design of Experiments).

    Were the two models alike, each difference would have either sign as likely: p is the share of all 2ⁿ choices of
    signs whose sum is at least as far from 0. Where all that differ do so by as much it is McNemar's exact test; else
    10,000 choices, seeded, with the one that was seen counted among them (Phipson and Smyth 2010).

    >>> sign_flip_p_value([1, 1, 1, 1, 1, 1, 0]), sign_flip_p_value([0, 0])
    (0.03125, 1.0)
    """
    values = np.asarray(differences, dtype=float)
    values = values[values != 0]
    if len(set(np.abs(values))) <= 1:
        return mcnemar_p_value(int((values > 0).sum()), int((values < 0).sum()))
    generator = np.random.default_rng(SEED)
    seen = abs(values.sum()) - 1e-9  # what rounding makes of an equal sum
    as_far = sum(
        int((np.abs(generator.choice((-1.0, 1.0), size=(count, len(values))) @ values) >= seen).sum())
        for count in _chunks(len(values))
    )
    return (as_far + 1) / (RESAMPLES + 1)


def questions_to_see(difference: float, *, deviation: float) -> int | None:
    """How many questions tell a difference of the mean from 0 at the 5 % level, with a power of 80 %.

    With σ the standard deviation of the questions' differences: n = ((z₀.₉₇₅ + z₀.₈) σ / difference)², rounded up;
    None where σ is 0, which says nothing of other questions. Of rows that are right or wrong, with shares b and c that
    only one model has right, σ² = b + c - (b - c)², and n is that of McNemar's test (Connor 1987, Biometrics 43:207).

    >>> questions_to_see(0.02, deviation=0.3)
    1766
    """
    assert difference > 0 <= deviation
    return math.ceil(((Z_95 + Z_80) * deviation / difference) ** 2) if deviation > 0 else None


def _chunks(questions: int) -> list[int]:
    """RESAMPLES in pieces of at most ten million numbers."""
    piece = max(1, min(RESAMPLES, 10_000_000 // questions))
    return [min(piece, RESAMPLES - start) for start in range(0, RESAMPLES, piece)]


def _describe(
    base: Sequence[float],
    tuned: Sequence[float],
    seen: tuple[float, float, float],
    p_value: float,
    *,
    told_apart: bool,
    needed: int | None,
) -> str:
    """The comparison in plain words."""
    scores = [sum(values) / len(values) for values in (base, tuned)]
    if not any(scores):
        return f"Neither model has a right answer to any of {len(base):,} questions, so nothing tells them apart."
    size = f"p = {p_value:.3g}" if p_value >= 0.001 else "p < 0.001"
    mean, low, high = (f"{100 * value:+.1f}" for value in seen)
    numbers = (
        f"{100 * scores[1]:.1f} % against {100 * scores[0]:.1f} %, {mean} points (95 % interval {low} to {high} over "
        f"{len(base):,} questions, {size})"
    )
    if told_apart:
        return f"The tuned model is {'better' if seen[0] > 0 else 'worse'} than the base: {numbers}."
    more = (
        f"; to see a difference of 2 points would take about {needed:,} questions like these"
        if needed
        else "; they answer every question alike"
    )
    return f"This does not tell the tuned model from the base: {numbers}{more}."
