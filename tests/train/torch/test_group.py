"""The processes that train together."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gemsmith.errors import MachineError, Terminated
from gemsmith.train.torch import distributed as trl_group
from gemsmith.train.torch.trainer import TrlTrainer


@pytest.mark.parametrize(
    ("error", "code"),
    [(MachineError("full"), 2), (RuntimeError("CUDA error"), 1), (KeyboardInterrupt(), 130), (Terminated("told"), 143)],
)
def test_a_process_that_fails_on_a_gpu_does_not_wait_for_the_others(monkeypatch, error, code):
    """NCCL's communicators end together, and the others may be in a collective that this process will not come to."""
    left, ended = [], []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, stand_in in {
        "init_process_group": lambda *_, **__: None,
        "get_rank": lambda: 1,
        "get_world_size": lambda: 2,
        "destroy_process_group": lambda: ended.append(True),
    }.items():
        monkeypatch.setattr(torch.distributed, name, stand_in)
    monkeypatch.setattr(trl_group.atexit, "register", lambda *call: left.append(call))
    monkeypatch.setattr(os, "_exit", left.append)
    with pytest.raises(type(error)), trl_group.joined(2):
        raise error
    assert not ended
    ((leave, found),) = left
    leave(found)
    assert found == left[1] == code
    with trl_group.joined(2):
        pass
    assert ended


def test_held_out_rows_leave_split_parameters_split(tmp_path):
    """Whole, AdamW's state would not be found for them, and be saved as zeros. Also where a batch cannot be read."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.outside = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

        def forward(self, rows):
            return self.layer(self.outside(rows)).sum(), torch.ones(())

    def gone(_):
        raise OSError("gone")

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store")), rank=0, world_size=1
    )
    try:
        model, mesh = Model(), init_device_mesh("cpu", (1,))
        fully_shard(model.layer, mesh=mesh), fully_shard(model, mesh=mesh)
        trainer = SimpleNamespace(
            model=model,
            group=trl_group.ProcessGroup(device=torch.device("cpu")),
            recipe=SimpleNamespace(train=SimpleNamespace(dtype="float32")),
            _prepare_inputs=lambda rows: rows,
            _own_rows=lambda *_: [{"rows": torch.ones(3, 2)}],
        )
        batch = SimpleNamespace(loss_mask=np.ones((3, 2), bool))
        batches = SimpleNamespace(steps=2, batch=lambda _: batch)
        assert TrlTrainer.evaluate_held_out(trainer, batches, None, lambda: False)["targets"] == 6
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        assert model.training
        with pytest.raises(OSError, match="gone"):
            TrlTrainer.evaluate_held_out(trainer, SimpleNamespace(steps=1, batch=gone), None, lambda: False)
        assert model.training and all(isinstance(weight, DTensor) for weight in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
