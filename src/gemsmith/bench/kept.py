"""Cells that are measured, kept until the sweep is whole: a second start goes on with the others."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from gemsmith.bench.cells import Ask
from gemsmith.bench_records import BenchCell, Slo
from gemsmith.files import write_text
from gemsmith.version import __version__


def digest_cell(ask: Ask, slo: Slo | None, facts: Mapping[str, str], client: str) -> str:
    """SHA-256 of all that a cell's numbers depend on: server, load, number of requests, seed, SLO, client."""
    made_from = {
        "gemsmith": __version__,
        "client": client,
        "server": dict(facts),
        "load": asdict(ask.load),
        "count": asdict(ask.count),
        "seed": ask.seed,
        "timeout_s": ask.timeout_s,
        "probe": ask.probe,
        "slo": None if slo is None else slo.model_dump(),
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def keep_cell(folder: Path, digest: str, cell: BenchCell) -> None:
    """Writes a cell whole, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{digest}.json", cell.model_dump_json(indent=1) + "\n")


def find_cell(folder: Path, digest: str) -> BenchCell | None:
    """The cell that is kept under a digest; None also where its file is damaged: it is then measured again."""
    try:
        return BenchCell.model_validate_json((folder / f"{digest}.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def forget_cells(folder: Path) -> None:
    """A sweep that is whole needs them no more, and --force would find them."""
    shutil.rmtree(folder, ignore_errors=True)
