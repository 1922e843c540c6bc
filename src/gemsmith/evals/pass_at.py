"""pass@k: how likely at least one of k answers to a problem is right."""

from collections.abc import Sequence
from math import comb

import numpy as np

from gemsmith.eval_records import PassAt, ProblemScore
from gemsmith.evals.scoring import wilson_interval

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
