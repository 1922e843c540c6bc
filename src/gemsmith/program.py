"""A command line as a process: its exit codes, its signals, and errors as one line."""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import click

from gemsmith.characters import spell_out
from gemsmith.errors import USERS_ERRNOS, GemsmithError, Preempted, explain_os_error


def run_program(command: click.Command, arguments: Sequence[str] | None) -> NoReturn:
    """Runs a command line and exits: 0 done, 1 our failure, 2 the user's input, 130 Ctrl-C, 143 SIGTERM."""
    signal.signal(signal.SIGTERM, _stop_on_sigterm)
    unheard = sys.unraisablehook
    hook = sys.unraisablehook = partial(_raise_again, unheard)
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the locale's encoding lacks a letter, it is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    # pydantic looks for plugins in all that is installed; Gemsmith has none, and the search takes 30 ms.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        # Returns None after a verb, an exit code after --help or --version.
        code = command.main(args=arguments, prog_name="gemsmith", standalone_mode=False) or 0
    except click.ClickException as error:
        code = _complain(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("stopped by Ctrl-C; the same command goes on where it was", 130)
    except GemsmithError as error:
        code = _complain(str(error), error.exit_code)
    except OSError as error:
        # Of the kernel's own folders, /proc says that a file to be made is not there.
        if error.errno not in USERS_ERRNOS and not str(error.filename).startswith(("/proc/", "/sys/")):
            raise
        code = _complain(explain_os_error(error), 2)
    finally:
        # Not where training has put its own before it, for what its threads still say of a full disk or a damaged
        # checkpoint.
        if sys.unraisablehook is hook:
            sys.unraisablehook = unheard
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    kind = "error" if code in (1, 2) else "note"
    # What the user can mend is one line; what an engine wrote may be several.
    click.echo(f"{kind}: {spell_out(message, lines=code != 2)}", err=True)
    return code


def _stop_on_sigterm(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Preempted("stopped by SIGTERM; the same command goes on where it was")


def _raise_again(unheard: Callable[[Any], object], swallowed: Any) -> None:
    """Sends a signal once more whose exception was lost in a callback of the garbage collector, such as JAX's."""
    number = {KeyboardInterrupt: signal.SIGINT, Preempted: signal.SIGTERM}.get(swallowed.exc_type)
    if number is None:
        unheard(swallowed)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
