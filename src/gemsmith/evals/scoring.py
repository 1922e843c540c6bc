"""How sure a share of right answers is."""

import math
from collections.abc import Mapping, Sequence

from gemsmith.eval_records import Score, Share

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: 2.5 % left out on each side."""


def score(
    right: Sequence[bool],
    *,
    cut: int = 0,
    failed: Mapping[str, int] | None = None,
    unscored: Mapping[str, int] | None = None,
    others: Mapping[str, int] | None = None,
) -> Score:
    """The share of right answers with its 95 % interval.

    `cut`: how many answers reached the limit of tokens. Of those not right, by reason, how many are no answers
    (`failed`) and how many could not be judged (`unscored`). By other measures, how many are right (`others`).
    """
    low, high = wilson_interval(sum(right), len(right))
    return Score(
        score=sum(right) / len(right),
        low=low,
        high=high,
        n=len(right),
        cut=cut,
        failed=dict(failed or {}),
        unscored=dict(unscored or {}),
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
    centre = share + z2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + z2 / n) for sign in (-1, 1))
    # Rounding alone would put the ends at 1e-17 and 1 - 1e-16 there.
    return (0.0 if right == 0 else low, 1.0 if right == n else high)
