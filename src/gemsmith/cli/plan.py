"""What is known before a run: plan says what fits where and what it costs, doctor what would stop it here."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, echo, lazy_import, require_extra
from gemsmith.cli.options import FOLDER, Number, RunArgs, conflicts, option, requires, run_args, run_option, set_option
from gemsmith.errors import InputError


@cli.command(short_help="Say what fits, how long it takes, its cost.")
@run_args(count=-1)
@option(
    "--machine",
    metavar="MACHINES",
    help="Plan for these, with a comma between them, or for all; default: hardware.machines.",
)
@option(
    "--sort",
    type=click.Choice(["usd", "hours"]),
    help="Rank machines by dollars or hours; with --machine default: usd.",
)
@option("--fix", metavar="FILE", help="Write the recipe changed so that it fits the one machine.")
@option("--html", metavar="FILE", help="Write the plan, or the sweep, as a page that needs nothing else.")
@option("--serve", is_flag=True, help="Print what serving comes to instead: requests at once, tokens/s, USD.")
@option(
    "--compile",
    "compiles",
    is_flag=True,
    help="For TPUs: memory and time of the step as XLA compiles it, in place of the formula's; takes minutes each.",
)
@option("--compile-minutes", type=Number(0.1), default=30.0, show_default=True, help="At most, for a machine.")
@option("--compile-gb", type=Number(0.1), default=12.0, show_default=True, help="What compiling may hold of memory.")
@option(
    "--calibrate",
    is_flag=True,
    help="SOURCE are run directories: keep what their steps and load tests took as rows of the catalog.",
)
@option(
    "--catalog",
    metavar="FILE",
    help="Where --calibrate writes; default: ~/.config/gemsmith/machines.yaml, which every plan reads.",
)
@option(
    "--sweep",
    multiple=True,
    metavar="KEY=VALUES",
    help="Plan each of these: A,B or LOW..HIGH, which doubles, or model=all; several, with commas or repeated.",
)
@option("--csv", is_flag=True, help="With --sweep: print CSV.")
@requires("calibrate", "catalog")
@requires("sweep", "csv")
@conflicts("sweep", "run_path", "as_json", "sort", "fix", "serve", "compiles", "calibrate")
@conflicts(
    "calibrate",
    *("run_path", "overrides", "as_json", "machine", "sort", "fix", "html", "serve", "compiles"),
    *("compile_minutes", "compile_gb"),
)
@conflicts("machine", "run_path")
def plan(
    args: RunArgs,
    calibrate: bool,
    catalog: Path | None,
    compiles: bool,
    compile_minutes: float,
    compile_gb: float,
    sweep: Sequence[str],
    csv: bool,
    **options: Any,
) -> None:
    """Say what fits on which machine, how long it takes and what it costs; by formula.

    SOURCE is a recipe (YAML) or a run directory. A recipe without --run is planned and nothing is written; nor is a
    run's plan.json with --machine, which asks about other machines. --fix goes with the name of one machine. With
    --calibrate plans of the machine that runs were trained and load-tested on say what these measured, 15 % each way.

    \b
    gemsmith plan recipes/verilog_31b.yaml --machine all --sort hours
    gemsmith plan my.yaml --machine h200 --fix my_h200.yaml
    gemsmith plan my.yaml --sweep model=all --sweep data.max_length=4096..131072 --machine all
    gemsmith plan --calibrate runs/a runs/b
    """
    if calibrate:
        file = catalog or lazy_import("hardware.catalog").own_catalog()
        for found in lazy_import("plan.calibrate").calibrate(args.source, file):
            echo(found.say())
        echo(f"{file} written", err=True)
        return
    if len(args.source) != 1:
        raise InputError(f"SOURCE: {len(args.source)} were given; plan takes one, several only with --calibrate")
    if sweep:
        _sweep(args, sweep, options["machine"], options["html"], csv=csv)
        return
    limits = None
    if compiles:
        limits = lazy_import("plan.aot.compile").Limits(seconds=60 * compile_minutes, memory_bytes=1e9 * compile_gb)
    _plan(replace(args, source=args.source[0]), limits, **options)


def _sweep(args: RunArgs, sweep: Sequence[str], machine: str | None, html: Path | None, *, csv: bool) -> None:
    module = lazy_import("plan.stage")
    axes = [module.read_axis(text) for each in sweep for text in re.split(r",(?=[\w.]+=)", each)]
    found = list(module.sweep(args.source[0], axes, args.overrides, machine))
    tables, keys = lazy_import("report.tables"), [key for key, _ in axes]
    if html is not None:
        lazy_import("report.plan_page").write_sweep(keys, found, html, name=args.source[0].resolve().stem)
        echo(f"{html} written", err=True)
    if csv:
        echo(tables.sweep_csv(keys, found), nl=False)
    else:
        console = lazy_import("system.console").open_console(stderr=False, soft_wrap=False)
        console.width = max(console.width, 500)  # of which the table takes what it needs: no number is broken or cut
        console.print(tables.sweep_table(keys, found).to_rich())


def _plan(
    args: RunArgs,
    limits: Any,
    *,
    machine: str | None,
    sort: str | None,
    fix: Path | None,
    html: Path | None,
    serve: bool,
) -> None:
    stage, source = lazy_import("plan.stage"), args.source

    def warn(run: Any) -> None:
        if found := lazy_import("pipeline.preflight").plan_warnings(run):
            lazy_import("system.console").print_warnings("plan", found)

    if fix is not None:
        stage.check_fix(fix)
    sort = sort or ("usd" if machine is not None else None)
    if source.is_dir() and machine is not None:
        opened = lazy_import("runs.run").open_run_readonly(source, args.overrides, section="hardware")
        recipe, record = opened.recipe, stage.plan_run(opened, machine, sort, limits)
    elif source.is_dir() or args.run_path is not None:
        opened = args.open_run(check=warn)
        recipe, record = opened.recipe, stage.plan(opened, sort, limits)
    else:
        recipe = lazy_import("runs.resolve").resolve_file(source, args.overrides, stages=())[0]
        warn(lazy_import("runs.run").Run(path=Path(), recipe=recipe))
        record = stage.plan_only(recipe, machine, sort, limits)
    if fix is not None:
        stage.write_fix(recipe, record, fix)
        echo(f"{fix} written; next: gemsmith plan {fix}", err=True)
    if html is not None:
        lazy_import("report.plan_page").write_plan(record, html, name=source.resolve().stem)
        echo(f"{html} written", err=True)
    if args.as_json:
        args.print_record(record)
    else:
        table = lazy_import("report.plan_table")
        echo("\n".join(table.serving_lines(record) if serve else table.plan_lines(record)))


@cli.command(short_help="Say what would stop a run here.")
@click.argument("recipe", type=FOLDER)
@run_option
@set_option
def doctor(recipe: Path, run_path: Path | None, overrides: Sequence[str]) -> None:
    """Make every check that the stages make, and print a line for each: ok, fails or skipped, and what to do.

    RECIPE is a recipe (YAML) or a run directory. It is about this machine, and reads and renders all rows. No run is
    written; of a checkpoint that is elsewhere only configuration and tokenizer are fetched. Exit code 2: something
    fails.

    \b
    gemsmith doctor my.yaml --set lora.rank=128
    """
    module = lazy_import("pipeline.preflight")
    if run_path is not None and recipe.is_dir():
        raise InputError(f"--run {run_path}: {recipe} is a run directory itself; give a recipe, or leave --run out")
    module.print_findings(module.examine(recipe, run_path, overrides, require_extra))
