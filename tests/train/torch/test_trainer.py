"""What SFTTrainer is given in place of its own loader and settings, and what is decided about each step."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import SFTTrainer

from gemsmith.train.resume import Stop
from gemsmith.train.torch.distributed import ProcessGroup
from gemsmith.train.torch.trainer import TrlTrainer, _config, _mixed, _StepCallback

CPU = torch.device("cpu")


class Steps:
    """Two steps of eight rows, whose tokens are numbered; the last row is padding."""

    steps, global_batch_size = 2, 8

    def batch(self, step):
        segments = np.ones((8, 3), np.int32)
        segments[-1] = 0
        return SimpleNamespace(loss_mask=segments > 0, segments=segments, images=())


def slices(recipe, *, rank, size, done=0):
    trainer = SimpleNamespace(
        recipe=recipe, done=done, batches=Steps(), group=ProcessGroup(device=CPU, rank=rank, size=size),
        _tensors=lambda batch, places, images, dtype: {"places": places.tolist()},
        feed=None, patches=np.zeros(2, np.int64),
    )  # fmt: skip
    trainer._own_rows = partial(TrlTrainer._own_rows, trainer)
    return list(TrlTrainer.micro_batches(trainer))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_processes_read_every_row_of_a_step_once_and_in_order(small_recipe, size):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    read = [slices(recipe, rank=rank, size=size) for rank in range(size)]
    assert all(len(each) == 4 for each in read)
    assert [place for each in read for part in each[:2] for place in part["rows"]["places"]] == list(range(8))


def test_a_slice_counts_the_targets_of_the_whole_step(small_recipe):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    parts = slices(recipe, rank=1, size=2, done=1)
    assert len(parts) == 2
    assert {(part["counts"]["targets"], part["counts"]["real_tokens"]) for part in parts} == {(14, 21)}


def test_dropout_follows_from_seed_step_and_process_alone():
    asked = [(seed, step, rank) for seed in (0, 1, -1) for step in (1, 2) for rank in (0, 1)]
    found = [_mixed(*each) for each in asked]
    assert found == [_mixed(*each) for each in asked] and len(set(found)) == len(asked)
    assert all(0 <= number < 2**63 for number in found)


def decide(recipe, gradient, *, loss=1.0, skip_above=(math.inf, math.inf)):
    """What a step with this gradient came to, the gradient that AdamW then gets, and what it has made of the weight."""
    weight, outcomes = torch.nn.Parameter(torch.ones(2)), []
    adamw = torch.optim.AdamW([weight])
    weight.grad = torch.tensor(gradient)
    trainer = SimpleNamespace(
        recipe=recipe, done=0, group=ProcessGroup(device=CPU), feed=None, trained=[weight], adamw=adamw,
        accelerator=SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_),
        sums=torch.tensor([loss, 1.0]), counts={"targets": 1, "real_tokens": 1},
    )  # fmt: skip
    session = SimpleNamespace(plan=lambda step: SimpleNamespace(step=step, skip_above=skip_above), stopping=Stop())
    callback = _StepCallback(trainer, session, outcomes.append)
    state, control = SimpleNamespace(global_step=6), SimpleNamespace(should_training_stop=False)
    callback.on_step_begin(None, state, control)
    callback.on_pre_optimizer_step(None, state, control)
    clipped = None if weight.grad is None else weight.grad.tolist()
    adamw.step()
    callback.on_step_end(None, state, control)
    assert not trainer.sums.any() and outcomes[0].correct == 1
    assert outcomes[0].plan.step == 7 and control.should_training_stop
    return outcomes[0], clipped, weight.detach()


def test_a_step_is_clipped_to_the_norm_of_all_its_gradients(small_recipe):
    outcome, clipped, weight = decide(small_recipe(optimizer={"max_grad_norm": 1.0}), [3.0, 4.0])
    assert (outcome.loss, outcome.grad_norm, outcome.skipped) == (1.0, 5.0, False)
    assert clipped == pytest.approx([0.6, 0.8]) and (weight < 1).all()
    outcome, clipped, _ = decide(small_recipe(optimizer={"max_grad_norm": None}), [3.0, 4.0])
    assert outcome.grad_norm == 5.0 and clipped == [3.0, 4.0]


@pytest.mark.parametrize("highest", [1.0, None])
@pytest.mark.parametrize(
    ("gradient", "loss"),
    [
        ([3.0, math.nan], 1.0),
        ([3.0, math.inf], 1.0),
        ([3e30, 3e30], 1.0),
        ([3.0, 4.0], math.nan),
        ([1.0, 1.0], 2.5),
        ([3.0, 4.0], 1.0),
    ],
)
def test_a_step_that_does_not_count_leaves_no_gradient(small_recipe, gradient, loss, highest):
    """Also where the norm is beyond float32, though no gradient is."""
    recipe = small_recipe(optimizer={"max_grad_norm": highest})
    outcome, clipped, weight = decide(recipe, gradient, loss=loss, skip_above=(2.0, 4.0))
    assert outcome.skipped and clipped is None and (weight == 1).all()


def test_two_public_methods_of_upstream_are_overridden():
    own = {name for name, value in vars(TrlTrainer).items() if callable(value) and hasattr(SFTTrainer, name)}
    assert own == {"__init__", "get_train_dataloader", "compute_loss"}


def test_upstream_saves_and_reports_nothing_by_itself(small_recipe, tmp_path):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    config = _config(recipe, ProcessGroup(device=CPU, size=2), steps=5, folder=tmp_path)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.max_steps) == (2, 2, 5)
    assert config.save_strategy == config.logging_strategy == "no" and config.report_to == []
    assert list(tmp_path.iterdir()) == []
