"""Several hosts, each with some of the devices: how they meet, what each reads of a batch, and what they must agree on.

Only the first host writes records and logs; a step's metrics, and so every decision that follows from them, are the
same on all.
"""

import atexit
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from gemsmith.errors import EngineError, GemsmithError, MachineError, RunError, Terminated, first_line
from gemsmith.runs.run import Run
from gemsmith.system.console import open_console
from gemsmith.system.signals import handling, heard_later, leave
from gemsmith.system.version import __version__
from gemsmith.train.jax.upstream import count_tpu_hosts
from gemsmith.train.resume import check_consistency

Shapes = dict[str, jax.ShapeDtypeStruct]

_PATIENCE_S = 300
# After which a host that says nothing, killed or suspended, ends the others; JAX's own is 100.
_SILENT_S = 30
# The longest that a host comes no further: until a first step has ended, and at least in those of LoRA after it.
_LONGEST_SILENCE_S = 3600.0
LONGEST_STEP_S = 600.0
_LOOK_S = 5.0  # between two looks
# What a collective says whose other end is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Gloo context init")
# Where all hosts fail, the first stays as long as the others need to say why: JAX ends them with it.
_LAST_WORDS_S = 3
# While JAX waits: Python hears no signal inside it, and there is nothing to save yet.
_DYING = {signal.SIGTERM: signal.SIG_DFL}
# A handler of C's: Python's own would wait for the main thread.
_EXIT = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _signal: os._exit(1))
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@contextlib.contextmanager
def joined_hosts() -> Iterator[None]:
    """Joins the other hosts that train with this one, until the block ends; waits until all are there.

    They are those of JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0),
    and on a TPU slice of several hosts those of the slice. Raises MachineError for variables that name no group of
    hosts, or one that does not come together. Where one is lost, JAX ends the others, and one line says so; where one
    hangs, each ends itself.
    """
    if (terminal := _join()) is None:
        yield
        return
    threading.Thread(target=_end_with_a_host_that_hangs, daemon=True, name="hosts").start()
    told: Terminated | None = None
    try:
        try:
            yield
        except Terminated as error:
            if not _progress.count:  # the others load or compile, and do not stop
                raise
            told = error
        # All are here, or come; at its end JAX would wait for the first, which may have other stages, and abort after a
        # while.
        with heard_later():
            multihost_utils.sync_global_devices("trained")
            jax.distributed.shutdown()
    except BaseException as error:
        lost = isinstance(error, jax.errors.JaxRuntimeError) and any(words in str(error) for words in _LOST)
        if lost:
            time.sleep(2 * _SILENT_S)  # JAX will end this process, once it knows which host it is
        atexit.register(_leave, 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1))
        if lost:
            raise EngineError(f"training: another host is lost ({first_line(error)})") from None
        raise
    if told:
        raise told
    ctypes.CDLL(None).signal(signal.SIGABRT, signal.SIG_DFL)
    os.dup2(terminal, 2)
    os.close(terminal)


def _join() -> int | None:
    """What `_have_lost_hosts_said` returns, once this process has joined others; None where there are none."""
    named = any(os.environ.get(name) for name in _NAMES)
    if jax.distributed.is_initialized() or not (named or count_tpu_hosts() > 1):
        return None
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    given = _find_first_host() if named else {}
    given |= {"heartbeat_timeout_seconds": _SILENT_S, "initialization_timeout": _PATIENCE_S}
    terminal = _have_lost_hosts_said(given.get("num_processes") or count_tpu_hosts())
    with handling(_DYING):
        try:
            jax.distributed.initialize(**given)
        except RuntimeError as error:  # hosts that have parted do not meet again
            raise MachineError(f"the hosts cannot join ({first_line(error)}); train in a new process") from None
    return terminal


def _have_lost_hosts_said(hosts: int) -> int:
    """From here on lost_hosts.py passes on what is written to stderr; returns a descriptor of where it went before.

    JAX aborts a process that has lost another, or waits for one in vain: with exit code 1 now.
    """
    terminal = os.dup(2)
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("lost_hosts.py")), str(hosts)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    assert child.stdin is not None, "asked for"
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()
    ctypes.CDLL(None).signal(signal.SIGABRT, _EXIT)
    return terminal


_progress = SimpleNamespace(count=0, longest_s=_LONGEST_SILENCE_S)


def note_progress(*, longest_s: float | None = None) -> None:
    """Notes that this host has come further, as all do in the same order; from here on it must every `longest_s`.

    From the first time on they stop together, too.
    """
    _progress.count, _progress.longest_s = _progress.count + 1, longest_s or _progress.longest_s


def _end_with_a_host_that_hangs() -> None:
    """Until the hosts part: where this one comes no further for too long, says who hangs, and ends it."""
    seen, looks = -1, 0
    while (store := global_state.client) is not None:
        # Looks are counted, not seconds: this process may have been suspended itself.
        seen, looks = _progress.count, looks + 1 if seen == _progress.count else 0
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first host is gone, of which JAX tells
            store.key_value_set(f"gemsmith/progress/{jax.process_index()}", f"{seen} {looks}", allow_overwrite=True)
            if looks * _LOOK_S > _progress.longest_s:
                who, minutes = who_hangs(store.key_value_dir_get("gemsmith/progress"), looks), _progress.longest_s / 60
                told = f"error: training: {who}, without a step for {minutes:.3g} minutes; all hosts end"
                os.write(2, f"{told}, and continue from the last saved step with the same command on each\n".encode())
                os._exit(1)
        time.sleep(_LOOK_S)


def who_hangs(said: Sequence[tuple[str, str]], looks: int) -> str:
    """Which hosts hang, by what each said last under its key: how often it came further, and its looks since then."""
    found = {key.rpartition("/")[2]: (*map(int, last.split()),) for key, last in said}
    least, most = min(found.values())[0], max(found.values())[0]
    # One that holds Python's lock looks no more.
    behind = [host for host, (count, idle) in found.items() if count == least < most or 2 * idle < looks]
    return f"host {' and '.join(behind)} of {len(found)} hangs" if behind else "the hosts hang"


def _leave(code: int) -> None:
    """Ends a process that has failed: JAX would have it wait for all the others, which may wait for it."""
    if jax.process_index() == 0:
        time.sleep(_LAST_WORDS_S)
    leave(code)


def check_accelerator() -> None:
    """Raises MachineError where JAX_PLATFORMS asks for devices that this machine does not have."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a platform whose plugin is not installed
        reason = first_line(error, otherwise="its plugin is not installed")
        raise MachineError(
            f"no accelerator: JAX_PLATFORMS is {jax.config.values['jax_platforms']} ({reason}); unset it to "
            "train on what there is"
        ) from None


def find_accelerators() -> tuple[str, ...]:
    """The devices that JAX has, as their driver calls them; none on a CPU."""
    return tuple(device.device_kind for device in jax.devices() if device.platform != "cpu")


def check_hosts(run: Run) -> None:
    """Raises RunError unless all hosts have the same recipe, rows and versions, and see the same checkpoints."""
    if jax.process_count() == 1:
        return
    if store := global_state.client:  # before the first collective, in which CPUs wait for 30 s
        store.wait_at_barrier("gemsmith/loaded", int(_LONGEST_SILENCE_S * 1000))

    def gather(own: bytes) -> list[bytes]:
        return [other.tobytes() for other in multihost_utils.process_allgather(np.frombuffer(own, np.uint8))]

    check_consistency(run, gather, {"versions": [__version__, jax.__version__]}, kinds=("host", "hosts"))
    token = int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))
    mark, is_first = run.checkpoints / f".seen-by-all-{token}", jax.process_index() == 0
    if is_first:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    multihost_utils.sync_global_devices("mark written")
    seen = multihost_utils.process_allgather(np.bool_(mark.exists()))
    if is_first:
        mark.unlink()
    if not seen.all():
        raise RunError(
            f"{run.checkpoints}: host {int(np.argmin(seen))} does not see what host 0 writes there; set "
            "train.checkpoint_folder to one that all hosts share, or gs://bucket/folder"
        )


def holds_on_all_hosts(holds: bool) -> bool:
    """Whether it holds on every host; all must ask."""
    return holds if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.bool_(holds)).all())


def raise_on_all_hosts(fault: GemsmithError | None, *, saved: str = "") -> None:
    """Raises the fault that this host has met, or RunError where another has met one; `saved`: what is left of it."""
    faults = np.array([fault is not None])
    if jax.process_count() > 1:
        faults = multihost_utils.process_allgather(faults[0])
    if fault is not None:
        raise fault
    if faults.any():
        raise RunError(f"host {int(np.argmax(faults))} cannot read its rows, so no host trains; it says why{saved}")


def local_rows(like: jax.ShapeDtypeStruct) -> list[int]:
    """The rows of a batch that the devices of this host hold, in order."""
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    return sorted({row for index in indices for row in range(*index[0].indices(like.shape[0]))})


def shard_batch(arrays: Mapping[str, np.ndarray], rows: Sequence[int], shapes: Shapes) -> dict[str, jax.Array]:
    """A batch's arrays over the devices of all hosts.

    They hold only the rows that `rows` numbers: those of this host's devices.
    """
    places = {row: place for place, row in enumerate(rows)}

    def placed(array: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            chosen = [places[row] for row in range(*index[0].indices(like.shape[0]))]
            return array[chosen][:, *index[1:]].astype(like.dtype, copy=False)

        return jax.make_array_from_callback(like.shape, like.sharding, part)

    return {name: placed(array, shapes[name]) for name, array in arrays.items()}


def place(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The value as the step takes it, cast and split over the devices of all hosts; a number fills the whole array."""
    whole = np.broadcast_to(np.asarray(value, like.dtype), like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def _find_first_host() -> dict[str, Any]:
    """What jax.distributed.initialize takes, by the variables; waits until the first host is there."""
    address, count, number = (os.environ.get(name, "") for name in _NAMES)
    if missing := [name for name in _NAMES if not os.environ.get(name)]:
        raise MachineError(
            f"{missing[0]}: is missing; several hosts need {', '.join(_NAMES)}, or --coordinator, --processes, "
            "--process-id"
        )
    if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise MachineError(
            f"JAX_PROCESS_ID: {number} of {count} was given; they are numbered from 0 to JAX_NUM_PROCESSES - 1"
        )
    name, _, port = address.rpartition(":")
    if not (name and port.isdecimal()):
        raise MachineError(f"JAX_COORDINATOR_ADDRESS: {address!r} was given; it is host:port of the first host")
    # JAX ends the process from C++ where it cannot have its port, or waits in vain.
    if number == "0":
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                raise MachineError(
                    f"JAX_COORDINATOR_ADDRESS: port {port} cannot be opened ({error.strerror}); name a free one"
                ) from None
        open_console().print(f"train  waiting for {int(count) - 1} more hosts at {address}")
    else:
        _wait_for(name, int(port), host=f"{number} of {count}")
    group = {"coordinator_address": address, "num_processes": int(count), "process_id": int(number)}
    return group | {"cluster_detection_method": "deactivate"}


def _wait_for(name: str, port: int, *, host: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            socket.create_connection((name, port), timeout=_PATIENCE_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise MachineError(
                    f"host {host} does not reach the first at {name}:{port} ({error.strerror or error}); start that "
                    "one too"
                ) from None
        time.sleep(0.2)
