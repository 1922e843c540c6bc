"""Writes how well a plan that is calibrated on one tiny model predicts the steps of larger ones on this machine, to
benchmarks/records/plan_calibration.json.

    python benchmarks/plan_calibration.py [rounds, default 3]

The catalog's bytes a second of a CPU are set from other models than these, FITTED_ON: what their steps say of it is
in the record. Models take turns, each in a process of its own on one core, so that what else the machine does meets all
alike. What counts is CPU-seconds a step: on one core that nobody else uses these are the seconds.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith import __version__
from gemsmith.arch import Variant
from gemsmith.hardware import Machine, load_catalog
from gemsmith.hardware.model import StepCost, choose_remat, on_chips, step_cost
from gemsmith.hardware.model.step_time import MEASURED_WITHIN, share_reached, step_time
from gemsmith.recipe.schema import Mesh
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT
from tiny_checkpoints import make_checkpoint
from train_cpu import LENGTH, RANK, ROWS, VARIANT, recipe_of, train_ours

RECORD = RECORDS / "plan_calibration.json"
CALIBRATED_ON = "22 M"
"""What all pairs come to is in the record, too."""
VARIANTS = {
    "9 M": replace(VARIANT, layers=6, embed_dim=256, ffn=1024, heads=4, kv_heads=2, global_kv_heads=1, vocabulary=8192),
    CALIBRATED_ON: replace(
        VARIANT, layers=6, embed_dim=384, ffn=1536, heads=8, kv_heads=4, global_kv_heads=2, vocabulary=16_384
    ),
    "84 M": VARIANT,
    "197 M": replace(VARIANT, embed_dim=960, ffn=3840, heads=15, kv_heads=5, global_kv_heads=3),
    # Its width is a power of two: rows of its matrices are 4096 bytes apart.
    "227 M": replace(VARIANT, embed_dim=1024, ffn=4096, heads=16, kv_heads=8, global_kv_heads=2),
}
FITTED_ON = {
    "12 M": replace(
        VARIANT, layers=6, embed_dim=320, ffn=1280, heads=6, kv_heads=3, global_kv_heads=1, vocabulary=8192
    ),
    "48 M": replace(
        VARIANT, layers=10, embed_dim=480, ffn=1920, heads=8, kv_heads=4, global_kv_heads=2, vocabulary=24_576
    ),
    "133 M": replace(VARIANT, embed_dim=768, ffn=3072, heads=12, kv_heads=6, global_kv_heads=2),
}
"""None is tested, and none is calibrated on."""
if SHORT:
    for name in ("84 M", "197 M", "227 M"):
        del VARIANTS[name]
    for name in ("48 M", "133 M"):
        del FITTED_ON[name]
EVERY = VARIANTS | FITTED_ON


def one_core() -> Machine:
    """The catalog's `cpu` with one core."""
    machine = load_catalog().machines["cpu"]
    cores = os.cpu_count() or 1
    chip = replace(
        machine.chip,
        flops_per_s=machine.chip.flops_per_s / cores,
        hbm_bytes_per_s=machine.chip.hbm_bytes_per_s / cores,
    )
    return replace(machine, chip=chip, measured_low=None, measured_high=None)


def work_on(machine: Machine, variant: Variant) -> StepCost:
    recipe = recipe_of(Path("not read"))
    work = on_chips(step_cost(recipe, variant), "cpu", recipe)
    return replace(work, remat=choose_remat(work, Mesh(), device_bytes=machine.chip.hbm_bytes))


def predictions(cpu_s: Mapping[str, float], calibrated_on: str = CALIBRATED_ON) -> dict[str, Any]:
    """What a plan says of each model before and after calibration on one, beside the medians given."""
    machine = one_core()
    share = share_reached(work_on(machine, VARIANTS[calibrated_on]), machine, Mesh(), cpu_s[calibrated_on])
    calibrated = replace(machine, measured_low=share, measured_high=share)
    found: dict[str, Any] = {}
    for name, measured in cpu_s.items():
        work = work_on(machine, VARIANTS[name])
        before, after = (step_time(work, each, Mesh()) for each in (machine, calibrated))
        middle = after.high_s / MEASURED_WITHIN
        found[name] = {
            "parameters": work.parameters,
            "measured_s": round(measured, 3),
            "uncalibrated_s": [round(before.low_s, 3), round(before.high_s, 3)],
            "calibrated_s": [round(after.low_s, 3), round(after.high_s, 3)],
            "predicted_over_measured": round(middle / measured, 3),
            "within": after.low_s <= measured <= after.high_s,
        }
    return {"share_of_peak": round(share or 0, 4), "models": found}


def every_pair(cpu_s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Model that is calibrated on -> model -> what the plan says over what was measured."""
    return {
        one: {name: model["predicted_over_measured"] for name, model in predictions(cpu_s, one)["models"].items()}
        for one in VARIANTS
    }


def fitted(cpu_s: Mapping[str, float]) -> dict[str, Any]:
    """The share of the peak and the bytes a second that together give the steps of FITTED_ON best, by least squares of
    what is given over what was measured.
    """
    machine = one_core()
    times = {name: step_time(work_on(machine, variant), machine, Mesh()) for name, variant in FITTED_ON.items()}
    parts = np.array([[time.ideal_s / cpu_s[name], time.hbm_s / cpu_s[name]] for name, time in times.items()])
    best = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)[0]
    return {
        "models": {
            name: {"measured_s": round(cpu_s[name], 3), "fit_over_measured": round(float(ratio), 3)}
            for name, ratio in zip(times, parts @ best, strict=True)
        },
        "share_of_peak": round(1 / best[0], 4),
        "hbm_bytes_per_s": float(f"{machine.chip.hbm_bytes_per_s / best[1]:.3g}"),
        "catalog_hbm_bytes_per_s": machine.chip.hbm_bytes_per_s,
    }


def run_child(name: str, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, str(folder)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(name, [round(seconds, 2) for seconds in result["cpu_s"]], file=sys.stderr)
    return result


def measure(rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each model's steps."""
    cpu_s: dict[str, list[float]] = {name: [] for name in EVERY}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {
            name: make_checkpoint(variant, Path(temporary) / str(number), dtype="float32", shards=1)
            for number, (name, variant) in enumerate(EVERY.items())
        }
        for _ in range(rounds):
            for name, folder in folders.items():
                cpu_s[name] += run_child(name, folder)["cpu_s"]
    return cpu_s


def main() -> None:
    cpu_s = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1 if SHORT else 3)
    medians = {name: statistics.median(seconds) for name, seconds in cpu_s.items()}
    found = predictions({name: medians[name] for name in VARIANTS})
    for name, model in found["models"].items():
        model["cpu_s"] = [round(min(cpu_s[name]), 3), round(max(cpu_s[name]), 3)]
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "packages": {name: version(name) for name in ("jax", "jaxlib", "flax", "qwix", "optax")},
        "python": platform.python_version(),
        "machine": host_info().model_dump(),
        "how": "CPU-seconds a step on one core, median of all steps of all rounds; models took turns; the machine was "
        "shared with others. The catalog's bytes a second of cpu are of the models under fitted alone.",
        "steps_each": len(cpu_s[CALIBRATED_ON]),
        "load_average": os.getloadavg(),
        "step": {"rows": ROWS, "length": LENGTH, "rank": RANK, "remat": "auto"},
        "calibrated_on": CALIBRATED_ON,
        "aim": "predictions within 0.85 to 1.15 of what was measured",
        **found,
        "predicted_over_measured": every_pair({name: medians[name] for name in VARIANTS}),
        "fitted": fitted(medians),
        "variants": {name: asdict(variant) for name, variant in EVERY.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def main_of_child(name: str, folder: Path) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    print(json.dumps(train_ours(folder, EVERY[name])))


if __name__ == "__main__":
    main_of_child(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) == 3 and sys.argv[1] in EVERY else main()
