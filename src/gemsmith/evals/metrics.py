"""How sure a score is, and whether two models' scores on the same questions differ: 95 % intervals and p-values."""

import math
from collections.abc import Sequence

import numpy as np

from gemsmith.runs.eval_records import Difference, PassAt, ProblemScore

# scipy.stats is imported where it is called: that takes a second, and `gemsmith runs` reads SIGNIFICANT.

SIGNIFICANT = 0.05  # a p-value below it tells the two scores apart
# Were all of fewer questions to change in the same way, chance alone would do that more often: 2 × 0.5⁵ = 0.0625.
_FEWEST_QUESTIONS = 6
KS = (1, 5)  # pass@k is given for those of these that every problem has enough answers for
RESAMPLES, SEED = 10_000, 0
# Numbers in memory at once while resampling.
_MOST_DRAWN = 10_000_000
POINTS = 0.02
Z_95, Z_80 = 1.959963984540054, 0.8416212335729143
"""Quantiles of the normal distribution: 2.5 % left out on each side; a difference is seen four times in five."""


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927, JASA 22:209) for a share of `right` in `n`, inside [0, 1] and never empty."""
    from scipy import stats

    found = stats.binomtest(right, n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """The unbiased estimate from n samples of which c passed, 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at(1, samples=5, passed=2), pass_at(5, samples=5, passed=1)
    (0.4, 1.0)
    """
    assert 0 <= passed <= samples and 0 < k <= samples
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_at_each(problems: Sequence[ProblemScore]) -> tuple[PassAt, ...]:
    """pass@k with its interval for each of KS, over these problems."""
    fewest = min((problem.samples for problem in problems), default=0)
    found = []
    for k in (k for k in KS if k <= fewest):
        values = [pass_at(k, samples=problem.samples, passed=problem.passed) for problem in problems]
        low, high = mean_interval(values)
        found.append(PassAt(k=k, score=sum(values) / len(values), low=low, high=high))
    return tuple(found)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over problems, which are what was drawn; Wilson's where each value is 0 or 1."""
    if set(values) <= {0.0, 1.0}:
        return wilson_interval(int(sum(values)), len(values))
    return bootstrap_interval(values)


def bootstrap_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean: the quantiles of 10,000 resamples, seeded."""
    from scipy import stats

    values = np.asarray(values, dtype=float)
    if len(set(values)) == 1:  # scipy refuses one value alone
        return float(values[0]), float(values[0])
    found = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=SEED, batch=_batch(len(values))
    ).confidence_interval
    return float(found.low), float(found.high)


def sign_flip_p_value(differences: Sequence[float] | np.ndarray) -> float:
    """The two-sided p-value of the paired randomization test of a mean of 0 (Fisher 1935, The Design of Experiments).

    Were the two models alike, each difference would have either sign as likely: p is the share of all 2ⁿ choices of
    signs whose sum is at least as far from 0. Where all that differ do so by as much it is McNemar's exact test
    (Psychometrika 12 (1947) 153); else, where there are more than 10,000 choices, so many of them, seeded, with the one
    that was seen counted among them (Phipson and Smyth 2010).

    >>> sign_flip_p_value([1, 1, 1, 1, 1, 1, 0]), sign_flip_p_value([0, 0])
    (0.03125, 1.0)
    """
    from scipy import stats

    values = np.asarray(differences, dtype=float)
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(set(np.abs(values))) == 1:
        return float(stats.binomtest(int((values > 0).sum()), len(values)).pvalue)
    found = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=SEED, batch=_batch(len(values))
    )
    return float(found.pvalue)


def _batch(values: int) -> int:
    return max(1, _MOST_DRAWN // values)


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


def compare_paired(base: Sequence[float], tuned: Sequence[float]) -> Difference:
    """The difference of two models' scores, one for each question, both in the same order.

    It is told apart from chance where the sign-flip test says so and the interval of the paired bootstrap leaves out 0:
    the one knows that a handful of questions can tell nothing, the other is the interval that is shown.
    """
    differences = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    low, high = bootstrap_interval(differences)
    p_value = sign_flip_p_value(differences)
    found = Difference(
        mean=float(differences.mean()),
        low=low,
        high=high,
        p_value=p_value,
        significant=p_value < SIGNIFICANT and not low <= 0 <= high,
        questions=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        sample_size_for_2pp=questions_to_see(POINTS, deviation=float(differences.std())),
        summary="",
    )
    return found.model_copy(update={"summary": describe_difference(found, base=float(np.mean(base)))})


def describe_difference(found: Difference, *, base: float) -> str:
    """The comparison with the base's score in plain words."""
    size = f"p = {found.p_value:.3g}" if found.p_value >= 0.001 else "p < 0.001"
    mean, low, high = (f"{100 * value:+.1f}" for value in (found.mean, found.low, found.high))
    shares = f"{100 * (base + found.mean):.1f} % against {100 * base:.1f} %"
    questions = f"{found.questions:,} questions, {found.better:,} better and {found.worse:,} worse"
    numbers = f"{shares}, {mean} points (95 % interval {low} to {high} over {questions}, {size})"
    if found.significant:
        return f"The tuned model is {'better' if found.mean > 0 else 'worse'} than the base: {numbers}."
    if found.better == found.worse == 0 and base == 0:
        neither = f"Neither model has a right answer to any of {found.questions:,} questions"
        look = "look in logs/eval_rows.jsonl whether the scorer fits the answers"
        return f"{neither}, so nothing tells them apart; {look}."
    if found.questions < _FEWEST_QUESTIONS:
        more = f"fewer than {_FEWEST_QUESTIONS} questions cannot tell two models apart, whatever the answers"
    elif found.sample_size_for_2pp:
        more = f"to see a difference of 2 points would take about {found.sample_size_for_2pp:,} questions like these"
    elif base == 1:
        more = "these questions are too easy to tell the two apart"
    else:
        more = "they answer every question alike: look in logs/eval_rows.jsonl whether the answers differ at all"
    return f"This does not tell the tuned model from the base: {numbers}; {more}."
