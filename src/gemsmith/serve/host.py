"""Whether this host is a machine of the catalogue, and whether Docker answers here."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gemsmith.errors import MachineError, RecipeError, nearest
from gemsmith.hardware import Machine, load_catalogue

_DEV = Path("/dev")
_TIMEOUT_S = 20
_TPU_VARIABLE = "TPU_ACCELERATOR_TYPE"


def machine_named(name: str, catalogue: str | None) -> Machine:
    """The machine of that name, in the shipped catalogue or with the user's over it.

    Raises RecipeError with the names that exist, and for one of several hosts, which one server does not span.
    """
    machines = load_catalogue(catalogue).machines
    if name not in machines:
        raise RecipeError(
            f"--on {name}: is not in the catalogue{nearest(name, machines)}; allowed: {', '.join(machines)}; add "
            "others in hardware.catalogue"
        )
    if machines[name].hosts > 1:
        raise RecipeError(f"--on {name}: has {machines[name].hosts} hosts, a server here has one; name a smaller one")
    return machines[name]


def refuse_other_host(machine: Machine) -> None:
    """Raises MachineError where this host lacks the machine's chips."""
    if machine.chip.kind == "cpu":
        return
    found = list(_gpus() if machine.chip.kind == "gpu" else _tpu_chips())
    wanted = _plain(machine.chip.name)
    # A TPU's device files do not say which it is.
    same = [chip for chip in found if (machine.chip.kind == "tpu" and not chip) or wanted in _plain(chip)]
    if len(same) < machine.chips:
        has = ", ".join(sorted({chip or "a TPU" for chip in found})) or f"no {machine.chip.kind.upper()}"
        raise MachineError(
            f"--on {machine.name}: this host has {len(same)} of its {machine.chips} {machine.chip.name} ({has}); run "
            "this there, or add --print for the command"
        )


def docker_answers() -> bool:
    """Whether there is a Docker daemon that takes commands here."""
    return bool(_output(["docker", "version", "--format", "{{.Server.Version}}"]))


def remove_container(name: str) -> None:
    """Removes a container that may still be there, since its client was killed."""
    _output(["docker", "rm", "--force", name])


def _gpus() -> Iterator[str]:
    yield from _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()


def _tpu_chips() -> Iterator[str]:
    """A name for each chip that the host has, as far as the machine says which it is."""
    named = os.environ.get(_TPU_VARIABLE, "").partition("-")[0]
    files = [*_DEV.glob("accel[0-9]*"), *_DEV.glob("vfio/[0-9]*")]
    yield from [named] * len(files)


def _plain(name: str) -> str:
    """Letters and digits alone: `NVIDIA RTX PRO 6000 Blackwell` has `rtx-pro-6000` in it."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _output(command: list[str]) -> str:
    """What a command says, or nothing where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
