"""What SFTTrainer is given in place of its own loader, settings and random state."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gemsmith.train.torch.distributed import ProcessGroup
from gemsmith.train.torch.trainer import TrlTrainer, _config, _mixed, _norm

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
        _recipe=recipe, _done=done, batches=Steps(), _group=ProcessGroup(device=CPU, rank=rank, size=size),
        _tensors=lambda batch, places, images, dtype: {"places": places.tolist()},
        feed=None, patches=np.zeros(2, np.int64),
    )  # fmt: skip
    return list(TrlTrainer.micro_batches(trainer))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_processes_read_every_row_of_a_step_once_and_in_order(small_recipe, size):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    read = [slices(recipe, rank=rank, size=size) for rank in range(size)]
    first = [place for each in read for part in each if part["step"] == 1 for place in part["places"]]
    assert first == list(range(8))
    assert all([part["first"] for part in each] == [True, False] * 2 for each in read)


def test_a_slice_counts_the_targets_of_the_whole_step(small_recipe):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    parts = slices(recipe, rank=1, size=2, done=1)
    assert [part["step"] for part in parts] == [2, 2]
    assert {(part["counts"]["targets"], part["counts"]["real_tokens"]) for part in parts} == {(14, 21)}


def test_dropout_follows_from_seed_step_and_process_alone():
    asked = [(seed, step, rank) for seed in (0, 1, -1) for step in (1, 2) for rank in (0, 1)]
    found = [_mixed(*each) for each in asked]
    assert found == [_mixed(*each) for each in asked] and len(set(found)) == len(asked)
    assert all(0 <= number < 2**63 for number in found)


def test_the_norm_is_that_of_all_gradients_together():
    assert _norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]).item() == 5.0


def test_upstream_saves_and_reports_nothing_by_itself(small_recipe, tmp_path):
    recipe = small_recipe(train={"global_batch_size": 8, "gradient_accumulation_steps": 2})
    config = _config(recipe, ProcessGroup(device=CPU, size=2), steps=5, folder=tmp_path)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.max_steps) == (2, 2, 5)
    assert config.save_strategy == config.logging_strategy == "no" and config.report_to == []
    assert list(tmp_path.iterdir()) == []
