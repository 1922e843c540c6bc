"""The command line. Nothing heavy is imported before a verb needs it."""

from gemsmith.cli import launch, plan, recipe, report, run, serve  # noqa: F401 - their verbs join the group
from gemsmith.cli.main import cli, main

__all__ = ["cli", "main"]
