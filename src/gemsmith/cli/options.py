"""What verbs share: their options, a run opened and locked, and modules imported when they are needed."""

import contextlib
import importlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from gemsmith.errors import InputError, MachineError
from gemsmith.system.characters import escape_control_chars, escape_control_chars_json

FOLDER = click.Path(path_type=Path)
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
Verb = Callable[..., None]
_TYPES = {"FILE": FOLDER, "FOLDER": FOLDER, "DIR": FOLDER, "N": click.IntRange(min=1)}


class Number(click.FloatRange):
    """A number in a range; nan and inf, which pass every comparison that click makes, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option of a verb: without a type, one whose metavar is FILE, FOLDER or DIR is a path, and N counts from 1."""
    return click.option(*names, **{"type": _TYPES.get(settings.get("metavar", "")), **settings})


run_option = option("--run", "run_path", metavar="DIR", help="The run directory; default: runs/<recipe's name>.")
set_option = option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; may be repeated."
)
json_option = option("--json", "as_json", is_flag=True, help="Print the stage's record as JSON on stdout.")
skip_verify_option = option(
    "--skip-verify-check", is_flag=True, help="Serve weights that verify has not passed; the record says so."
)
force_option = option("--force", is_flag=True, help="Run again although the record is complete.")


def bucket_url(source: Path) -> str | None:
    """The address that a source is, whose two slashes a Path has made one; None for a file or folder.

    >>> bucket_url(Path("gs://b/run")), bucket_url(Path("runs/my"))
    ('gs://b/run', None)
    """
    scheme, _, rest = str(source).partition(":/")
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}" if scheme in ("gs", "file") and rest else None


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
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        modules = [frame.f_globals["__name__"].removeprefix("gemsmith.") for frame in frames]
        in_use = [part for part in _EXTRAS if any(f"{module}.".startswith(f"{part}.") for module in modules)]
        extra = _EXTRAS[in_use[0]] if in_use else None
        if extra is None or (error.name or "gemsmith").startswith("gemsmith"):
            raise
        raise MachineError(
            f"{error.name} is not installed, which this needs; run: pip install 'gemsmith[{extra}]'"
        ) from None


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text, on stdout or stderr, whatever characters are in it."""
    click.echo(escape_control_chars(text), err=err, nl=nl)


def print_json(found: Any) -> None:
    """Prints a record, or a document of JSON, on stdout."""
    click.echo(escape_control_chars_json(found if isinstance(found, str) else found.model_dump_json(indent=1)))


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """What the verbs of stages take: SOURCE, --run, --set and --json, and --force where it is one."""

    source: Any
    run_path: Path | None
    overrides: tuple[str, ...]
    as_json: bool
    force: bool = False

    def open_run(
        self,
        *,
        force: tuple[str, ...] = (),
        trains: bool = False,
        stack: contextlib.ExitStack | None = None,
        check: Callable[[Any], None] | None = None,
    ) -> Any:
        """The run, its directory locked until the command ends, or until `stack` is closed; `check` as open_source."""
        enter = stack.enter_context if stack else click.get_current_context().with_resource

        def lock(folder: Path) -> None:
            # Of the processes of one training, the first writes there for all.
            if not (trains and lazy_import("train.stage").is_later_host()):
                enter(lazy_import("system.locks").locked(folder))

        opener = lazy_import("runs.run").open_source
        return opener(Path(self.source), self.run_path, self.overrides, force=force, lock=lock, check=check)

    def run_stage(self, name: str, **options: bool) -> tuple[Any, Any]:
        """The run and the stage's record."""
        refuse = lazy_import("pipeline.preflight").refuse_before
        check = partial(refuse, stages=[name], force=self.force)
        opened = self.open_run(force=(name,) if self.force else (), trains=name == "train", check=check)
        return opened, lazy_import("pipeline").run_stage(opened, name, force=self.force, **options)

    def print_record(self, record: Any, show: Callable[[Any], None] = lambda _record: None) -> None:
        """Prints a record as JSON where --json asks for it, else as `show` does."""
        (print_json if self.as_json else show)(record)


def run_args(
    *, required: bool = True, kind: Any = FOLDER, count: int = 1, force: bool = False
) -> Callable[[Verb], Verb]:
    """Gives a verb RunArgs; some can do without a run, one takes more than paths, one several (-1)."""

    def decorate(function: Verb) -> Verb:
        @wraps(function)
        def verb(**options: Any) -> None:
            own = {name: options.pop(name) for name in RunArgs.__dataclass_fields__ if name in options}
            with require_extra():
                function(RunArgs(**own), **options)

        if force:
            verb = force_option(verb)
        source = click.argument("source", type=kind, required=required, nargs=count)
        return source(run_option(set_option(json_option(verb))))

    return decorate


def given_options() -> set[str]:
    """The parameters of the verb that its command line gives."""
    context = click.get_current_context()
    given = {name for name, value in context.params.items() if value not in (None, ())}
    return {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def _refuse(option: str, *others: str, given_too: bool, message: str) -> Callable[[Verb], Verb]:
    """Refuses each of the others with the option, or without it."""

    def decorate(function: Verb) -> Verb:
        @wraps(function)
        def verb(*arguments: Any, **options: Any) -> None:
            given, params = given_options(), click.get_current_context().command.params
            typed = {each.name: each.opts[0] if isinstance(each, click.Option) else "SOURCE" for each in params}
            odd = [typed[name] for name in others if name in given]
            if odd and (option in given) is given_too:
                raise InputError(message.format(typed[option], odd=odd[0]))
            function(*arguments, **options)

        return verb

    return decorate


requires = partial(_refuse, given_too=False, message="{odd}: goes with {}; give it too, or leave {odd} out")
conflicts = partial(_refuse, given_too=True, message="{odd}: does not go with {}; leave one out")
