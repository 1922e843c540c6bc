import math
import re

import numpy as np
import pytest

from gemsmith.errors import EngineError
from gemsmith.export.adapters import read_run_adapter
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Train
from gemsmith.runs.records import TrainStep
from gemsmith.runs.run import open_run
from gemsmith.train import loop
from gemsmith.train.loss_checks import grad_norm_warnings, reason_to_stop, spike_limit
from gemsmith.train.stage import train


def make_step(number, loss=1.0, grad_norm=1.0, **values):
    numbers = {"learning_rate": 0.1, "real_tokens": 3, "step_s": 1.0}
    return TrainStep(step=number, loss=loss, grad_norm=grad_norm, **numbers, **values)


def test_the_limit_is_a_multiple_of_the_median_of_the_losses_known_by_then():
    losses = [float(number) for number in range(1, 101)]
    assert spike_limit(losses, 102, 2.0) == 2 * 75.5  # of steps 51 to 100
    assert spike_limit(losses, 101, 2.0) == 2 * 74.5  # step 100 may be under way
    assert spike_limit(losses[:99], 101, 2.0) == spike_limit(losses, 101, 2.0)
    assert spike_limit([0.1] * 20, 22, 3.0) == np.float32(0.3)


def test_a_few_losses_limit_nothing():
    assert spike_limit([1.0] * 9, 11, 2.0) == math.inf
    assert spike_limit([1.0] * 10, 11, 2.0) == math.inf
    assert spike_limit([1.0] * 10, 12, 2.0) == 2.0
    assert spike_limit([], 1, 2.0) == math.inf


def test_losses_that_are_no_numbers_do_not_count():
    assert spike_limit([1.0] * 5 + [math.nan, math.inf] * 5 + [3.0] * 6, 23, 2.0) == 6.0


def test_a_loss_that_stays_high_is_no_spike_any_more():
    losses = [1.0] * 50
    spikes = 0
    for step in range(51, 101):
        spikes += spike_limit(losses, step, 3.0) < 10.0
        losses.append(10.0)
    assert spikes == 26


@pytest.mark.parametrize(
    ("step", "train", "reason"),
    [
        ({"loss": math.nan, "skipped": True}, {}, r"step 1 has loss nan .*train.on_nonfinite is stop"),
        ({"loss": math.nan, "skipped": True}, {"on_nonfinite": "skip"}, None),
        ({"loss": 9.0, "spike": True}, {}, None),
        ({"loss": 9.0, "spike": True, "skipped": True}, {"on_spike": "skip"}, None),
        (
            {"loss": 9.0, "spike": True},
            {"on_spike": "stop"},
            r"step 1 has loss 9, over 3 × the median .*train.on_spike is stop",
        ),
        ({"grad_norm": 11140.0, "grad_norm_spike": True}, {}, None),
        (
            {"grad_norm": 11140.0, "grad_norm_spike": True},
            {"on_spike": "stop"},
            r"step 1 has gradient norm 1.114e\+04, over 10 × the median .*train.on_spike is stop",
        ),
    ],
)
def test_the_recipe_says_what_training_stops_at(step, train, reason):
    found = reason_to_stop([make_step(1, **step)], Train(**train))
    assert found is None if reason is None else re.search(reason, found)


def test_training_that_only_skips_ends():
    steps = [make_step(number, math.nan, skipped=number > 1) for number in range(1, 12)]
    train = Train(on_nonfinite="skip")
    assert [reason_to_stop(steps[:count], train) is None for count in (10, 11)] == [True, False]
    assert "the last 10 steps were all skipped, step 11" in reason_to_stop(steps, train)


def test_spikes_of_the_gradient_norm_are_a_warning_that_says_what_to_lower():
    norms = {3: 12.0, 5: 11140.0}
    steps = [
        make_step(number, grad_norm=norms.get(number, 1.0), grad_norm_spike=number in norms) for number in range(6)
    ]
    recipe = build_recipe({"checkpoint": "x", "data": {"train": "x"}, "optimizer": {"max_grad_norm": None}})
    assert grad_norm_warnings(steps, recipe) == (
        "The gradient norm was over 10 × the median before it in 2 of 6 steps, 1.114e+04 in step 5. If the loss "
        "suffers, lower optimizer.learning_rate and optimizer.max_grad_norm, which are 0.0001 and null: for the "
        "31B others take 5e-05 and 0.1, with optimizer.beta2 at 0.995.",
    )
    assert grad_norm_warnings(steps[:3], recipe) == ()


@pytest.mark.parametrize("backend", [pytest.param("tunix", marks=pytest.mark.slow), "trl"])
@pytest.mark.filterwarnings("ignore")  # upstream's, at import
def test_a_spike_of_the_gradient_norm_is_told_or_skipped_or_ends_the_run(
    prepare, tmp_path, monkeypatch, capsys, same_numbers, backend
):
    """Its loss is none."""
    keys = {"backend": backend, "max_steps": 4, "save_steps": 1, "save_total_limit": 4}
    plain = train(prepare(tmp_path / "plain", train=keys))

    def limit(values, step, factor):
        return 0.0 if (step, factor) == (3, 7.0) else math.inf

    monkeypatch.setattr(loop.loss_checks, "spike_limit", limit)
    runs = {
        what: prepare(tmp_path / what, train=keys | {"on_spike": what, "grad_norm_spike_factor": 7.0})
        for what in ("report", "skip", "stop")
    }
    told = train(runs["report"])
    assert same_numbers(told, plain)
    assert (told.grad_norm_spikes, told.spikes, told.skipped) == ((3,), (), ())
    assert any("gradient norm was over 7 × the median before it in 1 of 4 steps" in text for text in told.warnings)
    assert (
        f"loss {told.steps[2].loss:.4f}: gradient norm {told.steps[2].grad_norm:.4g}, a spike\n"
        in capsys.readouterr().err
    )
    skipped = train(runs["skip"])
    assert (skipped.grad_norm_spikes, skipped.spikes, skipped.skipped) == ((3,), (), (3,))
    assert "a spike, its update is left out\n" in capsys.readouterr().err
    before, after, later = (weights(runs["skip"], step) for step in (2, 3, 4))
    assert before == after != later
    with pytest.raises(
        EngineError, match=r"step 3 has gradient norm .*over 7 × .*train\.on_spike is stop.*checkpoints/2"
    ):
        train(runs["stop"])
    skipping = open_run(
        runs["stop"].path, build_recipe(runs["stop"].recipe.model_dump(mode="json"), ["train.on_spike=skip"])
    )
    assert same_numbers(train(skipping), skipped) and weights(skipping, 4) == later


def weights(run, step):
    """Those of the adapter that a step has saved, as bytes."""
    modules = read_run_adapter(run, step).modules
    return {name: (pair.a.tobytes(), pair.b.tobytes()) for name, pair in modules.items()}
