"""95 % intervals of ratios by resampling what was recorded one by one: steps, requests, and the tokens of requests.

What stands next to each other is slow together, so circular blocks of n^⅓ neighbours are drawn (Politis and Romano
1992, in Exploring the Limits of Bootstrap). Every interval is seeded: the same records give the same.
"""

import math
from collections.abc import Sequence

import numpy as np

from gemsmith.bench_records import Requests
from gemsmith.records import Range

RESAMPLES, SEED = 10_000, 0
MEDIAN_RESAMPLES = 2_000
"""Each takes the median of as many requests as there are; the ends of the interval move by less than 2 % of it."""
WINDOWS = 50
_CHUNK = 2_000_000


def bootstrap_ratio(first: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Range:
    """The interval of (Σa/Σb of other) / (Σa/Σb of first) for pairs (a, b): 10,000 resamples of each.

    >>> bootstrap_ratio([(10, 1)] * 5, [(30, 2)] * 5)
    (1.5, 1.5)
    """
    generator = np.random.default_rng(SEED)
    speeds = [_resampled(np.asarray(pairs, dtype=float), generator) for pairs in (first, other)]
    return _middle(speeds[1] / speeds[0])


def bootstrap_medians(first: Sequence[float], other: Sequence[float], *, paired: bool) -> Range:
    """The interval of median(other) / median(first); `paired`: a place is the same in both, and is drawn in both.

    >>> bootstrap_medians([10, 20, 30], [20, 40, 60], paired=True)
    (2.0, 2.0)
    """
    generator = np.random.default_rng(SEED)
    values, others = np.asarray(first, dtype=float), np.asarray(other, dtype=float)
    rows = max(1, _CHUNK // max(len(values), len(others)))
    ratios = []
    for start in range(0, MEDIAN_RESAMPLES, rows):
        number = min(rows, MEDIAN_RESAMPLES - start)
        drawn = _drawn_places(len(values), number, generator)
        drawn_others = drawn if paired else _drawn_places(len(others), number, generator)
        ratios.append(np.median(others[drawn_others], axis=1) / np.median(values[drawn], axis=1))
    return _middle(np.concatenate(ratios))


def token_windows(requests: Requests, output_tokens: int) -> list[tuple[float, float]]:
    """Output tokens and seconds of WINDOWS equal parts of the time from the first token to the last.

    A request's first token comes at its TTFT, the others evenly until its end. The time before the first token is added
    to all parts alike, so that all tokens over all seconds is the recorded throughput.
    """
    starts, latencies = np.asarray(requests.start_ms), np.asarray(requests.latency_ms)
    begins, ends = starts + np.asarray(requests.ttft_ms), starts + latencies
    edges = np.linspace(begins.min(), ends.max(), WINDOWS + 1)
    since = edges[:, None] - begins
    shares = np.clip(since / np.maximum(ends - begins, 1e-9), 0.0, 1.0)
    written = np.where(since >= 0, 1 + (output_tokens - 1) * shares, 0.0).sum(axis=1)
    written[0], written[-1] = 0.0, output_tokens * len(starts)
    seconds = float(ends.max()) / 1000 / WINDOWS
    return [(float(tokens), seconds) for tokens in np.diff(written)]


def written_share(requests: Requests, windows: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first start on in whose windows tokens came."""
    first = min(start + ttft for start, ttft in zip(requests.start_ms, requests.ttft_ms, strict=True))
    last = max(start + latency for start, latency in zip(requests.start_ms, requests.latency_ms, strict=True))
    return (1 - first / last) * sum(tokens > 0 for tokens, _ in windows) / len(windows) if last else 0.0


def _drawn_places(size: int, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Places of `size` neighbours-in-blocks for each row, shape (rows, size)."""
    block = _block(size)
    starts = generator.integers(size, size=(rows, math.ceil(size / block)))
    return ((starts[:, :, None] + np.arange(block)) % size).reshape(rows, -1)[:, :size]


def _resampled(pairs: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Σa/Σb of RESAMPLES draws of about as many pairs as there are, shape (RESAMPLES,)."""
    block = _block(len(pairs))
    # Sums of the blocks from each place on: a draw is then of blocks alone.
    circle = np.concatenate((np.zeros((1, 2)), np.cumsum(np.concatenate((pairs, pairs[:block])), axis=0)))
    blocks = circle[block : block + len(pairs)] - circle[: len(pairs)]
    number = math.ceil(len(pairs) / block)
    rows = max(1, _CHUNK // number)
    totals = np.concatenate([
        blocks[generator.integers(len(blocks), size=(min(rows, RESAMPLES - start), number))].sum(axis=1)
        for start in range(0, RESAMPLES, rows)
    ])  # fmt: skip
    return totals[:, 0] / totals[:, 1]


def _block(size: int) -> int:
    return max(1, round(size ** (1 / 3)))


def _middle(ratios: np.ndarray) -> Range:
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)
