"""How sure a share of right answers is.

Whether the tuned model scores otherwise than the base. Both answer the same rows; only those that differ count.

pass@k: how likely at least one of k answers to a problem is right.

Whether one model scores higher than another on the same questions, and how many it would take to see 2 points.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from gemsmith.runs.eval_records import Difference, PassAt, ProblemScore, Score, Share

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: 2.5 % left out on each side."""


def score(
    right: Sequence[bool],
    *,
    cut: int = 0,
    failed: Mapping[str, int] | None = None,
    ungraded: Mapping[str, int] | None = None,
    others: Mapping[str, int] | None = None,
) -> Score:
    """The share of right answers with its 95 % interval.

    `cut`: how many answers reached the limit of tokens. Of those not right, by reason, how many are no answers
    (`failed`) and how many could not be judged (`ungraded`). By other measures, how many are right (`others`).
    """
    low, high = wilson_interval(sum(right), len(right))
    return Score(
        score=sum(right) / len(right),
        low=low,
        high=high,
        n=len(right),
        cut=cut,
        failed=dict(failed or {}),
        ungraded=dict(ungraded or {}),
        others={name: _share(count, len(right)) for name, count in (others or {}).items()},
    )


def _share(right: int, n: int) -> Share:
    low, high = wilson_interval(right, n)
    return Share(score=right / n, low=low, high=high)


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927, JASA 22:209) for a share of `right` in `n`.

    With z the normal quantile and p = right / n: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n).
    Unlike the normal interval it stays inside [0, 1], and has a width where p is 0 or 1.
    """
    assert 0 <= right <= n and n > 0
    share, z2 = right / n, Z_95**2
    center = share + z2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low, high = ((center + sign * spread) / (1 + z2 / n) for sign in (-1, 1))
    # Rounding alone would put the ends at 1e-17 and 1 - 1e-16 there.
    return (0.0 if right == 0 else low, 1.0 if right == n else high)


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


def format_mcnemar(better: int, worse: int, p_value: float) -> str:
    """The rows in which the two models differ, in words.

    >>> format_mcnemar(1, 40, 4e-11)
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
    rows = format_mcnemar(found.better, found.worse, found.p_value)
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


KS = (1, 5)
"""pass@k is given for those of these that every problem has enough answers for."""
RESAMPLES, SEED = 10_000, 0


def pass_at(k: int, *, samples: int, passed: int) -> float:
    """The unbiased estimate from n samples of which c passed, 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv 2107.03374, equation 1.

    >>> pass_at(1, samples=5, passed=2), pass_at(5, samples=5, passed=1)
    (0.4, 1.0)
    """
    assert 0 <= passed <= samples and 0 < k <= samples
    return 1 - comb(samples - passed, k) / comb(samples, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over problems, which are what was drawn: samples of one problem are alike.

    Where each value is 0 or 1, Wilson's; else from the quantiles of 10,000 resamples of the problems, seeded.
    """
    if set(values) <= {0.0, 1.0}:
        return wilson_interval(int(sum(values)), len(values))
    chosen = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[chosen].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def pass_at_each(problems: Sequence[ProblemScore]) -> tuple[PassAt, ...]:
    """pass@k with its interval for each of KS, over these problems."""
    fewest = min((problem.samples for problem in problems), default=0)
    found = []
    for k in (k for k in KS if k <= fewest):
        values = [pass_at(k, samples=problem.samples, passed=problem.passed) for problem in problems]
        low, high = mean_interval(values)
        found.append(PassAt(k=k, score=sum(values) / len(values), low=low, high=high))
    return tuple(found)


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
    significant = p_value < SIGNIFICANT and not low <= 0 <= high
    needed = questions_to_see(POINTS, deviation=float(differences.std()))
    return Difference(
        mean=mean,
        low=low,
        high=high,
        p_value=p_value,
        significant=significant,
        questions=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        sample_size_for_2pp=needed,
        summary=_describe_difference(base, tuned, (mean, low, high), p_value, significant=significant, needed=needed),
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
    """The two-sided p-value of the paired randomization test of a mean of 0 (Fisher 1935, The Design of Experiments).

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


def _describe_difference(
    base: Sequence[float],
    tuned: Sequence[float],
    seen: tuple[float, float, float],
    p_value: float,
    *,
    significant: bool,
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
    if significant:
        return f"The tuned model is {'better' if seen[0] > 0 else 'worse'} than the base: {numbers}."
    more = (
        f"; to see a difference of 2 points would take about {needed:,} questions like these"
        if needed
        else "; they answer every question alike"
    )
    return f"This does not tell the tuned model from the base: {numbers}{more}."
