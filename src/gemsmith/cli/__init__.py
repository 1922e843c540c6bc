"""The command line. Nothing heavy is imported before a verb needs it."""

from collections.abc import Sequence
from typing import NoReturn

from gemsmith.cli import launch, plan, recipe, report, run, serve  # noqa: F401 - their verbs join the group
from gemsmith.cli.main import cli, run_program


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits; see gemsmith.cli.main.run_program."""
    run_program(cli, arguments)
