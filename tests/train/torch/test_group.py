"""The processes that train together."""

import os

import pytest
import torch

from gemsmith.errors import MachineError, Terminated
from gemsmith.train.torch import distributed as trl_group


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
