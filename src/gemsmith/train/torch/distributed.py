"""The processes that train together in PyTorch: how many, how one command starts them, what they share and agree on.

Each is started as torchrun would start it, with its variables; unlike torchrun it leaves a process that was told to
stop the time to save, and hands its exit code on.
"""

import atexit
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed

from gemsmith.checkpoints.steps import checkpoint_steps
from gemsmith.data.batches import load_batches
from gemsmith.errors import EngineError, GemsmithError, InputError, MachineError, RecipeError, Terminated, last_line
from gemsmith.hardware.model.limits import trl_mesh
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.records import TrainRecord
from gemsmith.runs.run import Run, read_record
from gemsmith.system.console import open_console
from gemsmith.system.signals import STOPS, handling, leave
from gemsmith.train.resume import Stop, check_consistency, stopped

_WORKER = (sys.executable, "-m", "gemsmith.train.torch.worker")
# Tells a process who has started it.
LAUNCHER = "GEMSMITH_LAUNCHER"
# What a process ends with that has lost another, or has waited for it in vain.
LOST_ANOTHER = 3
_POLL_S = 0.1
# A process that waits for one that has died hears nothing.
_PATIENCE_S = 60.0
# As long as a process may be suspended, which the others wait for.
_SUSPENDED_S = 30.0
# Loading 62 GB takes one process longer than another.
_LONGEST_SILENCE = timedelta(hours=1)
# Once all train: the longest that they wait for one is for the first, which writes adapters and logs.
_LONGEST_STEP = timedelta(minutes=10)


def train_in_processes(run: Run, *, restart: bool) -> TrainRecord | None:
    """The record of a training that several processes of this machine do; None where one does."""
    processes = 1 if started_by_torchrun() else wanted_processes(run.recipe, count_gpus())
    if processes == 1:
        return None
    trl_mesh(run.recipe, processes)
    load_batches(run)
    launch(run, processes, restart=restart)
    return read_record(run, TrainRecord)


def count_gpus() -> int:
    return torch.cuda.device_count()


def find_accelerators() -> tuple[str, ...]:
    """The GPUs that PyTorch has, as their driver calls them; none on a CPU."""
    return tuple(torch.cuda.get_device_name(number) for number in range(count_gpus()))


def started_by_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def wanted_processes(recipe: Recipe, gpus: int) -> int:
    """Those that train.mesh asks for; without one, as many GPUs as divide a step's rows, and one on CPU."""
    mesh, train = recipe.train.mesh, recipe.train
    if mesh != "auto":
        wanted = mesh.replica * mesh.fsdp
        if gpus and wanted > gpus:
            raise RecipeError(
                f"train.mesh: replica {mesh.replica} × fsdp {mesh.fsdp} was given, this machine has {gpus} GPUs; set "
                "train.mesh to auto"
            )
        return wanted
    micro = train.gradient_accumulation_steps
    return next((count for count in range(gpus, 1, -1) if train.global_batch_size % (count * micro) == 0), 1)


def launch(run: Run, processes: int, *, restart: bool) -> None:
    """Returns once so many processes have trained the run. Raises what they ended with; stderr or that has why."""
    command = [*_WORKER, str(run.path), *(["--restart"] if restart else [])]
    by_hand = ["torchrun", "--nproc-per-node", str(processes), "-m", "gemsmith", "train", str(run.path)]
    open_console().print(
        f"train  starting {processes} processes; with several nodes, run on each (plus --nnodes and --rdzv-*): "
        f"{shlex.join(by_hand)}"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    recipe, stop = run.recipe.model_dump_json(), Stop()
    started: list[subprocess.Popen] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if stop.is_insisted_on(number):
            raise KeyboardInterrupt
        stop.ask(number)
        for process in started:
            process.terminate()

    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            started.extend(_start(command, rank, processes, port, recipe, said) for rank in range(processes))
            with handling(dict.fromkeys(STOPS, hand_on)):
                codes = _wait(started, run)
        except KeyboardInterrupt:
            raise _stopped(run, signal.SIGINT) from None
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
        said.seek(0)
        reasons = [line.removeprefix("error: ").strip() for line in said if line.startswith("error: ")]
    _raise_for(codes, run, stop, reasons)


def _start(
    command: Sequence[str], rank: int, processes: int, port: int, recipe: str, said: IO[str]
) -> subprocess.Popen:
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHER: str(os.getpid())}
    # Of a process that is lost torch logs a stack in C++, as a warning.
    others = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env = others | os.environ | ranks | sizes | places
    # In a group of its own: Ctrl-C reaches it as SIGTERM, through the process that starts it.
    out = said if rank else subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=out, process_group=0)
    assert process.stdin is not None, "asked for"
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(recipe.encode())
    return process


def _wait(started: Sequence[subprocess.Popen], run: Run) -> list[int | None]:
    """The exit codes of all; None of those still there a while after one has failed.

    One that SIGTERM ended waits for the first, which still writes the checkpoint of all. Raises EngineError where one
    is suspended, by a signal or a debugger.
    """
    deadline_s, looks = None, [0] * len(started)
    while True:
        codes = [process.poll() for process in started]
        if None not in codes or (deadline_s and time.monotonic() > deadline_s):
            return codes
        if any(code not in (None, 0, Terminated.exit_code) for code in codes) and deadline_s is None:
            deadline_s = time.monotonic() + _PATIENCE_S
        # Looks are counted, not seconds: this process may have been suspended itself.
        looks = [count + 1 if _is_suspended(process) else 0 for count, process in zip(looks, started, strict=True)]
        if max(looks) * _POLL_S > _SUSPENDED_S:
            raise EngineError(
                f"training: process {looks.index(max(looks))} of {len(looks)} is suspended, and the others wait for "
                f"it; all were ended; continue with: gemsmith train {run.path}"
            )
        time.sleep(_POLL_S)


def _is_suspended(process: subprocess.Popen) -> bool:
    """As Linux says it; elsewhere never."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _raise_for(codes: Sequence[int | None], run: Run, stop: Stop, reasons: Sequence[str]) -> None:
    # One that SIGTERM met before it could save has saved nothing that it had.
    ended = [Terminated.exit_code if code == -signal.SIGTERM else code for code in codes]
    failed = [(rank, code) for rank, code in enumerate(ended) if code != 0]
    if any(code in (130, -signal.SIGINT) for _, code in failed):
        raise _stopped(run, signal.SIGINT)
    known = (InputError.exit_code, Terminated.exit_code)

    def says(code: int | None) -> int:
        """0 for a reason of the user's, then more for one killed, one failed, one that hangs, one that lost another."""
        return (code in known, (code or 0) < 0, code not in (None, LOST_ANOTHER), code is None, True).index(True)

    for rank, code in sorted(failed, key=lambda item: (says(item[1]), item[0])):
        if code == Terminated.exit_code:
            raise _stopped(run, stop.number)
        kind = InputError if code == InputError.exit_code else EngineError
        how = f"ended with {code} ({reasons[0]})" if rank and reasons else f"ended with {code}; its reason is above"
        if code is None:
            how = "hangs, and the others have waited for it in vain"
        elif code < 0:
            memory = ", as where the machine's memory runs out" if code == -signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{memory}"
        raise kind(f"training: process {rank} of {len(codes)} {how}; continue with: gemsmith train {run.path}")
    if stop.is_set():  # training is complete, but another stage may follow
        raise _stopped(run, stop.number)


def _stopped(run: Run, number: int) -> BaseException:
    return stopped(run, number, max(checkpoint_steps(run.checkpoints), default=None))


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
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

    def bound_waits(self) -> None:
        """Waits for all, who have loaded the model; from here on one that is waited for longer ends the others."""
        if self.size > 1:
            torch.distributed.barrier()
            torch.distributed.distributed_c10d._set_pg_timeout(_LONGEST_STEP)

    def first_fault(self, own: GemsmithError | None) -> GemsmithError | None:
        """That of the first process which has one. Every process must ask."""
        return own if self.size == 1 else next((fault for fault in self._gather(own) if fault), None)

    def agree(self, run: Run, same: Mapping[str, Any]) -> None:
        """Raises RunError unless all processes have the same recipe, rows, and what else is named."""
        if self.size > 1:
            check_consistency(run, self._gather, same, kinds=("process", "processes"))

    def _gather(self, own: Any) -> list[Any]:
        """What each process, in order, has called this with."""
        found = [None] * self.size
        torch.distributed.all_gather_object(found, own)
        return found


@contextlib.contextmanager
def joined(gpus: int) -> Iterator[ProcessGroup]:
    """The processes that train together, this one among them. Raises MachineError where they do not come together."""
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    if gpus and gpu >= gpus:
        raise MachineError(f"LOCAL_RANK: {gpu} was given, this machine has {gpus} GPUs; start as many processes on it")
    device = torch.device("cuda", gpu) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if not started_by_torchrun():
        yield ProcessGroup(device=device)
        return
    try:
        torch.distributed.init_process_group("nccl" if gpus else "gloo", timeout=_LONGEST_SILENCE)
    except (ValueError, RuntimeError) as error:
        raise MachineError(
            f"the processes do not come together ({last_line(error)}); start them with torchrun"
        ) from None
    try:
        yield ProcessGroup(device=device, rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    except BaseException as error:
        if gpus:
            # NCCL ends its communicators together: while others wait in a collective, so would this one, its reason
            # untold and its end unseen by what started it, and at Python's end once more.
            # https://github.com/pytorch/pytorch/pull/119250
            atexit.register(leave, 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1))
        else:
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()
