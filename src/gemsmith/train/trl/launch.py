"""Processes that train together in PyTorch: how many, and how one command starts them on this machine.

Each is started as torchrun would start it, with its variables; unlike torchrun it leaves a process that was told to
stop the time to save, and hands its exit code on.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemsmith.data import load_batches
from gemsmith.errors import EngineError, GemsmithError, InputError, Preempted, RecipeError
from gemsmith.recipe import Recipe
from gemsmith.records import TrainRecord
from gemsmith.run import Run, read_record
from gemsmith.sizing.limits import trl_mesh
from gemsmith.terminal import open_console

_WORKER = (sys.executable, "-m", "gemsmith.train.trl.worker")
# Tells a process who has started it.
LAUNCHER = "GEMSMITH_LAUNCHER"
_POLL_S = 0.1
# A process that waits for one that has died hears nothing.
_PATIENCE_S = 60.0


def train_in_processes(run: Run, *, fresh: bool) -> TrainRecord | None:
    """The record of a training that several processes of this machine do; None where one does."""
    if started_by_torchrun():
        return None
    processes = wanted_processes(run.recipe, count_gpus())
    if processes == 1:
        return None
    trl_mesh(run.recipe, processes)
    load_batches(run)
    launch(run, processes, fresh=fresh)
    return read_record(run, TrainRecord)


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


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
    return next((count for count in range(gpus, 1, -1) if train.rows_per_step % (count * train.micro_batches) == 0), 1)


def launch(run: Run, processes: int, *, fresh: bool) -> None:
    """Returns once so many processes have trained the run. Raises what they ended with; each has said why on stderr."""
    command = [*_WORKER, str(run.path), *(["--fresh"] if fresh else [])]
    by_hand = ["torchrun", "--nproc-per-node", str(processes), "-m", "gemsmith", "train", str(run.path)]
    console = open_console()
    console.print(
        f"train  starting {processes} processes; with several nodes, run on each (plus --nnodes and --rdzv-*): "
        f"{shlex.join(by_hand)}"
    )
    port, recipe = _free_port(), run.recipe.model_dump_json()
    started: list[subprocess.Popen] = []
    with _handing_on_signals(started):
        started += [_start(command, rank, processes, port, recipe) for rank in range(processes)]
        codes = _wait(started)
    _raise_for(codes, run.path)


def _start(command: Sequence[str], rank: int, processes: int, port: int, recipe: str) -> subprocess.Popen:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHER: os.getpid(),
    }
    threads = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // processes)}
    environment = (
        {name: str(value) for name, value in threads.items()}
        | os.environ
        | {name: str(value) for name, value in variables.items()}
    )
    # Ctrl-C reaches every process of the terminal; all of them end by themselves.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None, "asked for"
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(recipe.encode())
    return process


def _wait(started: Sequence[subprocess.Popen]) -> list[int]:
    """The exit codes of all.

    Once one has failed, the others get a while to notice, then are ended; one that SIGTERM ended waits for the first,
    which still writes the checkpoint of all.
    """
    deadline_s: float | None = None
    while True:
        codes = [process.poll() for process in started]
        if None not in codes:
            return [process.returncode for process in started]
        if any(code not in (None, 0, Preempted.exit_code) for code in codes) and deadline_s is None:
            deadline_s = time.monotonic() + _PATIENCE_S
        if deadline_s and time.monotonic() > deadline_s:
            for process in started:
                process.kill()
        time.sleep(_POLL_S)


def _raise_for(codes: Sequence[int], path: Path) -> None:
    known = {InputError.exit_code: InputError, Preempted.exit_code: Preempted}
    # One that SIGTERM met before it could save has saved nothing that it had.
    ended = [Preempted.exit_code if code == -signal.SIGTERM else code for code in codes]
    failed = [(rank, code) for rank, code in enumerate(ended) if code]
    if not failed:
        return
    if any(code in (130, -signal.SIGINT) for _, code in failed):
        raise KeyboardInterrupt
    # One that only lost the others says less than the one that has a reason.
    rank, code = min(failed, key=lambda item: (item[1] not in known, item[0]))
    kind: type[GemsmithError] = known.get(code, EngineError)
    reason = (
        "stopped by SIGTERM"
        if kind is Preempted
        else f"process {rank} of {len(codes)} ended with {code}; its reason is above"
    )
    raise kind(f"training: {reason}; continue with: gemsmith train {path}")


@contextlib.contextmanager
def _handing_on_signals(started: Sequence[subprocess.Popen]) -> Iterator[None]:
    """SIGTERM goes to all processes, which save and end; whatever ends the block early ends them."""
    on_main = threading.current_thread() is threading.main_thread()

    def hand_on(number: int, _: object) -> None:
        for process in started:
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, hand_on) if on_main else None
    try:
        yield
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
