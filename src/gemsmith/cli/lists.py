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
    found, rows = [], []
    for variant in arch.VARIANTS.values():
        name, parameters, images = variant.name, count(arch.text_tensors(variant)), variant.vision is not None
        size = f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.2g} M"
        about = {"context": variant.context, "images": images, "checkpoints": variant.hub_ids}
        found.append({"model": name, "parameters": parameters, **about})
        rows.append((name, size, f"{variant.context:,}", "yes" if images else "no"))
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
    found, rows = [], []
    for machine in lazy_import("hardware").load_catalog(catalog).machines.values():
        chip = machine.chip
        found.append({**asdict(machine), "chip": chip.name, "hbm_bytes": chip.hbm_bytes})
        row = [machine.name, f"{machine.chips} x {chip.name}", f"{chip.hbm_bytes / 2**30:.0f}"]
        for key in ("usd_per_hour", "usd_per_hour_spot"):
            prices = [price for each in machine.prices if (price := getattr(each, key)) is not None]
            row.append(f"{min(prices):.2f}" if prices else "–")
        rows.append(row)
    _print(found, ("machine", "chips", "GiB a chip", "USD/h from", "spot from"), rows, as_json=as_json)


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
    found, rows = [], []
    for file in files:
        recipe = lazy_import("recipe.load").load_recipe(file)
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        summary = first.removeprefix("#").strip() if first.startswith("#") else ""
        found.append({"recipe": str(file), "checkpoint": recipe.checkpoint, "summary": summary})
        rows.append((str(file), summary))
    _print(found, ("recipe", "what it is"), rows, as_json=as_json)


def _print(found: Any, columns: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool) -> None:
    if as_json:
        print_json(json.dumps(found, indent=1, ensure_ascii=False))
        return
    table = lazy_import("report.tables").Table(columns=columns, rows=rows, right=columns[2:], whole=columns[:1])
    lazy_import("system.console").open_console(stderr=False, soft_wrap=False).print(table.to_rich())
