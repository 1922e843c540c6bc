"""`gemsmith port`: reads the files, prints the table, writes the recipe."""

from collections.abc import Sequence
from pathlib import Path

import click

from gemsmith.characters import spell_out, spell_out_json
from gemsmith.errors import InputError
from gemsmith.files import write_text
from gemsmith.port.show import as_json, print_table
from gemsmith.port.stage import Ported, port
from gemsmith.recipe_file import dump_recipe
from gemsmith.terminal import open_console

_NAMED = 8


def port_files(
    sources: Sequence[Path],
    out: Path | None,
    overrides: Sequence[str],
    *,
    json: bool,
    allow_differences: bool,
    **known: int | None,
) -> None:
    """Writes the recipe to `out`, or to stdout with the table on stderr.

    Raises InputError, and writes no recipe, where it would train differently and that is not allowed.
    """
    if out is not None and out.exists():
        raise InputError(f"--out {out}: is there already; name another file, or delete it")
    ported = port(sources, overrides=overrides, **known)
    text = dump_recipe(ported.recipe, ported.derived)
    if json:
        click.echo(spell_out_json(as_json(ported)))
    else:
        console = open_console(stderr=out is None, soft_wrap=False)
        if not console.is_terminal:  # wide enough to copy from
            console.width = 200
        print_table(ported, console)
    if ported.differences and not allow_differences:
        raise InputError(_refusal(ported))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text)
        click.echo(spell_out(f"{out} written; next: gemsmith plan {out}"), err=True)
    elif not json:
        click.echo(text, nl=False)


def _refusal(ported: Ported) -> str:
    names = list(dict.fromkeys(row.key for row in ported.differences))
    named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return (
        f"the recipe would train differently from its source in {named}; no recipe was written; --allow-differences "
        "writes it all the same"
    )
