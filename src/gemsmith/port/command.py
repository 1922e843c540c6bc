"""`gemsmith port`: reads the files, prints the table, writes the recipe."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from gemsmith.errors import InputError
from gemsmith.port.show import as_json, print_table
from gemsmith.port.stage import Ported, port
from gemsmith.recipe import dump_recipe

_NAMED = 8


def port_files(
    sources: Sequence[Path], out: Path | None, overrides: Sequence[str], *, json: bool, allow_differences: bool, **known: int | None
) -> None:
    """Writes the recipe to `out`, or to stdout with the table on stderr.

    Raises InputError, and writes no recipe, where it would train differently and that is not allowed.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: is there already; name another file, or delete it")
    ported = port(sources, overrides=overrides, **known)
    text = dump_recipe(ported.recipe, ported.derived)
    if json:
        click.echo(as_json(ported))
    else:
        # Wide enough to copy from where the output is no terminal.
        piped = Console(stderr=out is None, width=None if Console(stderr=out is None).is_terminal else 200)
        print_table(ported, piped)
    if ported.differences and not allow_differences:
        raise InputError(_refusal(ported))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        click.echo(f"{out} written; next: gemsmith plan {out}", err=True)
    elif not json:
        click.echo(text, nl=False)


def _refusal(ported: Ported) -> str:
    names = list(dict.fromkeys(row.key for row in ported.differences))
    named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return (
        f"the recipe would train differently from its source in {named}; no recipe was written; --allow-differences writes it all the same"
    )
