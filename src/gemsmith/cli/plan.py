"""The verb plan: what fits where, how long it takes and what it costs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli
from gemsmith.cli.options import FOLDER, Number, open_source, part, source_options
from gemsmith.errors import InputError
from gemsmith.system.characters import escape_control_chars, escape_control_chars_json


@cli.command()
@partial(source_options, count=-1)
@click.option(
    "--on",
    metavar="MACHINES",
    help="Plan for these, with a comma between them, or for all; default: hardware.machines.",
)
@click.option(
    "--by", type=click.Choice(["usd", "hours"]), help="Rank machines by dollars or hours; with --on default: usd."
)
@click.option("--fix", type=FOLDER, metavar="FILE", help="Write the recipe changed so that it fits the one machine.")
@click.option("--html", type=FOLDER, metavar="FILE", help="Write the plan as a page that needs nothing else.")
@click.option("--serve", is_flag=True, help="Print what serving comes to instead: requests at once, tokens/s, USD.")
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="For TPUs: memory and time of the step as XLA compiles it, in place of the formula's; takes minutes each.",
)
@click.option(
    "--compile-minutes", type=Number(min=0.1), default=30.0, show_default=True, help="At most, for a machine."
)
@click.option(
    "--compile-gb",
    type=Number(min=0.1),
    default=12.0,
    show_default=True,
    help="What compiling may hold of memory.",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="SOURCE are run directories: keep what their steps and load tests took as rows of the catalog.",
)
@click.option(
    "--catalog",
    type=FOLDER,
    metavar="FILE",
    help="Where --calibrate writes; default: ~/.config/gemsmith/machines.yaml, which every plan reads.",
)
def plan(source: Sequence[Path], calibrate: bool, catalog: Path | None, **options: Any) -> None:
    """Say what fits on which machine, how long it takes and what it costs; by formula.

    SOURCE is a recipe (YAML) or a run directory. A recipe without --run is planned and nothing is written; nor is a
    run's plan.json with --on, which asks about other machines. --fix goes with the name of one machine. With
    --calibrate plans of the machine that runs were trained and load-tested on say what these measured, 15 % each way.

    \b
    gemsmith plan recipes/verilog_31b.yaml --on all --by hours
    gemsmith plan my.yaml --on h200 --fix my_h200.yaml
    gemsmith plan --calibrate runs/a runs/b
    """
    if calibrate:
        _calibrate(source, catalog, options)
        return
    if catalog is not None:
        raise InputError("--catalog: goes with --calibrate; a recipe names its own in hardware.catalog")
    if len(source) != 1:
        raise InputError(f"SOURCE: {len(source)} were given; plan takes one, several only with --calibrate")
    _plan(source[0], **options)


def _plan(
    source: Path,
    *,
    run_path: Path | None,
    overrides: Sequence[str],
    as_json: bool,
    on: str | None,
    by: str | None,
    fix: Path | None,
    html: Path | None,
    serve: bool,
    compiles: bool,
    compile_minutes: float,
    compile_gb: float,
) -> None:
    stage = part("plan.stage")
    limits = None
    if compiles:
        limits = part("plan.compiled").Limits(seconds=60 * compile_minutes, memory_bytes=1e9 * compile_gb)
    if fix is not None:
        stage.check_fix(fix)
    by = by or ("usd" if on is not None else None)
    if on is not None and run_path is not None:
        raise InputError("--run: does not go with --on, which writes nothing; give the run directory as SOURCE")
    if source.is_dir() and on is not None:
        opened = part("runs.run").open_run_readonly(source, overrides, section="hardware")
        recipe, record = opened.recipe, stage.plan_run(opened, on, by, limits)
    elif source.is_dir() or run_path is not None:
        opened = open_source(source, run_path, overrides)
        recipe, record = opened.recipe, stage.plan(opened, by, limits)
    else:
        recipe = part("runs.resolve").resolve_file(source, overrides)[0]
        record = stage.plan_only(recipe, on, by, limits)
    if fix is not None:
        stage.write_fix(recipe, record, fix)
        click.echo(escape_control_chars(f"{fix} written; next: gemsmith plan {fix}"), err=True)
    if html is not None:
        part("report.plan_page").write_plan(record, html, name=source.resolve().stem)
        click.echo(escape_control_chars(f"{html} written"), err=True)
    if as_json:
        click.echo(escape_control_chars_json(record.model_dump_json(indent=1)))
    elif serve:
        part("report.plan_table").print_serving(record)
    else:
        part("report.plan_table").print_plan(record)


def _calibrate(folders: Sequence[Path], catalog: Path | None, options: dict[str, Any]) -> None:
    with_defaults = ("compile_minutes", "compile_gb")
    if given := [name for name, value in options.items() if value and name not in with_defaults]:
        names = {"run_path": "run", "overrides": "set", "as_json": "json", "compiles": "compile"}
        raise InputError(f"--{names.get(given[0], given[0])}: does not go with --calibrate, which plans nothing")
    file = catalog or part("hardware").own_catalog()
    for found in part("plan.calibrate").calibrate(folders, file):
        click.echo(escape_control_chars(found.say()))
    click.echo(escape_control_chars(f"{file} written"), err=True)
