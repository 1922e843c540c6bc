import math
import random
from pathlib import Path

import pytest

from gemsmith.recipe.load import build_recipe
from gemsmith.runs.records import TrainRecord, TrainStep
from gemsmith.train.loss_checks import _change, loss_increase_warnings, loss_plateau_warnings

DEMO = Path(__file__).parents[2] / "benchmarks" / "records" / "demo" / "train.json"


def recipe(**sections):
    return build_recipe(
        {"checkpoint": "base", "data": {"train": "rows.jsonl"}, "optimizer": {"warmup_steps": 0}} | sections
    )


def steps(losses, *, skipped=(), rate=1e-4):
    return [
        TrainStep(
            step=step, loss=loss, grad_norm=1.0, learning_rate=rate, real_tokens=1, step_s=1.0, skipped=step in skipped
        )
        for step, loss in enumerate(losses, start=1)
    ]


def noisy(level, count, *, noise, seed=0):
    """Losses of that level, a function of the share of the steps done, with normal noise of that share of it."""
    draw = random.Random(seed)
    return steps([level(step / count) * (1 + noise * draw.gauss(0, 1)) for step in range(count)])


def both(found, chosen=None):
    return loss_plateau_warnings(found, chosen or recipe()), loss_increase_warnings(found, chosen or recipe())


@pytest.mark.parametrize("count", [6, 20, 100, 1000])
def test_a_flat_loss_is_said(count):
    (notice,), risen = both(steps([2.5] * count))
    tenth = max(3, count // 10)
    assert notice.startswith(f"The loss did not fall: median 2.5 in the first {tenth} steps, 2.5 in the last {tenth}; ")
    assert "optimizer.learning_rate, 0.0001, is too low" in notice
    assert risen == ()


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_flat_loss_is_said_whatever_its_noise(noise):
    found = [both(noisy(lambda share: 2.5, 60, noise=noise, seed=seed)) for seed in range(100)]
    assert sum(bool(unfallen) for unfallen, _ in found) >= 95
    assert sum(bool(risen) for _, risen in found) <= 2


def test_a_fall_too_small_to_count_is_said_also_where_there_is_no_noise():
    (notice,), _ = both(steps([2.5 - 0.0001 * step for step in range(100)]))
    assert notice.startswith("The loss hardly fell: median 2.5 in the first 10 steps, 2.491 in the last 10; ")


def test_a_fall_within_the_noise_is_said():
    (notice,), _ = both(steps([1.0, 0.7, 1.3, 0.95, 1.25, 0.8, 0.95, 1.3, 0.7]))
    assert notice.startswith(
        "The loss fell no further than its noise: median 1 in the first 3 steps, 0.95 in the last 3; "
    )


@pytest.mark.parametrize("level", [
    lambda share: 2.5 * math.exp(-3 * share),
    lambda share: 2.5 - 0.5 * share,
    lambda share: 0.5 if share > 0.04 else 2.5,  # within the first tenth
    lambda share: 0.05 * math.exp(-3 * share),
])  # fmt: skip
def test_a_loss_that_fell_is_no_notice(level):
    for seed in range(20):
        assert both(noisy(level, 200, noise=0.05, seed=seed)) == ((), ())


def test_a_loss_that_rose_is_a_grave_notice():
    unfallen, (notice,) = both(noisy(lambda share: 2 + 2 * share, 50, noise=0.02))
    assert unfallen == ()
    assert (
        notice.startswith("The loss rose: median 2.") and "optimizer.learning_rate, 0.0001, may be too high" in notice
    )


def test_few_steps_say_nothing():
    assert both(steps([2.5] * 5)) == both([]) == ((), ())


def test_steps_without_a_loss_or_an_update_are_left_out():
    found = steps([2.5, math.nan, 2.5, math.inf, 2.4, 1.0, 1.0, 1.0, 900.0, 900.0, 900.0], skipped=(9, 10, 11))
    assert both(found) == ((), ())
    assert both(steps([2.5, 2.5, 2.5, math.nan, math.nan, math.nan])) == ((), ())


@pytest.mark.parametrize(("sections", "losses", "skipped", "reason"), [
    ({"optimizer": {"warmup_steps": 100}}, [2.5] * 20, (), "warm-up took 20 of 20 steps, and the learning rate reached "
     "0.0001 of 0.0001: lower optimizer.warmup_steps, or train for more steps"),
    ({"optimizer": {"warmup_ratio": 0.6}}, [2.5] * 20, (), "warm-up took 12 of 20 steps, and the learning rate reached "
     "0.0001 of 0.0001: lower optimizer.warmup_ratio"),
    ({}, [0.02] * 20, (), "it was low from the start"),
    ({}, [0.0] * 20, (), "it was low from the start"),
    ({"train": {"init_adapter": "mine"}}, [2.5] * 20, (), "training continued from train.init_adapter"),
    ({}, [2.5] * 20, tuple(range(1, 13)), "the updates of 12 of 20 steps were left out"),
    ({"optimizer": {"learning_rate": 1e-9, "warmup_steps": 2}}, [2.5] * 20, (), "optimizer.learning_rate, 1e-09, is "
                                                                                "too low, or 20 steps"),
])  # fmt: skip
def test_the_notice_names_a_likely_reason(sections, losses, skipped, reason):
    (notice,), _ = both(steps(losses, skipped=skipped), recipe(**sections))
    assert reason in notice


def test_the_demos_loss_fell_from_its_first_steps_on():
    record = TrainRecord.model_validate_json(DEMO.read_bytes())
    for count in (12, 30, 100, len(record.steps)):
        assert both(record.steps[:count]) == ((), ())


def test_the_error_is_that_of_the_difference_of_two_medians_of_normal_noise():
    """sqrt(pi / 2 * (1 / 10 + 1 / 10)) * 1 / (0.6745 sqrt(2)), of neighbors that differ by 1."""
    assert _change(steps([1.0, 2.0] * 50)).error == pytest.approx(0.58758, rel=1e-4)


def test_as_many_updates_as_were_made_are_no_reason():
    assert "left out" not in both(steps([2.5] * 20, skipped=range(1, 11)))[0][0]
