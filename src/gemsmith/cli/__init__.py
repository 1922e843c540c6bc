"""The command line. Nothing heavy is imported before a verb needs it."""

from collections.abc import Sequence
from typing import NoReturn

from gemsmith.cli import (
    launch,
    plan,
)
from gemsmith.cli import (
    recipe as prepare,
)
from gemsmith.cli import (
    recipe as recipes,
)
from gemsmith.cli import (
    report as reports,
)
from gemsmith.cli import (
    run as stages,
)
from gemsmith.cli import (
    serve as chat,
)
from gemsmith.cli import (
    serve as served,
)
from gemsmith.cli.main import cli, run_program


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits; see gemsmith.cli.main.run_program."""
    run_program(cli, arguments)
