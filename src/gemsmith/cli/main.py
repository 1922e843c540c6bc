"""The command line: the group that verbs join, what they import and print; exit codes, signals, errors as one line."""

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

import click

from gemsmith.errors import USERS_ERRNOS, GemsmithError, MachineError, Terminated, explain_os_error, first_line
from gemsmith.system.characters import escape_control_chars, escape_control_chars_json
from gemsmith.system.version import __version__

_LONGEST_LINE = 4000
_SIGTERM, _CTRL_C = (f"stopped by {name}; the same command resumes where it was" for name in ("SIGTERM", "Ctrl-C"))
_EXTRAS = {
    "serve.chat.web": "chat",
    "report.push": "data",
    **dict.fromkeys(("report", "analysis"), "report"),
    "verify": "verify",
    **dict.fromkeys(("evals", "bench", "serve"), "serve"),
    "train.torch": "trl",
    **dict.fromkeys(("train", "plan.aot", "models"), "jax"),
    **dict.fromkeys(("export", "launch", "importers.draft", "data", "images", "checkpoints"), "data"),
    **dict.fromkeys(("system.patterns", "tasks.regex"), "data"),
}
"""A part of Gemsmith -> the extra that brings what it imports. Of parts that import each other the upper one comes
first."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="gemsmith")
def cli() -> None:
    """Plan, fine-tune, export, verify, serve and compare Gemma 4 on TPU and GPU, from one recipe.

    \b
    gemsmith run recipes/demo.yaml                     every stage, into runs/demo
    gemsmith run my.yaml --set lora.rank=16            the same with one key changed
    gemsmith run runs/my                               resume a run that was stopped
    gemsmith doctor my.yaml                            what would stop a run here, all of it at once
    gemsmith plan recipes/verilog_31b.yaml             what fits, how long, what it costs
    gemsmith data my.yaml --show 3                     three rows, trained tokens colored
    gemsmith serve runs/my                             keep the tuned model up
    gemsmith report runs/a runs/b                      what differs, and the ratios that it leaves
    gemsmith runs                                      all runs: state, loss, score, speed, cost
    gemsmith chat runs/my --web                        base and tuned model side by side
    gemsmith launch my.yaml --provider tpu-vm ...      the same stages on a rented machine
    """


def lazy_import(name: str) -> ModuleType:
    """A module of Gemsmith, imported when it is needed; a missing extra is one line."""
    with require_extra():
        return importlib.import_module(f"gemsmith.{name}")


@contextlib.contextmanager
def require_extra() -> Iterator[None]:
    """Raises MachineError with the extra to install, where a module that Gemsmith imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        walked = traceback.walk_tb(error.__traceback__)
        modules = [frame.f_globals["__name__"].removeprefix("gemsmith.") for frame, _ in walked]
        in_use = [part for part in _EXTRAS if any(f"{module}.".startswith(f"{part}.") for module in modules)]
        extra = _EXTRAS[in_use[0]] if in_use else None
        if extra is None or (error.name or "gemsmith").startswith("gemsmith"):
            raise
        remedy = f"run: pip install 'gemsmith[{extra}]'"
        raise MachineError(f"{error.name} is not installed, which this needs; {remedy}") from None


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text, on stdout or stderr, whatever characters are in it."""
    click.echo(escape_control_chars(text), err=err, nl=nl)


def print_json(found: Any) -> None:
    """Prints a record, or a document of JSON, on stdout."""
    click.echo(escape_control_chars_json(found if isinstance(found, str) else found.model_dump_json(indent=1)))


class _Told(io.FileIO):
    """A stream for people, whose writes go nowhere once nobody reads it: an error of it must not end what is told of.

    A terminal that has closed, perhaps before SIGHUP is heard; or `2>&1 | tee log`, whose tee Ctrl-C has ended.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            self.redirect_to_nowhere()
            return memoryview(data).nbytes

    def redirect_to_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _open_closed_streams() -> None:
    """Else the next files that are opened get their numbers, and what libraries write to stderr lands in one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _treat_hangup_as_sigterm() -> None:
    """SIGHUP comes where the terminal closes; under nohup it is ignored."""
    terminals = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        is_terminal = isinstance(stream, io.TextIOWrapper) and stream.isatty()
        if is_terminal or stream is sys.__stderr__:
            told = _Told(stream.fileno(), "w", closefd=False)
            terminals += [told] * is_terminal
            writer = io.BufferedWriter(told)
            setattr(sys, name, io.TextIOWrapper(writer, stream.encoding, stream.errors, line_buffering=True))

    def hang_up(_signal: int, _frame: FrameType | None) -> None:
        for terminal in terminals:
            terminal.redirect_to_nowhere()
        os.kill(os.getpid(), signal.SIGTERM)

    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits: 0 done, 1 our failure, 2 the user's input, 130 Ctrl-C, 143 SIGTERM or SIGHUP."""
    sigterm = _Sigterm()
    signal.signal(signal.SIGTERM, sigterm)
    _open_closed_streams()
    _treat_hangup_as_sigterm()
    unheard = sys.unraisablehook

    def raise_again(swallowed: Any) -> None:
        """Sends a signal once more whose exception was lost in a callback of the garbage collector, such as JAX's."""
        number = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(swallowed.exc_type)
        if number is not None:
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        elif not sigterm.came:  # else it is of something that SIGTERM has left half made
            unheard(swallowed)

    sys.unraisablehook = raise_again
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the locale's encoding lacks a letter, it is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    # pydantic looks for plugins in all that is installed; Gemsmith has none, and the search takes 30 ms.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code, *messages = _outcome(arguments)
    except BaseException as error:
        sigterm.over = True
        if isinstance(error, Terminated):
            code, messages = error.exit_code, [str(error)]
        elif sigterm.came:
            code, messages = 1, [f"{type(error).__name__}: {first_line(error)}"]
        else:
            raise
    sigterm.over = True
    # The result stands: what is still to come is the interpreter's end, in which libraries would be disturbed.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    exec("")  # noqa: S102 - else CPython ends by SIGINT, not with the code, where Ctrl-C came within an exec of a text
    if sigterm.came and code not in (0, Terminated.exit_code):
        code, messages = Terminated.exit_code, [f"{_SIGTERM}; it ended with: {'; '.join(messages)}"]
    # Not where training has put its own before it, for what its threads still say of full disks or damaged checkpoints.
    if sys.unraisablehook is raise_again:
        sys.unraisablehook = unheard
    for message in filter(None, messages):
        kind = "error" if code in (1, 2) else "note"
        # What the user can mend is one line; what an engine wrote may be several.
        line = escape_control_chars(message, lines=code != 2)
        if code == 2 and len(line) > _LONGEST_LINE:  # a name in a damaged file may be the whole file
            line = f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 2 :]}"
        click.echo(escape_control_chars(f"{kind}: {line}"), err=True)
    sys.exit(code)


def _outcome(arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """The exit code of a command line, and what to say of it, in one text or several."""
    try:
        # Returns None after a verb, an exit code after --help or --version.
        with _ctrl_c_as_it_was():
            return cli.main(args=arguments, prog_name="gemsmith", standalone_mode=False) or 0, ""
    except click.ClickException as error:
        return 2, " ".join(error.format_message().split())
    except (KeyboardInterrupt, click.Abort) as error:
        # Click makes an Abort of Ctrl-C.
        return 130, str(error.__cause__ or error) or _CTRL_C
    except GemsmithError as error:
        return error.exit_code, *map(str, error.problems)
    except OSError as error:
        # One that names a file is of a disk that fails, or of what somebody has removed meanwhile.
        if error.errno not in USERS_ERRNOS and not error.filename:
            raise
        return 2, explain_os_error(error)


@contextlib.contextmanager
def _ctrl_c_as_it_was() -> Iterator[None]:
    """Raises KeyboardInterrupt in place of what a library, or what was cleared up after it, has made of one."""
    try:
        yield
    except Exception as error:
        before = error.__context__
        while before is not None and not isinstance(before, KeyboardInterrupt):
            before = before.__context__
        if before is None or isinstance(error, click.Abort):
            raise
        raise KeyboardInterrupt(f"{_CTRL_C}; it ended with: {type(error).__name__}: {first_line(error)}") from None


class _Sigterm:
    """What SIGTERM does: raises Terminated in the main thread, until the command's result stands.

    Where a library makes an error of its own of that, `came` tells what it was.
    """

    came = over = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if not self.over:
            self.came = True
            raise Terminated(_SIGTERM)
