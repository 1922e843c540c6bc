"""Writes how fast a LoRA step of an 84 M Gemma 4 is on CPU, here and in transformers + PEFT, to
benchmarks/records/train_cpu.json.

    python benchmarks/train_cpu.py [pairs, default 2]

Both sides train the same float32 checkpoint of the 31B's kind on the same packed rows, in processes that take turns and
are bound to one core, then to two. Ends with an error if they do not give the same first loss.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from gemsmith import __version__
from gemsmith.arch import Variant, find_variant, lora_targets, text_tensors
from gemsmith.checkpoints.peft import target_pattern
from gemsmith.recipe.load import build_recipe
from gemsmith.recipe.schema import Recipe
from gemsmith.runs.run import host_info
from short import RECORDS, SHORT, peak_memory_bytes

RECORD = RECORDS / "train_cpu.json"
VARIANT = replace(
    find_variant("gemma4-31b"),
    name="custom",
    layers=6 if SHORT else 12,
    embed_dim=576,
    ffn=2304,
    heads=12,
    kv_heads=6,
    global_kv_heads=2,
    head_dim=64,
    global_head_dim=128,
    sliding_window=512,
    vocabulary=32_768,
    context=4096,
    vision=None,
)
ROWS, LENGTH, MEAN_DOCUMENT = (1, 512, 150) if SHORT else (1, 1024, 300)
RANK, ALPHA, RATE = 16, 32, 1e-4
WARM_UP, STEPS = (1, 3) if SHORT else (2, 4)
OURS, THEIRS = "gemsmith", ("peft-sdpa",) if SHORT else ("peft-sdpa", "peft-eager")
PACKAGES = {OURS: ("jax", "jaxlib", "flax", "qwix", "optax"), "peft": ("torch", "transformers", "peft")}


def generate_rows(step: int, variant: Variant = VARIANT) -> dict[str, np.ndarray]:
    """The packed rows of a step: documents of about MEAN_DOCUMENT tokens, the last one of a row cut; only first tokens
    are no targets.
    """
    random = np.random.default_rng(step)
    tokens = random.integers(108, variant.vocabulary, (ROWS, LENGTH))
    starts = np.zeros((ROWS, LENGTH), bool)
    for row in starts:
        ends = np.cumsum(np.maximum(random.lognormal(np.log(MEAN_DOCUMENT) - 0.125, 0.5, LENGTH // 8), 16).astype(int))
        row[[0, *ends[ends < LENGTH]]] = True
    places = np.arange(LENGTH)
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return {"tokens": tokens, "segments": np.cumsum(starts, axis=1), "positions": positions, "loss_mask": ~starts}


def time_steps(update: Callable[[dict[str, np.ndarray], int], float], variant: Variant = VARIANT) -> dict[str, Any]:
    """The first loss, and CPU-seconds and seconds of each step after the warm-up."""
    losses, cpu_s, wall_s = [], [], []
    for step in range(WARM_UP + STEPS):
        rows = generate_rows(step, variant)
        cpu, wall = time.process_time(), time.perf_counter()
        losses.append(update(rows, step))
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    peak = peak_memory_bytes()
    return {
        "losses": losses,
        "cpu_s": cpu_s[WARM_UP:],
        "wall_s": wall_s[WARM_UP:],
        "first_step_cpu_s": cpu_s[0],
        "peak_memory_bytes": peak,
    }


def recipe_of(folder: Path) -> Recipe:
    return build_recipe(
        {
            "checkpoint": str(folder),
            "data": {"train": "not read", "max_length": LENGTH},
            "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0},
            "optimizer": {"learning_rate": RATE},
            "train": {"global_batch_size": ROWS, "dtype": "float32"},
        }
    )


def train_ours(folder: Path, variant: Variant = VARIANT) -> dict[str, Any]:
    import jax
    from flax import nnx

    from gemsmith.checkpoints.folder import open_checkpoint
    from gemsmith.train.jax.backend import adapted_model
    from gemsmith.train.jax.compile import Compiled, compile_program
    from gemsmith.train.jax.mesh import make_mesh, micro_batches_on
    from gemsmith.train.jax.step import input_shapes, make_optimizer, make_step
    from gemsmith.train.resume import Stop

    recipe = recipe_of(folder)
    mesh = make_mesh(recipe, variant)
    model = adapted_model(recipe, open_checkpoint(str(folder)), mesh)
    optimizer = nnx.Optimizer(model, make_optimizer(recipe.optimizer), wrt=nnx.LoRAParam)
    step = make_step(model, optimizer, lora=recipe.lora, seed=0, micro_batches=micro_batches_on(recipe, variant, mesh))
    shapes = input_shapes(mesh, rows=ROWS, length=LENGTH)
    compiled: Compiled | None = None
    trained, moments = step.trained, step.moments

    def update(rows: dict[str, np.ndarray], number: int) -> float:
        nonlocal compiled, trained, moments
        compiled = compiled or compile_program(
            step.update, (step.trained, step.moments, step.frozen, shapes), Stop(), recipe.train
        )
        assert compiled is not None, "nothing stops it"
        values: dict[str, Any] = rows | {"learning_rate": RATE, "step": number + 1, "skip_above": np.inf, "stop": 0}
        inputs = {
            name: jax.device_put(np.full(like.shape, values[name], like.dtype), like.sharding)
            for name, like in shapes.items()
        }
        trained, moments, metrics = compiled.update(trained, moments, step.frozen, inputs)
        return float(metrics["loss"])

    return time_steps(update, variant)


def train_theirs(folder: Path, attention: str, threads: int) -> dict[str, Any]:
    """Packed as transformers packs: position ids that restart, and no attention mask, from which it makes the
    block-diagonal one.
    """
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    # By their kinds alone PEFT would find those of the vision tower as well, of a class that it does not know.
    names = target_pattern(target.module for target in lora_targets(VARIANT))
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=names))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trained) == 2 * len(lora_targets(VARIANT)), "PEFT adapts other modules"
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    model.train()

    def update(rows: dict[str, np.ndarray], number: int) -> float:  # noqa: ARG001 - theirs counts steps itself
        tokens, positions = torch.tensor(rows["tokens"]), torch.tensor(rows["positions"])
        labels = torch.where(torch.tensor(rows["loss_mask"]), tokens, -100)
        loss = model(input_ids=tokens, position_ids=positions, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return time_steps(update)


def run_side(side: str, folder: Path, threads: int) -> dict[str, Any]:
    """One side's times, measured in a process of its own on the first `threads` cores."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    command = [sys.executable, __file__, side, str(folder), str(threads)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def measure(folder: Path, threads: int, pairs: int) -> dict[str, Any]:
    """Medians over all steps of all pairs; of theirs, with the attention that was faster in a run before the pairs."""
    trials = {side: run_side(side, folder, threads) for side in THEIRS if len(THEIRS) > 1}
    theirs = min(trials, key=lambda side: statistics.median(trials[side]["cpu_s"]), default=THEIRS[0])
    runs: dict[str, list[dict[str, Any]]] = {OURS: [], theirs: []}
    for pair in range(pairs):
        for side in (OURS, theirs) if pair % 2 else (theirs, OURS):
            runs[side].append(run_side(side, folder, threads))
            print(threads, side, [round(seconds, 2) for seconds in runs[side][-1]["cpu_s"]], file=sys.stderr)
    sides = {side: summary(results) for side, results in runs.items()}
    ratios = {
        f"{unit}_ratio": round(sides[OURS][unit]["median"] / sides[theirs][unit]["median"], 3)
        for unit in ("cpu_s", "wall_s")
    }
    other = {side: summary([trials[side]]) for side in trials if side != theirs}
    return {"sides": sides, "ours_over_theirs": ratios, "theirs_not_taken": other}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"first_losses": sorted({result["losses"][0] for result in results})}
    for unit in ("cpu_s", "wall_s"):
        seconds = sorted(second for result in results for second in result[unit])
        figures[unit] = {
            "median": round(statistics.median(seconds), 3),
            "low": round(seconds[0], 3),
            "high": round(seconds[-1], 3),
        }
    figures["tokens_per_s"] = round(ROWS * LENGTH / figures["wall_s"]["median"], 1)
    figures["tokens_per_cpu_s"] = round(ROWS * LENGTH / figures["cpu_s"]["median"], 1)
    figures["first_step_cpu_s"] = round(statistics.median(result["first_step_cpu_s"] for result in results), 2)
    figures["peak_memory_bytes"] = max(result["peak_memory_bytes"] for result in results)
    return figures | {"steps": STEPS * len(results)}


def check_losses(threads: dict[str, dict[str, Any]]) -> None:
    losses = [loss for result in threads.values() for side in result["sides"].values() for loss in side["first_losses"]]
    if max(losses) - min(losses) > 1e-5 * max(losses):
        sys.exit(f"error: the sides do not compute the same: first losses {sorted(losses)}")


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 1 if SHORT else 2
    with tempfile.TemporaryDirectory() as temporary:
        from tiny_checkpoints import make_checkpoint

        folder = make_checkpoint(VARIANT, Path(temporary) / "base", dtype="float32", shards=1)
        threads = {str(count): measure(folder, count, pairs) for count in ((2,) if SHORT else (1, 2))}
    record = {
        "schema_version": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "gemsmith": __version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for names in PACKAGES.values() for name in names},
        "machine": host_info().model_dump(),
        "variant": asdict(VARIANT),
        "parameters": sum(int(np.prod(tensor.shape)) for tensor in text_tensors(VARIANT)),
        "step": {
            "rows": ROWS,
            "length": LENGTH,
            "mean_document": MEAN_DOCUMENT,
            "rank": RANK,
            "remat": "auto",
            "dropout": 0.0,
        },
        "pairs": pairs,
        "threads": threads,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(threads, indent=1))
    check_losses(threads)


def main_of_side(side: str, folder: Path, threads: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    result = train_ours(folder) if side == OURS else train_theirs(folder, side.removeprefix("peft-"), threads)
    print(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main_of_side(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
