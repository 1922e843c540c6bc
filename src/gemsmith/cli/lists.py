"""Verbs that list what there is: models, machines, recipes."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gemsmith.cli.main import cli
from gemsmith.cli.options import FOLDER, lazy_import, option, print_json
from gemsmith.errors import InputError

_json_option = option("--json", "as_json", is_flag=True, help="Print the list as JSON on stdout.")


@cli.command(short_help="List the Gemma 4 models that there are.")
@_json_option
def models(as_json: bool) -> None:
    """List the Gemma 4 models: parameters of the text model, the longest text, whether they take images.

    \b
    gemsmith models
    """
    arch, count = lazy_import("arch"), lazy_import("arch.tensors").parameter_count
    found = [
        {
            "model": variant.name,
            "parameters": count(arch.text_tensors(variant)),
            "context": variant.context,
            "images": variant.vision is not None,
            "checkpoints": variant.hub_ids,
        }
        for variant in arch.VARIANTS.values()
    ]
    sizes = [
        f"{count / 1e9:.3g} B" if (count := each["parameters"]) >= 1e9 else f"{count / 1e6:.2g} M" for each in found
    ]
    rows = [
        (each["model"], parameters, f"{each['context']:,}", "yes" if each["images"] else "no")
        for each, parameters in zip(found, sizes, strict=True)
    ]
    _print(found, ("model", "parameters", "context", "images"), rows, as_json=as_json)


@cli.command(short_help="List the machines of the catalog.")
@option("--catalog", metavar="FILE", help="A YAML that replaces or adds to the shipped catalog.")
@_json_option
def machines(catalog: Path | None, as_json: bool) -> None:
    """List the catalog's machines: chips, memory of each, dollars an hour. gemsmith plan --machine takes their names.

    \b
    gemsmith machines
    gemsmith machines --json
    """
    listed = lazy_import("hardware").load_catalog(catalog).machines.values()
    rows = [
        (
            machine.name,
            f"{machine.chips} x {machine.chip.name}",
            f"{machine.chip.hbm_bytes / 2**30:.0f}",
            *(_price([getattr(price, key) for price in machine.prices]) for key in _PRICES),
        )
        for machine in listed
    ]
    found = [{**asdict(machine), "chip": machine.chip.name, "hbm_bytes": machine.chip.hbm_bytes} for machine in listed]
    _print(found, ("machine", "chips", "GiB a chip", "USD/h from", "spot from"), rows, as_json=as_json)


_PRICES = ("usd_per_hour", "usd_per_hour_spot")


def _price(prices: Sequence[float | None]) -> str:
    known = [price for price in prices if price is not None]
    return f"{min(known):.2f}" if known else "–"


@cli.command(short_help="List the recipes of a folder.")
@click.argument("folder", type=FOLDER, default="recipes")
@_json_option
def recipes(folder: Path, as_json: bool) -> None:
    """List the recipes of a folder, by default of recipes, with the first comment of each.

    \b
    gemsmith recipes
    """
    files = sorted(folder.rglob("*.yaml")) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder}: holds no recipes (.yaml); give a folder that does, or run this in Gemsmith's own")
    found = []
    for file in files:
        recipe = lazy_import("recipe.load").load_recipe(file)
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.removeprefix("#").strip() if first.startswith("#") else ""
        found.append({"recipe": str(file), "checkpoint": recipe.checkpoint, "summary": summary})
    rows = [(each["recipe"], each["summary"]) for each in found]
    _print(found, ("recipe", "what it is"), rows, as_json=as_json)


def _print(found: Any, columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(json.dumps(found, indent=1, ensure_ascii=False))
        return
    table = lazy_import("report.tables").Table(columns=columns, rows=rows, right=columns[2:], whole=columns[:1])
    lazy_import("system.console").open_console(stderr=False, soft_wrap=False).print(table.to_rich())
