"""Verbs beside the stages: recipes from other projects' files, the recipe's schema, the shell's completion."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.group import cli
from gemsmith.cli.options import FOLDER, part


@cli.command(name="import")
@click.argument("adapter", type=FOLDER)
@click.option(
    "--base",
    metavar="FOLDER",
    required=True,
    help="The base it was trained on: a folder, a hub id, or gs://bucket/folder.",
)
@click.option("--recipe", type=FOLDER, metavar="FILE", help="A recipe to take all other keys from.")
@click.option("--out", type=FOLDER, metavar="FILE", help="Where the new recipe goes; default: stdout.")
def import_(adapter: Path, base: str, recipe: Path | None, out: Path | None) -> None:
    """Write a recipe that trains on from a PEFT adapter, once it has been checked against the base.

    Rank, alpha, rslora and targets are the adapter's. Without --recipe, data.train is left for you to fill in.

    \b
    gemsmith import my-lora --base google/gemma-4-31B-it --recipe my.yaml --out on.yaml && gemsmith run on.yaml
    """
    text = part("export.reverse").start_recipe(base, adapter, recipe=recipe, out=out)
    if out is None:
        click.echo(text, nl=False)


@cli.command()
@click.argument("sources", nargs=-1, required=True, type=FOLDER, metavar="SOURCE...")
@click.option(
    "--out",
    type=FOLDER,
    metavar="FILE",
    help="Where the recipe goes, the table then to stdout; must not be there yet.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of the recipe, whatever SOURCE says; may be repeated.",
)
@click.option(
    "--devices", type=click.IntRange(min=1), metavar="N", help="GPUs that SOURCE was made for; for rows_per_step."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Updates of SOURCE's run, where its warm-up is a share of them.",
)
@click.option(
    "--allow-differences", is_flag=True, help="Write the recipe although it would train differently from SOURCE."
)
@click.option("--json", is_flag=True, help="Print the table, and the recipe, as JSON on stdout.")
def port(sources: Sequence[Path], **options: Any) -> None:
    """Turn a GPU recipe into one of Gemsmith's, with a table of what became of every key.

    SOURCE is PEFT's adapter_config.json, TrainingArguments or an SFTConfig (JSON, YAML), a YAML of TRL's command line,
    of Axolotl or of LLaMA-Factory, or a folder that holds some; several are read as those of one run.

    \b
    gemsmith port qlora.yaml --out my.yaml --devices 8
    gemsmith port adapter_config.json sft_config.json --set data.train=rows.jsonl > my.yaml
    """
    part("port.command").port_files(sources, **options)


@cli.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    click.echo(json.dumps(part("recipe").recipe_schema(), indent=2))


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(gemsmith completion bash)"
    """
    from click.shell_completion import get_completion_class

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "gemsmith", "_GEMSMITH_COMPLETE").source())
