"""How one server is deployed: a plain description, and the exact command that it comes to, in Docker or here."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gemsmith.errors import MachineError, RecipeError
from gemsmith.hardware import Machine, find_machine, load_catalog
from gemsmith.serve.settings import KEY_VARIABLE, ServeSettings
from gemsmith.system.files import expanduser

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DEV = Path("/dev")
_TIMEOUT_S = 20
# Arguments that would be printed and recorded, or go round what is checked here.
_ELSEWHERE = {
    "--api-key": f"would be printed and recorded; set ${KEY_VARIABLE} instead",
    "--host": "is not checked there; set serve.host instead",
    "--port": "is not known there; set serve.port instead",
    "--enable-lora": "is not known there; set serve.weights to adapter instead",
    "--lora-modules": "is not known there; set serve.weights to adapter instead",
}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or folder of the host that a container sees; a relative one is seen from the working directory."""

    host: str
    inside: str
    writable: bool = False


class DeploymentChoice(NamedTuple):
    """Something that was chosen for this machine and model, why, and the arguments of vLLM that say it, if any do."""

    what: str
    why: str
    arguments: tuple[str, ...] = ()


def choose_option(*arguments: str, why: str) -> DeploymentChoice:
    return DeploymentChoice(" ".join(arguments), why, arguments)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One server of vLLM: all that its command line comes from."""

    image: str | None = None  # None: a Python of this machine
    program: tuple[str, ...]  # what begins the command: arguments of the image's entry point, or Python and a module
    docker_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()  # variables whose values come from the environment, and stand in no command
    mounts: tuple[Mount, ...] = ()
    arguments: tuple[str, ...]
    port: int
    choices: tuple[DeploymentChoice, ...] = ()


def refuse_open_server(settings: ServeSettings, *, has_key: bool) -> None:
    """Raises RecipeError for a server that others could use without a key, or arguments that go round this check."""
    for word in settings.arguments:
        option = word.partition("=")[0].replace("_", "-")
        # An option's beginning is enough for argparse.
        known = next((name for name in _ELSEWHERE if len(option) > 2 and name.startswith(option)), None)
        if known is not None:
            raise RecipeError(f"serve.arguments: {word.partition('=')[0]}: {known} {_ELSEWHERE[known]}")
    if settings.host not in _LOOPBACK and not settings.host.startswith("127.") and not has_key:
        raise RecipeError(
            f"serve.host: {settings.host} lets other machines in, and ${KEY_VARIABLE} is not set; set it to a key that "
            "clients must send, or serve.host to 127.0.0.1"
        )


def as_command(deployment: Deployment, *, container: str = "") -> list[str]:
    """The command line as a list, with absolute paths; `container` names it, so that it can be removed."""

    def absolute(path: str, rest: str) -> str:  # not resolved: a link may be meant, as that of an environment's Python
        return f"{expanduser(path).absolute() if os.sep in path else path}{rest}"

    named = ("--name", container) if container else ()
    return [word for line in _lines(deployment, named, quoted=str, path=absolute) for word in line]


def as_shell(deployment: Deployment) -> str:
    """The same for a shell, a line for each option; variables that the environment gives are named, never told."""
    lines = [" ".join(line) for line in _lines(deployment, (), quoted=shlex.quote, path=_shell_path)]
    if deployment.image is None:
        given = [f'{name}="${name}"' for name in deployment.passed]
        given += [f"{name}={shlex.quote(value)}" for name, value in deployment.environment.items()]
        lines = [*given, *lines]
    return " \\\n  ".join(lines)


def _lines(
    deployment: Deployment, named: tuple[str, ...], *, quoted: Callable[[str], str], path: Callable[[str, str], str]
) -> Iterator[list[str]]:
    """The words, an option and its values in a line; `path` writes a path of the host and the rest of its word."""
    if deployment.image is None:
        first, *rest = deployment.program
        yield [path(first, ""), *map(quoted, rest)]
    else:
        yield ["docker", "run", "--rm", "--init", *named]
        yield from ([*map(quoted, line)] for line in _by_option(deployment.docker_flags))
        for mount in deployment.mounts:
            yield ["--volume", path(mount.host, f":{mount.inside}{'' if mount.writable else ':ro'}")]
        for name, value in deployment.environment.items():
            yield ["--env", quoted(f"{name}={value}")]
        for name in deployment.passed:
            yield ["--env", name]
        yield [quoted(word) for word in (deployment.image, *deployment.program)]
    yield from ([*map(quoted, line)] for line in _by_option(deployment.arguments))


def _by_option(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    starts = [0, *(place for place, word in enumerate(words) if place and word.startswith("-")), len(words)]
    return (words[start:end] for start, end in pairwise(starts) if words)


def _shell_path(path: str, rest: str) -> str:
    if path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:] + rest)}'
    if not rest or Path(path).is_absolute():
        return shlex.quote(path + rest)
    return f'"$PWD"/{shlex.quote(path + rest)}'


def machine_named(name: str, catalog: str | None) -> Machine:
    """The machine of that name. Raises RecipeError as find_machine, and for several hosts: a server has one."""
    machine = find_machine(load_catalog(catalog), name, "--machine")
    if machine.hosts > 1:
        raise RecipeError(f"--machine {name}: has {machine.hosts} hosts, a server here has one; name a smaller one")
    return machine


def refuse_other_host(machine: Machine) -> None:
    """Raises MachineError where this host lacks the machine's chips."""
    if machine.chip.kind == "cpu":
        return
    if machine.chip.kind == "gpu":
        found = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    else:
        # A name for each chip, as far as the machine says which it is.
        named = os.environ.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
        found = [named for _ in (*_DEV.glob("accel[0-9]*"), *_DEV.glob("vfio/[0-9]*"))]
    # By letters and digits alone: `NVIDIA RTX PRO 6000 Blackwell` has `rtx-pro-6000` in it.
    wanted, *plain = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (machine.chip.name, *found))
    # A TPU's device files do not say which it is.
    same = [chip for chip in plain if (machine.chip.kind == "tpu" and not chip) or wanted in chip]
    if len(same) < machine.chips:
        has = ", ".join(sorted({chip or "a TPU" for chip in found})) or f"no {machine.chip.kind.upper()}"
        raise MachineError(
            f"--machine {machine.name}: this host has {len(same)} of its {machine.chips} {machine.chip.name} ({has}); "
            "run this there, or add --print for the command"
        )


def this_machine_as(name: str | None, catalog: str | None) -> dict[str, Any]:
    """How this machine serves as the one that is named: settings. Raises MachineError where it is another."""
    if name is None:
        return {}
    machine = machine_named(name, catalog)
    refuse_other_host(machine)
    return {} if machine.chip.kind == "cpu" else {"machine": machine, "in_docker": docker_answers()}


def docker_answers() -> bool:
    """Whether there is a Docker daemon that takes commands here."""
    return bool(_output(["docker", "version", "--format", "{{.Server.Version}}"]))


def remove_container(name: str) -> None:
    """Removes a container that may still be there, since its client was killed."""
    _output(["docker", "rm", "--force", name])


def _output(command: list[str]) -> str:
    """What a command says, or nothing where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
