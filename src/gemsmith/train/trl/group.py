"""The processes that train together in PyTorch: how one joins, what they add up, and what they must agree on."""

import atexit
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from gemsmith.errors import GemsmithError, MachineError, last_line
from gemsmith.run import Run
from gemsmith.signals import leave
from gemsmith.train.attempt import disagreement
from gemsmith.train.trl.launch import started_by_torchrun

# Loading 62 GB takes one process longer than another.
_LONGEST_SILENCE = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes that train together, and the device of this one."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def rows(self, count: int) -> slice:
        """The rows of a step that this process reads."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def total(self, values: list[float]) -> list[float]:
        """The sums over all processes, in float32."""
        sums = torch.tensor(values, dtype=torch.float32, device=self.device)
        if self.size > 1:
            torch.distributed.all_reduce(sums)
        return sums.tolist()

    def first_fault(self, own: GemsmithError | None) -> GemsmithError | None:
        """That of the first process which has one. Every process must ask."""
        if self.size == 1:
            return own
        faults: list[GemsmithError | None] = [None] * self.size
        torch.distributed.all_gather_object(faults, own)
        return next((fault for fault in faults if fault), None)

    def agree(self, run: Run, same: Mapping[str, Any]) -> None:
        """Raises RunError unless all processes have the same of everything named."""
        if self.size == 1:
            return
        for name, value in same.items():
            digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            digests: list[str] = [""] * self.size
            torch.distributed.all_gather_object(digests, digest)
            if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
                raise disagreement(run, name, number=others[0], count=self.size, kind="process")


@contextlib.contextmanager
def joined(gpus: int) -> Iterator[Group]:
    """The processes that train together, this one among them. Raises MachineError where they do not come together."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if gpus and local >= gpus:
        raise MachineError(
            f"LOCAL_RANK: {local} was given, this machine has {gpus} GPUs; start as many processes on it"
        )
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if not started_by_torchrun():
        yield Group(device=device)
        return
    try:
        torch.distributed.init_process_group("nccl" if gpus else "gloo", timeout=_LONGEST_SILENCE)
    except (ValueError, RuntimeError) as error:
        raise MachineError(
            f"the processes do not come together ({last_line(error)}); start them with torchrun"
        ) from None
    try:
        yield Group(device=device, rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    except BaseException as error:
        if gpus:
            # NCCL ends its communicators together: while others wait in a collective, so would this one, its reason
            # untold and its end unseen by what started it, and at Python's end once more.
            # https://github.com/pytorch/pytorch/pull/119250
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
            atexit.register(leave, code)
        else:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()
