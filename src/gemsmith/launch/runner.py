"""External commands, each run by one function, so that tests put a stand-in on PATH that records what it was asked."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsmith.errors import EngineError, MachineError, last_line
from gemsmith.launch.target import Command

PATIENCE_S = 120
"""For a command that only asks."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    output: str
    complaint: str
    """The last line of its stderr."""


def ask(command: Command) -> Answer:
    """What a command printed; a program that is not there, or does not answer, is an answer with a complaint."""
    if shutil.which(command[0]) is None:
        return Answer(code=127, output="", complaint=f"{command[0]} is not on PATH")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return Answer(code=124, output="", complaint=f"no answer within {PATIENCE_S} s")
    return Answer(code=done.returncode, output=done.stdout, complaint=last_line(done.stderr) if done.stderr else "")


def show(command: Command) -> None:
    """Runs a command whose output is the user's to read. Raises EngineError where it fails."""
    _refuse_missing(command[0])
    if code := subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode:
        raise EngineError(f"{' '.join(command[:4])} … ended with {code}; its own lines are above")


def run_script(script: Path, *, needs: Sequence[str]) -> None:
    """Runs a rendered script. Raises MachineError where a program is missing, EngineError where the script fails.

    It finds this Gemsmith, also where the environment that it is in is not on PATH.
    """
    for program in ("bash", *needs):
        _refuse_missing(program)
    ours = {"PATH": f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"}
    command, environment = ["bash", str(script)], os.environ | ours
    if code := subprocess.run(command, check=False, stdin=subprocess.DEVNULL, env=environment).returncode:
        raise EngineError(f"{script} ended with {code}; its own lines are above")


def _refuse_missing(program: str) -> None:
    if shutil.which(program) is None:
        raise MachineError(f"{program}: is not on PATH; install it and run the same command again")
