import numpy as np
import pytest

from gemsmith.analysis.ratios import WINDOWS, bootstrap_medians, bootstrap_ratio, token_windows, written_share
from gemsmith.runs.bench_records import Requests


def steps(speed, number=200, *, seed=0):
    seconds = np.random.default_rng(seed).uniform(0.8, 1.2, number)
    return tuple((speed, float(each)) for each in seconds)


def test_the_bootstrap_covers_the_true_ratio_about_as_often_as_it_says():
    hits = 0
    for seed in range(40):
        low, high = bootstrap_ratio(steps(100, 25, seed=2 * seed), steps(80, 25, seed=2 * seed + 1))
        hits += low <= 0.8 <= high
    assert 34 <= hits <= 39


def test_the_interval_narrows_with_steps_and_is_the_same_every_time():
    few, many = (bootstrap_ratio(steps(100, n), steps(100, n, seed=1)) for n in (20, 500))
    assert many[1] - many[0] < (few[1] - few[0]) / 2
    assert few == bootstrap_ratio(steps(100, 20), steps(100, 20, seed=1))


def test_steps_that_are_slow_together_widen_the_interval():
    seconds = [0.5] * 50 + [1.5] * 50
    together = [(1.0, each) for each in seconds]
    mixed = [(1.0, each) for pair in zip(seconds[:50], seconds[50:], strict=True) for each in pair]
    (low, high), (low_mixed, high_mixed) = (bootstrap_ratio(steps(1), pairs) for pairs in (together, mixed))
    assert high - low > 2 * (high_mixed - low_mixed)


def latencies(scale, number=60, *, seed=0):
    return tuple(float(scale * each) for each in np.random.default_rng(seed).lognormal(3.0, 0.3, number))


def test_the_bootstrap_of_medians_covers_the_true_ratio_about_as_often_as_it_says():
    hits = 0
    for seed in range(40):
        low, high = bootstrap_medians(latencies(1.0, seed=2 * seed), latencies(1.5, seed=2 * seed + 1), paired=False)
        hits += low <= 1.5 <= high
    assert 35 <= hits <= 40


def test_medians_of_pairs_lose_what_both_share():
    first = latencies(1.0)
    other = [1.2 * each * shift for each, shift in zip(first, latencies(1.0, seed=9), strict=True)]
    (low, high), (low_apart, high_apart) = (bootstrap_medians(first, other, paired=paired) for paired in (True, False))
    assert high - low < high_apart - low_apart
    assert bootstrap_medians(first, first, paired=True) == (1.0, 1.0)
    assert bootstrap_medians(first, other, paired=True) == (low, high)


def test_the_tokens_of_the_windows_are_those_of_the_requests():
    requests = Requests(
        start_ms=(0.0, 500.0), ttft_ms=(100.0, 100.0), latency_ms=(1000.0, 500.0), input_tokens=(16, 16)
    )
    windows = token_windows(requests, output_tokens=10)
    assert len(windows) == WINDOWS
    assert sum(tokens for tokens, _ in windows) == pytest.approx(20)
    assert sum(seconds for _, seconds in windows) == pytest.approx(1.0)
    # From 100 ms on: until 640 ms 1 + 5.4 of the first, 1 + 0.9 of the other, whose first comes at 600 ms.
    halves = [sum(tokens for tokens, _ in half) for half in (windows[:30], windows[30:])]
    assert halves == pytest.approx([6.4 + 1.9, 3.6 + 8.1], abs=1e-6)
    assert written_share(requests, windows) == pytest.approx(0.9)


def test_the_throughput_of_the_windows_is_the_recorded_one(served):
    cell = served(1.0)
    windows = token_windows(cell.each, cell.output_tokens)
    speed = sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)
    assert speed == pytest.approx(cell.output_tokens_per_s, rel=1e-9)
