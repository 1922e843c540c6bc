"""Every check of a target, each a line; nothing is created where one fails."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gemsmith.errors import MachineError
from gemsmith.launch.runner import ask
from gemsmith.launch.target import Check

_FIRST = 2
"""Without gcloud and a login nothing else can be asked."""


def run_preflight(checks: Sequence[Check], console: Console) -> None:
    """Prints a line for each check, with its remedy where it fails. Raises MachineError once all have been asked."""
    failed = []
    for number, check in enumerate(checks):
        complaint = find_complaint(check)
        console.print(_line(check, complaint))
        if complaint is not None and check.needed:
            failed.append(check.name)
            if number < _FIRST:
                break
    if failed:
        raise MachineError(
            f"preflight: {len(failed)} of {len(checks)} checks failed ({failed[0]}{', …' if len(failed) > 1 else ''}); "
            "nothing was created; do what the lines above say and run the same command again"
        )


def find_complaint(check: Check) -> str | None:
    """What is wrong; None where nothing is."""
    answer = ask(check.command)
    if answer.code:
        return answer.complaint or f"{check.command[0]} ended with {answer.code}"
    return check.complaint(answer.output)


def _line(check: Check, complaint: str | None) -> Text:
    if complaint is None:
        return Text.assemble(("ok    ", "green"), check.name)
    mark = ("fails ", "red") if check.needed else ("note  ", "yellow")
    return Text.assemble(mark, f"{check.name}: {complaint}; {check.remedy}")
