"""What verbs share: their options, a run opened and locked, and modules imported when they are needed."""

import contextlib
import functools
import importlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from gemsmith.errors import MachineError
from gemsmith.system.characters import escape_control_chars_json

FOLDER = click.Path(path_type=Path)


class Number(click.FloatRange):
    """A number in a range; nan and inf, which pass every comparison that click makes, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_EXTRAS = {
    "serve.chat.web": "chat",
    "report": "report",
    "analysis": "report",
    "verify": "verify",
    "evals": "serve",
    "bench": "serve",
    "serve": "serve",
    "train.torch": "trl",
    "train": "jax",
    "plan.aot": "jax",
    "models": "jax",
    "export": "data",
    "launch": "data",
    "data": "data",
    "images": "data",
    "checkpoints": "data",
    "system.patterns": "data",
    "tasks.regex": "data",
}
"""A part of Gemsmith -> the extra that brings what it imports. Of parts that import each other the upper one comes
first."""


def source_options(
    function: Callable[..., None], *, required: bool = True, kind: Any = FOLDER, count: int = 1
) -> Callable[..., None]:
    """The arguments that every verb takes; some can do without a run, one takes more than paths, one several (-1)."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the stage's record as JSON on stdout."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a key of the recipe; may be repeated.",
        ),
        click.option(
            "--run", "run_path", metavar="DIR", type=FOLDER, help="The run directory; default: runs/<recipe's name>."
        ),
        click.argument("source", type=kind, required=required, nargs=count),
    ):
        function = option(function)
    return _require_extras(function)


unverified_option = click.option(
    "--unverified", is_flag=True, help="Serve weights that verify has not passed; the record says so."
)
force_option = click.option("--force", is_flag=True, help="Do the stage again although its record is complete.")


def bucket_url(source: Path) -> str | None:
    """The address that a source is, whose two slashes a Path has made one; None for a file or folder.

    >>> bucket_url(Path("gs://b/run")), bucket_url(Path("runs/my"))
    ('gs://b/run', None)
    """
    scheme, _, rest = str(source).partition(":/")
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest}" if scheme in ("gs", "file") and rest else None


def part(name: str) -> ModuleType:
    """A module of Gemsmith, imported when it is needed; a missing extra is one line."""
    with require_extra():
        return importlib.import_module(f"gemsmith.{name}")


@contextlib.contextmanager
def require_extra() -> Iterator[None]:
    """Raises MachineError with the extra to install, where a module that Gemsmith imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        modules = [
            frame.f_globals["__name__"].removeprefix("gemsmith.") for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        extra = next(
            (_EXTRAS[part] for part in _EXTRAS if any(f"{module}.".startswith(f"{part}.") for module in modules)), None
        )
        if extra is None or (error.name or "gemsmith").startswith("gemsmith"):
            raise
        raise MachineError(
            f"{error.name} is not installed, which this needs; run: pip install 'gemsmith[{extra}]'"
        ) from None


def _require_extras(function: Callable[..., None]) -> Callable[..., None]:
    """The same verb, within `require_extra`."""

    @functools.wraps(function)
    def verb(*arguments: Any, **options: Any) -> None:
        with require_extra():
            function(*arguments, **options)

    return verb


def open_source(
    source: Path,
    run_path: Path | None,
    overrides: Sequence[str],
    *,
    force: str | None = None,
    trains: bool = False,
    lock: contextlib.ExitStack | None = None,
) -> Any:
    """The run, its directory locked until the command ends, or until `lock` is closed."""
    enter = lock.enter_context if lock else click.get_current_context().with_resource

    def claim(folder: Path) -> None:
        # Of the processes of one training, the first writes there for all.
        if not (trains and part("train.stage").is_later_host()):
            enter(part("system.locks").locked(folder))

    return part("runs.run").open_source(source, run_path, overrides, force=force, claim=claim)


def run_stage(
    name: str,
    source: Path,
    run_path: Path | None,
    overrides: Sequence[str],
    *,
    as_json: bool,
    force: bool,
    **options: bool,
) -> Any:
    opened = open_source(source, run_path, overrides, force=name if force else None, trains=name == "train")
    record = part("pipeline").run_stage(opened, name, force=force, **options)
    if as_json:
        click.echo(escape_control_chars_json(record.model_dump_json(indent=1)))
    return opened
