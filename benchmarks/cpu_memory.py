"""Writes what `gemsmith train` holds on a CPU beside what the plan's formula counts, to
benchmarks/records/cpu_memory.json.

    python benchmarks/cpu_memory.py

Each model is trained for STEPS steps by a process of its own, with no compiled programs from before; what counts is the
most that the process held. CPU_HELD of sizing/memory.py was chosen by these.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gemsmith import __version__
from gemsmith.hardware import load_catalog
from gemsmith.hardware.model import choose_remat, memory_of, on_chips, step_cost
from gemsmith.recipe.load import load_recipe
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.records import TrainRecord, read_record_file
from gemsmith.runs.resolve import recipe_variant
from gemsmith.runs.run import host_info
from plan_calibration import VARIANTS
from short import RECORDS, SHORT
from tiny_checkpoints import make_checkpoint

RECORD = RECORDS / "cpu_memory.json"
DEMO = Path(__file__).parents[1] / "recipes" / "demo_base"
STEPS, GIB = 4, 2**30
# Model, backend, rows a step, length, dtype.
CASES = (
    ("demo", "tunix", 8, 256, "float32"),
    ("9 M", "tunix", 2, 1024, "float32"),
    ("22 M", "tunix", 2, 1024, "float32"),
    ("84 M", "tunix", 2, 1024, "float32"),
    ("84 M", "tunix", 8, 256, "float32"),
    ("84 M", "tunix", 2, 1024, "bfloat16"),
    ("227 M", "tunix", 2, 1024, "float32"),
    ("demo", "trl", 8, 256, "float32"),
    ("22 M", "trl", 2, 1024, "float32"),
    ("84 M", "trl", 2, 1024, "float32"),
)


def measure(model: str, backend: str, rows: int, length: int, dtype: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = DEMO if model == "demo" else folder / "base"
        if base != DEMO:  # by another process, whose memory the training would else be told as its own
            subprocess.run([sys.executable, __file__, model, str(base), dtype], check=True)
        recipe = {
            "checkpoint": str(base),
            "data": {"train": {"task": "verilog", "rows": 600}, "max_length": length, "packing": True},
            "lora": {"rank": 16, "alpha": 32, "dropout": 0.0},
            "train": {"global_batch_size": rows, "max_steps": STEPS, "dtype": dtype, "backend": backend},
            "hardware": {"machines": ["cpu"]},
        }
        file, run = folder / "recipe.yaml", folder / "run"
        file.write_text(json.dumps(recipe))
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
        gemsmith = [sys.executable, "-m", "gemsmith"]
        subprocess.run([*gemsmith, "data", str(file), "--run", str(run)], env=environment, check=True)
        subprocess.run([*gemsmith, "train", str(run)], env=environment, check=True)
        record = read_record_file(run / "train.json", TrainRecord, missing="", damaged="")
        return {
            "model": model,
            "backend": backend,
            "rows": rows,
            "length": length,
            "dtype": dtype,
            **counted(run, backend),
            "measured_gib": round(record.peak_memory_bytes / GIB, 3),
        }


def counted(run: Path, backend: str) -> dict[str, Any]:
    """What the formula has of the run's step, as the plan chooses remat for this machine."""
    recipe = load_recipe(run / "recipe.yaml")
    work = on_chips(step_cost(recipe, recipe_variant(recipe)), "cpu", recipe)
    chip = load_catalog().machines["cpu"].chip
    remat = "layer" if backend == "trl" else choose_remat(work, Mesh(), device_bytes=chip.hbm_bytes)
    memory = memory_of(replace(work, remat=remat), Mesh())
    return {
        "parameters": work.parameters,
        "base_gib": round(memory.base / GIB, 3),
        "step_gib": round(memory.total / GIB, 3),
    }


def main() -> None:
    cases = []
    for case in CASES[:1] if SHORT else CASES:
        found = measure(*case)
        found["beside_gib"] = round(found["measured_gib"] - found["step_gib"], 3)
        cases.append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "packages": {name: version(name) for name in ("jax", "jaxlib", "flax", "torch", "transformers")},
        "python": platform.python_version(),
        "machine": host_info().model_dump(),
        "cases": cases,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main_of_child(model: str, folder: Path, dtype: str) -> None:
    make_checkpoint(replace(VARIANTS[model], vision=None), folder, dtype=dtype, shards=1)


if __name__ == "__main__":
    main_of_child(sys.argv[1], Path(sys.argv[2]), sys.argv[3]) if len(sys.argv) == 4 else main()
