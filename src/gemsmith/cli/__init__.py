"""The command line. Nothing heavy is imported before a verb needs it."""

from collections.abc import Sequence
from typing import NoReturn

from gemsmith.cli import (  # noqa: F401 - their verbs join the group
    chat,
    launch,
    plan,
    prepare,
    recipes,
    reports,
    served,
    stages,
)
from gemsmith.cli.group import cli
from gemsmith.program import run_program


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits; see gemsmith.program.run_program."""
    run_program(cli, arguments)
