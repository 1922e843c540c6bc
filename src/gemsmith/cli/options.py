"""What verbs share: their options, and a run opened and locked."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gemsmith.cli.main import lazy_import, print_json, require_extra
from gemsmith.errors import InputError

FOLDER = click.Path(path_type=Path)
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
        check = partial(lazy_import("pipeline.preflight").refuse_before, stages=[name], force=self.force)
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
