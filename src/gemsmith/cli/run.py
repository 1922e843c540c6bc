"""The verbs of stages that need no server: run, data, train, export, verify."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, lazy_import, print_json
from gemsmith.cli.options import RunArgs, conflicts, given_options, option, run_args
from gemsmith.errors import InputError

_OF_HOSTS = ("coordinator", "processes", "process_id")
_OF_FOLDERS = ("base", "adapter", "from_tunix", "out", "step", "rank", "alpha")


@cli.command(short_help="Run every stage that is not complete.")
@run_args(force=True)
@option("--until", metavar="STAGE", help="Stop after this stage.")
@option("--skip", multiple=True, metavar="STAGE", help="Leave this stage out; may be repeated.")
def run(args: RunArgs, until: str | None, skip: Sequence[str]) -> None:
    """Run every stage that is not complete: plan, data, train, export, verify, serve, bench, eval, report.

    SOURCE is a recipe (YAML) or a run directory. A run that was stopped resumes where it was. --force runs all these
    stages again, or those that --until and --skip leave: training starts again from step 0.

    \b
    gemsmith run recipes/demo.yaml
    gemsmith run my.yaml --set data.train=rows.jsonl --set checkpoint=/models/gemma-4-E2B-it
    gemsmith run my.yaml --until eval --skip bench
    """
    pipeline = lazy_import("pipeline")
    stages = pipeline.select_stages(until, skip)
    check = partial(lazy_import("pipeline.preflight").refuse_before, stages=stages, force=args.force)
    opened = args.open_run(force=stages if args.force else (), trains="train" in stages, check=check)
    records = pipeline.run_stages(opened, stages, force=args.force)
    if args.as_json:
        stages = ",\n".join(f'"{record.stage}": {record.model_dump_json(indent=1)}' for record in records)
        print_json("{" + stages + "}")
    else:
        lazy_import("report.tables").print_summary(opened)


@cli.command(short_help="Read, render, mask and pack the rows.")
@run_args(force=True)
@option("--show", metavar="N", help="Print N packed rows with the trained tokens colored.")
def data(args: RunArgs, show: int | None) -> None:
    """Read, render, mask and pack the rows.

    SOURCE is a recipe (YAML) or a run directory.

    \b
    gemsmith data my.yaml --show 3
    """
    if show is None:
        args.print_record(args.run_stage("data")[1])
        return
    runs = lazy_import("runs.run")
    if not args.force and not args.overrides and (args.source / "recipe.yaml").exists():
        opened = runs.open_run_readonly(args.source, section="data")
        if runs.is_up_to_date(opened, "data"):  # then nothing is written, so another process may be at work there
            lazy_import("pipeline").run_stage(opened, "data")
            lazy_import("data.preview").show(opened, show)
            return
    lazy_import("data.preview").show(args.run_stage("data")[0], show)


@cli.command(short_help="Train the adapter, or resume it.")
@run_args(force=True)
@option("--steps", type=str, metavar="[+]N", help="Train a finished run on: so many steps in all, or with + more.")
@option("--epochs", metavar="N", help="Train a finished run on: so many epochs in all.")
@option("--coordinator", metavar="HOST:PORT", help="Of several hosts: where the first is reached; a free port.")
@option("--processes", metavar="N", help="Of several hosts: how many.")
@option("--process-id", type=click.IntRange(min=0), metavar="I", help="Of several hosts: which one this is, from 0.")
@conflicts("steps", "epochs", "force", "overrides", *_OF_HOSTS)
@conflicts("epochs", "force", "overrides", *_OF_HOSTS)
def train(args: RunArgs, steps: str | None, epochs: int | None, **hosts: str | int | None) -> None:
    """Train the adapter; a run that was stopped resumes from its last checkpoint.

    SOURCE is a recipe (YAML) or a run directory. --force starts again from step 0; what is there is deleted once the
    first step has run. --steps and --epochs train a finished run on from its last step: the steps that are done keep
    their learning rates, the others have those of the longer schedule, without another warm-up. Several hosts train
    together when each runs this command; those of a TPU slice find each other.

    \b
    gemsmith train my.yaml --run runs/a --set optimizer.learning_rate=2e-4
    gemsmith train runs/a --steps +200
    gemsmith train runs/a --coordinator 10.0.0.1:8476 --processes 2 --process-id 0
    """
    names = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    os.environ.update({names[option]: str(value) for option, value in hosts.items() if value is not None})
    if steps or epochs:
        args = replace(args, overrides=lazy_import("train.stage").longer(args.source, steps, epochs))
        opened, pipeline = args.open_run(force=("data",)), lazy_import("pipeline")
        pipeline.run_stage(opened, "data")
        lazy_import("runs.run").commit_recipe(opened)
        args.print_record(pipeline.run_stage(opened, "train"))
    else:
        args.print_record(args.run_stage("train")[1])


@cli.command(short_help="Write adapter and merged weights.")
@run_args(required=False, force=True)
@option("--base", type=str, metavar="FOLDER", help="The base: a folder, a Hugging Face hub id, or gs://bucket/folder.")
@option("--adapter", metavar="FOLDER", help="Any PEFT LoRA adapter of that base.")
@option("--from-tunix", metavar="FOLDER", help="Instead: an Orbax checkpoint of an ordinary Tunix and Qwix run.")
@option(
    "--out", metavar="FOLDER", help="Where adapter/, merged/ and export.json go; must not exist yet, or add --force."
)
@option("--step", metavar="N", help="With --from-tunix: the saved step; default: the last.")
@option("--rank", type=click.IntRange(min=1), metavar="R", help="With --from-tunix: what the rank must be; it is read.")
@option("--alpha", type=float, metavar="A", help="With --from-tunix: alpha, as given to qwix.LoraProvider.")
@conflicts("source", *_OF_FOLDERS)
def export(args: RunArgs, **options: Any) -> None:
    """Write the PEFT adapter and the merged safetensors.

    SOURCE is a recipe (YAML) or a run directory. Without it, --base and --out name folders, and --adapter or
    --from-tunix what is merged; --force then replaces an earlier export at --out, once the new one is complete.

    \b
    gemsmith export runs/my --set export.step=200 --force
    gemsmith export --base google/gemma-4-31B-it --adapter my-lora --out tuned
    gemsmith export --base gemma-4-31B-it --from-tunix checkpoints --alpha 64 --out tuned
    """
    if args.source is not None:
        args.print_record(args.run_stage("export")[1])
        return
    given = {name: options[name] for name in _OF_FOLDERS if name in given_options()}
    of_a_run = bool(args.run_path or args.overrides)
    record = lazy_import("export.stage").export_folder(of_a_run=of_a_run, force=args.force, **given)
    lazy_import("pipeline").print_warnings_of(record)
    args.print_record(record)


@cli.command(short_help="Check the exported weights.")
@run_args(force=True)
@option(
    "--base",
    type=str,
    metavar="FOLDER",
    help="Of a folder that export wrote without a run: the base, where it has moved.",
)
@option("--served", is_flag=True, help="Also ask vLLM: base, base with adapter, and merged weights, greedily.")
def verify(args: RunArgs, base: str | None, served: bool) -> None:
    """Check that the exported weights are exactly what training produced.

    SOURCE is a recipe (YAML) or a run directory; or a folder that gemsmith export --out wrote.

    \b
    gemsmith verify runs/my --json
    gemsmith verify tuned --served
    """
    source: Path = args.source
    if (source / "export.json").is_file() and not (source / "recipe.yaml").exists():
        opened = lazy_import("runs.run").ExportDir(path=source)
        record = lazy_import("verify.stage").verify(opened, base_source=base)
        lazy_import("pipeline").print_warnings_of(record)
    elif base is not None:
        other = "a run's base is in its recipe"
        raise InputError(f"--base: {source} is not a folder that gemsmith export --out wrote; {other}")
    else:
        opened, record = args.run_stage("verify")
    if served:
        record = lazy_import("verify.served").verify_served(opened, base_source=base)
    args.print_record(record)
