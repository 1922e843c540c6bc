"""One function per stage: it reads its arguments, calls one function and prints."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli
from gemsmith.cli.options import (
    FOLDER,
    force_option,
    open_source,
    part,
    run_stage,
    source_options,
)
from gemsmith.errors import InputError
from gemsmith.system.characters import escape_control_chars_json


@cli.command()
@source_options
def run(source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Run every stage that is not complete: plan, data, train, export, verify, serve, bench, eval, report.

    SOURCE is a recipe (YAML) or a run directory. A run that was stopped goes on where it was.

    \b
    gemsmith run recipes/demo.yaml
    gemsmith run my.yaml --set data.train=rows.jsonl --set checkpoint=/models/gemma-4-E2B-it
    """
    opened = open_source(source, run_path, overrides, trains=True)
    pipeline = part("pipeline")
    records = pipeline.run_stages(opened)
    if as_json:
        click.echo(
            escape_control_chars_json(
                "{" + ",\n".join(f'"{record.stage}": {record.model_dump_json(indent=1)}' for record in records) + "}"
            )
        )
        return
    part("report.tables").print_summary(opened)


@cli.command()
@source_options
@force_option
@click.option(
    "--show", type=click.IntRange(min=1), metavar="N", help="Print N packed rows with the trained tokens colored."
)
def data(
    source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, show: int | None
) -> None:
    """Read, render, mask and pack the rows.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith data my.yaml --show 3
    """
    if show is not None and not force and not overrides and (source / "recipe.yaml").exists():
        opened = part("runs.run").open_run_readonly(source, section="data")
        if part("runs.run").is_up_to_date(
            opened, "data"
        ):  # then nothing is written, so another process may be at work there
            part("pipeline").run_stage(opened, "data")
            part("data.preview").show(opened, show)
            return
    opened = run_stage("data", source, run_path, overrides, as_json=as_json and show is None, force=force)
    if show is not None:
        part("data.preview").show(opened, show)


@cli.command()
@source_options
@force_option
@click.option("--coordinator", metavar="HOST:PORT", help="Of several hosts: where the first is reached; a free port.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Of several hosts: how many.")
@click.option(
    "--process-id", type=click.IntRange(min=0), metavar="I", help="Of several hosts: which one this is, from 0."
)
def train(
    source: Path, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, **hosts: str | int | None
) -> None:
    """Train the adapter; a run that was stopped goes on from its last checkpoint.

    SOURCE is a recipe (YAML) or a run directory. --force starts again from step 0; what is there is deleted once the
    first step has run. Several hosts train together when each runs this command; those of a TPU slice find each other.

    \b
    gemsmith train my.yaml --run runs/a --set optimizer.learning_rate=2e-4
    gemsmith train runs/a --coordinator 10.0.0.1:8476 --processes 2 --process-id 0
    """
    names = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    os.environ.update({names[option]: str(value) for option, value in hosts.items() if value is not None})
    run_stage("train", source, run_path, overrides, as_json=as_json, force=force)


@cli.command()
@partial(source_options, required=False)
@force_option
@click.option("--base", metavar="FOLDER", help="The base: a folder, a Hugging Face hub id, or gs://bucket/folder.")
@click.option("--adapter", type=FOLDER, metavar="FOLDER", help="Any PEFT LoRA adapter of that base.")
@click.option(
    "--from-tunix",
    type=FOLDER,
    metavar="FOLDER",
    help="Instead: an Orbax checkpoint of an ordinary Tunix and Qwix run.",
)
@click.option(
    "--out", type=FOLDER, metavar="FOLDER", help="Where adapter/, merged/ and export.json go; must not be there yet."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export at --out, once the new one is complete.")
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="With --from-tunix: the saved step; default: the last."
)
@click.option(
    "--rank", type=click.IntRange(min=1), metavar="R", help="With --from-tunix: what the rank must be; it is read."
)
@click.option("--alpha", type=float, metavar="A", help="With --from-tunix: alpha, as given to qwix.LoraProvider.")
def export(
    source: Path | None, run_path: Path | None, overrides: Sequence[str], as_json: bool, force: bool, **options: Any
) -> None:
    """Write the PEFT adapter and the merged safetensors.

    SOURCE is a recipe (YAML) or a run directory. Without it, --base and --out name folders, and --adapter or
    --from-tunix what is merged.

    \b
    gemsmith export runs/my --set export.step=200 --force
    gemsmith export --base google/gemma-4-31B-it --adapter my-lora --out tuned
    gemsmith export --base gemma-4-31B-it --from-tunix checkpoints --alpha 64 --out tuned
    """
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if source is not None:
        if given:
            raise InputError(
                f"--{next(iter(given)).replace('_', '-')}: goes without SOURCE, for exports that need no run; leave "
                "one out"
            )
        run_stage("export", source, run_path, overrides, as_json=as_json, force=force)
        return
    record = part("export.stage").export_folder(of_a_run=bool(force or run_path or overrides), **given)
    part("pipeline").print_notices(record)
    if as_json:
        click.echo(escape_control_chars_json(record.model_dump_json(indent=1)))


@cli.command()
@source_options
@force_option
@click.option(
    "--base", metavar="FOLDER", help="Of a folder that export wrote without a run: the base, where it has moved."
)
@click.option("--served", is_flag=True, help="Also ask vLLM: base, base with adapter, and merged weights, greedily.")
def verify(
    source: Path,
    run_path: Path | None,
    overrides: Sequence[str],
    as_json: bool,
    force: bool,
    base: str | None,
    served: bool,
) -> None:
    """Check that the exported weights are exactly what training produced.

    SOURCE is a recipe (YAML) or a run directory; or a folder that gemsmith export --out wrote.

    \b
    gemsmith verify runs/my --json
    gemsmith verify tuned --served
    """
    if (source / "export.json").is_file() and not (source / "recipe.yaml").exists():
        record = part("verify.stage").verify_folder(source, base_source=base)
        part("pipeline").print_notices(record)
        if served:
            record = part("verify.served").check_served_folder(source, base_source=base)
    else:
        if base is not None:
            raise InputError(
                f"--base: {source} is not a folder that gemsmith export --out wrote; a run's base is in its recipe"
            )
        opened = run_stage("verify", source, run_path, overrides, as_json=as_json and not served, force=force)
        if not served:
            return
        record = part("verify.served").check_served_run(opened)
    if as_json:
        click.echo(escape_control_chars_json(record.model_dump_json(indent=1)))
