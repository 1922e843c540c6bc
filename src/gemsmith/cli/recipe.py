"""Verbs beside the stages: recipes and their schema, what there is, completion, files of rows to train on."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli, echo, lazy_import, print_json
from gemsmith.cli.options import FOLDER, conflicts, json_option, option, requires, set_option
from gemsmith.errors import InputError

_out = option("--out", metavar="FILE", required=True, help="The JSONL of prompts and responses.")
_list_option = option("--json", "as_json", is_flag=True, help="Print the list as JSON on stdout.")
_revision = option("--revision", metavar="COMMIT", help="Without SOURCE: of the hub's dataset; default: main's of now.")


@cli.command(short_help="Write a recipe for your own rows.")
@option("--checkpoint", required=True, metavar="CHECKPOINT", help="A folder, a hub id, or gs://bucket/folder.")
@option("--data", required=True, metavar="ROWS", help="Rows to train on: a file, or a folder of rows or images.")
@option("--eval", "evaluated", metavar="ROWS", help="Held-out rows; default: a share of --data, such as 5%.")
@option("--out", metavar="FILE", default="my.yaml", show_default=True, help="The recipe; must not be there yet.")
@set_option
def init(checkpoint: str, data: str, evaluated: str | None, out: Path, overrides: Sequence[str]) -> None:
    """Write a recipe for a checkpoint and your own rows, with the reason behind each value.

    Rows are read, and a sample of them is rendered. Of a checkpoint that is elsewhere no weights are fetched; where
    none of its files can be read, it is told by its hub id and lengths are estimated.

    \b
    gemsmith init --checkpoint google/gemma-4-E2B-it --data rows.jsonl
    gemsmith init --checkpoint /models/gemma --data pets --set data.prompt="Which breed is it? {labels}"
    """
    notices = lazy_import("importers.draft").write_draft(checkpoint, data, evaluated, out, overrides)
    lazy_import("system.console").print_warnings("init", notices)
    echo(f"{out} written; next: gemsmith plan {out}", err=True)


@cli.command(name="import", short_help="Write a recipe to train on from an adapter.")
@click.argument("adapter", type=FOLDER)
@option(
    "--base", type=str, metavar="FOLDER", required=True, help="Its base: a folder, a hub id, or gs://bucket/folder."
)
@option("--recipe", metavar="FILE", help="A recipe to take all other keys from.")
@option("--out", metavar="FILE", help="Where the new recipe goes; default: stdout.")
def import_(adapter: Path, base: str, recipe: Path | None, out: Path | None) -> None:
    """Write a recipe that trains on from a PEFT adapter, once it has been checked against the base.

    Rank, alpha, rslora and targets are the adapter's. Without --recipe, data.train is left for you to fill in.

    \b
    gemsmith import my-lora --base google/gemma-4-31B-it --recipe my.yaml --out on.yaml && gemsmith run on.yaml
    """
    text = lazy_import("export.stage").start_recipe(base, adapter, recipe=recipe, out=out)
    if out is None:
        click.echo(text, nl=False)


@cli.command(short_help="Turn a GPU recipe into one of Gemsmith's.")
@click.argument("sources", nargs=-1, required=True, type=FOLDER, metavar="SOURCE...")
@option("--out", metavar="FILE", help="Where the recipe goes, the table then to stdout; must not be there yet.")
@set_option
@option("--devices", metavar="N", help="GPUs that SOURCE was made for; for global_batch_size.")
@option("--steps", metavar="N", help="Updates of SOURCE's run, where its warm-up is a share of them.")
@option("--allow-differences", is_flag=True, help="Write the recipe although it would train differently from SOURCE.")
@option("--json", "print_json", is_flag=True, help="Print the table, and the recipe, as JSON on stdout.")
def port(sources: Sequence[Path], **options: Any) -> None:
    """Turn a GPU recipe into one of Gemsmith's, with a table of what became of every key.

    SOURCE is PEFT's adapter_config.json, TrainingArguments or an SFTConfig (JSON, YAML), a YAML of TRL's command line,
    of Axolotl or of LLaMA-Factory, or a folder that holds some; several are read as those of one run.

    \b
    gemsmith port qlora.yaml --out my.yaml --devices 8
    gemsmith port adapter_config.json sft_config.json --set data.train=rows.jsonl > my.yaml
    """
    lazy_import("importers.convert").port_files(sources, **options)


@cli.command(short_help="List the Gemma 4 models that there are.")
@_list_option
def models(as_json: bool) -> None:
    """List the Gemma 4 models: parameters of the text model, the longest text, whether they take images.

    \b
    gemsmith models
    """
    arch, count = lazy_import("arch"), lazy_import("arch.tensors").parameter_count
    found, rows = [], []
    for variant in arch.VARIANTS.values():
        name, parameters, images = variant.name, count(arch.text_tensors(variant)), variant.vision is not None
        size = f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.2g} M"
        about = {"context": variant.context, "images": images, "checkpoints": variant.hub_ids}
        found.append({"model": name, "parameters": parameters, **about})
        rows.append((name, size, f"{variant.context:,}", "yes" if images else "no"))
    _print_list(found, ("model", "parameters", "context", "images"), rows, as_json=as_json)


@cli.command(short_help="List the machines of the catalog.")
@option("--catalog", metavar="FILE", help="A YAML that replaces or adds to the shipped catalog.")
@_list_option
def machines(catalog: Path | None, as_json: bool) -> None:
    """List the catalog's machines: chips, memory of each, dollars an hour. gemsmith plan --machine takes their names.

    \b
    gemsmith machines
    gemsmith machines --json
    """
    found, rows = [], []
    for machine in lazy_import("hardware").load_catalog(catalog).machines.values():
        chip = machine.chip
        found.append({**asdict(machine), "chip": chip.name, "hbm_bytes": chip.hbm_bytes})
        row = [machine.name, f"{machine.chips} x {chip.name}", f"{chip.hbm_bytes / 2**30:.0f}"]
        for key in ("usd_per_hour", "usd_per_hour_spot"):
            prices = [price for each in machine.prices if (price := getattr(each, key)) is not None]
            row.append(f"{min(prices):.2f}" if prices else "–")
        rows.append(row)
    _print_list(found, ("machine", "chips", "GiB a chip", "USD/h from", "spot from"), rows, as_json=as_json)


@cli.command(short_help="List the recipes of a folder.")
@click.argument("folder", type=FOLDER, default="recipes")
@_list_option
def recipes(folder: Path, as_json: bool) -> None:
    """List the recipes of a folder, by default of recipes, with the first comment of each.

    \b
    gemsmith recipes
    """
    files = sorted(folder.rglob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder}: holds no recipes (.yaml); give a folder that does, or run this in Gemsmith's own")
    found, rows = [], []
    for file in files:
        recipe = lazy_import("recipe.load").load_recipe(file)
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.removeprefix("#").strip() if first.startswith("#") else ""
        found.append({"recipe": str(file), "checkpoint": recipe.checkpoint, "summary": summary})
        rows.append((str(file), summary))
    _print_list(found, ("recipe", "what it is"), rows, as_json=as_json)


def _print_list(found: Any, columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(json.dumps(found, indent=1, ensure_ascii=False))
        return
    table = lazy_import("report.tables").Table(columns=columns, rows=rows, right=columns[2:], whole=columns[:1])
    lazy_import("system.console").open_console(stderr=False, soft_wrap=False).print(table.to_rich())


@cli.command(short_help="Print the recipe's JSON schema.")
def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    click.echo(json.dumps(lazy_import("recipe.keys").recipe_schema(), indent=2))


@cli.command(short_help="Print the completion script of a shell.")
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


@cli.group(short_help="Make files of rows out of public datasets.")
def prepare() -> None:
    """Make files of rows to train on or to score, out of public datasets.

    codev and oxford-pets fetch theirs from the Hugging Face hub where no SOURCE is named, once for each commit.

    \b
    gemsmith prepare codev --out codev_r1.jsonl --rows 10000
    gemsmith prepare verilog-eval verilog-eval/dataset_spec-to-rtl --out verilog_eval.jsonl
    gemsmith prepare oxford-pets pets --split trainval --out pets/trainval.jsonl
    gemsmith prepare fashion-mnist /usr/share/datasets/fashion-mnist --out fashion
    """


@prepare.command(short_help="Verilog of CodeV-R1.")
@click.argument("source", type=FOLDER, required=False)
@_out
@_revision
@option("--rows", metavar="N", help="Read the first N rows only.")
@option("--verilog-eval", metavar="FOLDER", help="verilog-eval's dataset_spec-to-rtl: find rows that share with it.")
@option("--drop-contaminated", is_flag=True, help="With --verilog-eval: leave such rows out.")
@json_option
@requires("verilog_eval", "drop_contaminated")
@conflicts("source", "revision")
def codev(source: Path | None, out: Path, as_json: bool, **options: Any) -> None:
    """Strip CodeV-R1's reasoning and keep its Verilog: rows of {"prompt", "response"}.

    SOURCE is codev_r1_sft.jsonl of the Hugging Face dataset zhuyaoyu/CodeV-R1-dataset, or a parquet file of its rows;
    without it the former is fetched ($HF_TOKEN), and its commit told. What is dropped is counted by reason.

    \b
    gemsmith prepare codev --revision COMMIT --out codev_r1.jsonl --rows 10000
    gemsmith prepare codev codev_r1_sft.jsonl --out codev_r1.jsonl --verilog-eval FOLDER --drop-contaminated
    """
    _show(lazy_import("data.prepare.codev").prepare_codev(source, out, **options), as_json=as_json)


@prepare.command(name="verilog-eval", short_help="Specifications of verilog-eval.")
@click.argument("folder", type=FOLDER)
@_out
@json_option
def verilog_eval(folder: Path, out: Path, as_json: bool) -> None:
    """Write verilog-eval's specifications and reference modules as held-out rows.

    They are compared as text by eval.scorer; pass@k, with a simulator, is `gemsmith eval --task verilog`.

    \b
    gemsmith prepare verilog-eval verilog-eval/dataset_spec-to-rtl --out verilog_eval.jsonl
    """
    _show(lazy_import("data.prepare.codev").prepare_verilog_eval(folder, out), as_json=as_json)


@prepare.command(name="oxford-pets", short_help="Images of the Oxford-IIIT Pet data set.")
@click.argument("source", type=FOLDER, required=False)
@_out
@_revision
@option("--split", type=click.Choice(["trainval", "test"]), required=True, help="Of the data set's two lists.")
@json_option
@conflicts("source", "revision")
def oxford_pets(source: Path | None, out: Path, revision: str | None, split: str, as_json: bool) -> None:
    """Write a row for each image of the Oxford-IIIT Pet data set: the image, all breeds to choose from, its own.

    SOURCE holds images/ and annotations/ as they were unpacked. Rows name the images, which stay where they are.
    Without it, timm/oxford-iiit-pet of the Hugging Face hub is fetched, its commit told; images go beside --out.

    \b
    gemsmith prepare oxford-pets --revision COMMIT --split test --out pets/test.jsonl
    gemsmith prepare oxford-pets pets --split test --out pets/test.jsonl
    """
    found = lazy_import("data.prepare.oxford_pets").prepare_oxford_pets(source, out, split=split, revision=revision)
    _show(found, as_json=as_json)


@prepare.command(name="fashion-mnist", short_help="Images of Fashion-MNIST.")
@click.argument("folder", type=FOLDER)
@option("--out", metavar="FOLDER", required=True, help="A new folder, for train/ and held_out/.")
@option("--train", metavar="N", default=2000, show_default=True, help="The first N images.")
@option("--held-out", metavar="N", default=200, show_default=True, help="Of the test images.")
@json_option
def fashion_mnist(folder: Path, out: Path, as_json: bool, **counts: int) -> None:
    """Write images of Fashion-MNIST as folders of images by class, which data.format image-folder reads.

    FOLDER holds the four files as published; Debian's package dataset-fashion-mnist has them.

    \b
    gemsmith prepare fashion-mnist /usr/share/datasets/fashion-mnist --out fashion --train 2000 --held-out 200
    """
    _show(lazy_import("data.prepare.fashion_mnist").prepare_fashion_mnist(folder, out, **counts), as_json=as_json)


def _show(record: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        lazy_import("data.prepare.codev").print_prepared(record)
