"""The command line. Nothing heavy is imported before a verb needs it."""

import os
import sys

try:
    from gemsmith.cli import launch, plan, recipe, report, run, serve  # noqa: F401 - their verbs join the group
    from gemsmith.cli.main import cli, main
except KeyboardInterrupt:  # before `main` can say it
    os.write(2, b"note: stopped by Ctrl-C before anything was done\n")
    sys.exit(130)

__all__ = ["cli", "main"]
